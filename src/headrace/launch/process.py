"""One launched process: how it is started, ended and described."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from headrace.errors import AGAIN, BAD_INPUT
from headrace.launch.lifeline import VARIABLE, Lifeline

LAST_LINES = 15
RANK_VARIABLES = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"})
ASKED_TO_END = frozenset({signal.SIGINT, signal.SIGTERM})
"""Signals by which somebody wants a process to end."""


@dataclass(frozen=True)
class ProcessSpec:
    """What to start. A service runs until it is told to stop; the others end when their work is done."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    service: bool = False
    restart_argv: Sequence[str] | None = None
    """What continues its work after it died, where that is another command."""

    def again(self) -> ProcessSpec:
        return replace(self, argv=self.restart_argv or self.argv)


def _own_environment() -> dict[str, str]:
    """Ours, but for what a cluster may have set: a process is a rank only if we start it as one."""
    return {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}


class Process:
    """A child in a session of its own, so that Ctrl-C in the terminal reaches the launcher alone."""

    def __init__(self, spec: ProcessSpec, log: Path, lifeline: Lifeline, inherited: Sequence[int] = ()) -> None:
        self.spec, self.name, self.log = spec, spec.name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as output:
            self._log_start = output.tell()
            self._popen = subprocess.Popen(
                list(spec.argv),
                env={**_own_environment(), **spec.env, VARIABLE: str(lifeline.read_end)},
                pass_fds=(lifeline.read_end, *inherited),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._popen.pid
        self._is_cleared = False

    @property
    def exit_status(self) -> int | None:
        """None while it runs; negative if a signal ended it."""
        return self._popen.poll()

    @property
    def running(self) -> bool:
        return self.exit_status is None

    def terminate(self) -> None:
        if self.running:
            self._popen.terminate()

    @property
    def was_killed(self) -> bool:
        """Whether it ended without a say in it: out of memory, a segmentation fault."""
        status = self.exit_status
        return status is not None and status < 0 and -status not in ASKED_TO_END

    @property
    def asks_to_start_again(self) -> bool:
        return self.exit_status == AGAIN

    @property
    def refused_input(self) -> bool:
        return self.exit_status == BAD_INPUT

    def kill(self) -> None:
        """End it and whatever it has started. The first call after its end is the last that does anything."""
        if self._is_cleared:
            return  # the system may have given its number to another process since
        self._is_cleared = not self.running
        with suppress(ProcessLookupError, PermissionError):  # nobody is left in its group; macOS says so with EPERM
            os.killpg(self.pid, signal.SIGKILL)

    def wait(self, seconds: float) -> bool:
        """Whether it has ended by then."""
        deadline = time.monotonic() + seconds
        while self.running and time.monotonic() < deadline:
            time.sleep(0.02)
        return not self.running

    def how_it_ended(self) -> str:
        status = self.exit_status
        if status is None:
            return "is still running"
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        if status == AGAIN:
            return "ended: its engine died"
        if status > 128 and status - 128 in signal.valid_signals():
            return f"ended with exit status {status} ({signal.Signals(status - 128).name})"
        return f"ended with exit status {status}"

    def last_lines(self, count: int = LAST_LINES) -> list[str]:
        """The end of what this process, not an earlier one, has written to its log."""
        with open(self.log, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, file.tell() - 16384))
            return file.read().decode(errors="replace").splitlines()[-count:]
