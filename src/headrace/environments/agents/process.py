"""Agents that are programs: each episode runs one, and none is left behind, however the episode or this process ends.

A program and whatever it has started is one process group, which is killed when the program has ended or its episode
is cancelled. If this process is killed, a reaper beside it does the same (`reaper.py`). Output goes to files: a program
can never be held up by pipes that nobody reads.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from headrace.environments.agents import reaper
from headrace.environments.agents.environment import AgentCrashed
from headrace.environments.child_process import describe_exit, kill_group

TAIL = 2000
"""Characters at the end of what a failed program had to say for itself."""
MOST_OUTPUT = 16 << 20


class Processes:
    """The programs that run, and their reaper."""

    def __init__(self) -> None:
        self._running: set[int] = set()
        self._reaper: subprocess.Popen[bytes] | None = None

    async def run(self, command: Sequence[str], given: bytes, variables: Mapping[str, str]) -> str:
        """What the program writes when it is given this on its standard input. Raises `AgentCrashed`."""
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=errors,
                env=dict(variables),
                start_new_session=True,
            )
            try:
                self._watch(process.pid)
                status = await _fed(process, given)  # which begins when it can no longer be left behind
            finally:
                await self._end(process)
            if status != 0:
                said = _read(errors)[-TAIL:].strip() or "nothing on its standard error"
                raise AgentCrashed(f"the program {describe_exit(status)}; it said: {said}", place=f"status {status}")
            return _read(output)

    async def close(self) -> None:
        """End what still runs."""
        if self._reaper is not None:
            assert self._reaper.stdin is not None
            self._reaper.stdin.close()
            await asyncio.to_thread(self._reaper.wait)
            self._reaper = None

    def _watch(self, group: int) -> None:
        self._running.add(group)
        if self._reaper is None or self._reaper.poll() is not None:  # somebody has killed it
            self._reaper = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(reaper.__file__))],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
            for known in self._running - {group}:
                self._tell(f"+{known}\n")
        self._tell(f"+{group}\n")

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """Of the program itself, and of all that it has left in its group."""
        kill_group(process.pid)
        await process.wait()
        self._running.discard(process.pid)
        with suppress(BrokenPipeError):  # the next program starts another reaper
            self._tell(f"-{process.pid}\n")

    def _tell(self, line: str) -> None:
        if self._reaper is not None and self._reaper.stdin is not None:
            self._reaper.stdin.write(line.encode())
            self._reaper.stdin.flush()


async def _fed(process: asyncio.subprocess.Process, given: bytes) -> int:
    """The exit status, once it has ended; a program need not read what it is given."""
    assert process.stdin is not None
    process.stdin.write(given)
    with suppress(BrokenPipeError, ConnectionResetError):
        await process.stdin.drain()
    process.stdin.close()
    return await process.wait()


def _read(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - MOST_OUTPUT))
    return file.read().decode(errors="replace")
