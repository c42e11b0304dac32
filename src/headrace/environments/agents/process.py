"""Agents that are programs: one process per episode, which never outlives the episode or this process.

A program and all that it has started form a process group, which is killed when the program ends or its episode is
cancelled. If this process is killed, a separate reaper process does the same (`reaper.py`). Output goes to files, so
that a full pipe never blocks a program.
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

MAX_ERROR_CHARS = 2000
"""Characters at the end of a failed program's standard error that are reported."""
MAX_OUTPUT_BYTES = 16 << 20


class Processes:
    """The running programs, and their reaper."""

    def __init__(self) -> None:
        self._running: set[int] = set()
        self._reaper: subprocess.Popen[bytes] | None = None

    async def run(self, command: Sequence[str], stdin: bytes, variables: Mapping[str, str]) -> str:
        """Run a program with this standard input and return its standard output. Raises `AgentCrashed`."""
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
                status = await _feed(process, stdin)  # the program starts once it has its input, when it is watched
            finally:
                await self._end(process)
            if status != 0:
                text = _read(errors)[-MAX_ERROR_CHARS:].strip() or "empty"
                raise AgentCrashed(
                    f"the program {describe_exit(status)}; its standard error: {text}", place=f"status {status}"
                )
            return _read(output)

    async def close(self) -> None:
        """End the reaper, which kills what still runs."""
        if self._reaper is not None:
            assert self._reaper.stdin is not None
            self._reaper.stdin.close()
            await asyncio.to_thread(self._reaper.wait)
            self._reaper = None

    def _watch(self, group: int) -> None:
        self._running.add(group)
        if self._reaper is None or self._reaper.poll() is not None:  # it was killed
            self._reaper = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(reaper.__file__))],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
            for other in self._running - {group}:
                self._notify(f"+{other}\n")
        self._notify(f"+{group}\n")

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """Kill the program and its process group."""
        kill_group(process.pid)
        await process.wait()
        self._running.discard(process.pid)
        with suppress(BrokenPipeError):  # the next program starts another reaper
            self._notify(f"-{process.pid}\n")

    def _notify(self, line: str) -> None:
        if self._reaper is not None and self._reaper.stdin is not None:
            self._reaper.stdin.write(line.encode())
            self._reaper.stdin.flush()


async def _feed(process: asyncio.subprocess.Process, stdin: bytes) -> int:
    """Write its standard input, which it may leave unread, and return its exit status."""
    assert process.stdin is not None
    process.stdin.write(stdin)
    with suppress(BrokenPipeError, ConnectionResetError):
        await process.stdin.drain()
    process.stdin.close()
    return await process.wait()


def _read(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - MAX_OUTPUT_BYTES))
    return file.read().decode(errors="replace")
