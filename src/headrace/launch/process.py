"""A launched process: start it, stop it, collect stop signals; and stop with the launcher, even if that was killed.

The launcher holds the write end of a pipe, the lifeline, and never writes; every process that it starts reads from the
other end. When the launcher ends, the kernel closes the pipe and the process stops itself. (Linux's parent-death signal
does the same, but not on macOS.) torchrun does not pass the pipe on to a rank: a rank polls its parent process id.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from headrace.launch.hosts.base import HostProcess, ProcessSpec

log = logging.getLogger(__name__)

RANK_VARIABLES = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"})
"""Removed from the environment of a child: a cluster may have set them, but only we decide what is a rank."""
TORCHRUN_VAR = "TORCHELASTIC_RUN_ID"
"""Set in a process that torchrun has started."""
PARENT_VAR = "HEADRACE_RANKS_OF"
"""The process id of the parent of the ranks; it may have ended before they read it."""
LIFELINE_VAR = "HEADRACE_LIFELINE"
"""The file descriptor to read from."""
PARENT_POLL_S = 0.2
RSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024
"""Unit of `ru_maxrss`."""
GRACE_S = 10.0
"""Time to stop in order before the process and its children are killed."""


class Process(HostProcess):
    """A child process in its own session, so that Ctrl-C in the terminal reaches only the launcher."""

    def __init__(self, spec: ProcessSpec, log: Path, lifeline: Lifeline, inherited: Sequence[int] = ()) -> None:
        super().__init__(spec, log)
        inherited_env = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
        with open(log, "ab") as output:
            self._popen = subprocess.Popen(
                list(spec.argv),
                env={**inherited_env, **spec.env, LIFELINE_VAR: str(lifeline.read_end)},
                pass_fds=(lifeline.read_end, *inherited),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._popen.pid
        self._reaping = threading.Lock()
        self._is_cleared = False

    @property
    def exit_status(self) -> int | None:
        with self._reaping:
            if self._popen.returncode is not None:
                return self._popen.returncode
            try:  # instead of `poll`, which discards the resource usage
                pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            except ChildProcessError:  # this process ignores SIGCHLD
                return self._popen.poll()
            if pid:
                self._popen.returncode = os.waitstatus_to_exitcode(status)
                self.peak_bytes = usage.ru_maxrss * RSS_UNIT_BYTES
            return self._popen.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.running:
            os.kill(self.pid, number)  # not reaped yet, so that no other process has its id

    def kill(self) -> None:
        if self._is_cleared:
            return  # the system may have reused its process id since
        self._is_cleared = not self.running
        with suppress(ProcessLookupError, PermissionError):  # the group is empty; macOS reports EPERM
            os.killpg(self.pid, signal.SIGKILL)


class Lifeline:
    """The launcher's end of the pipe. Closing it stops the processes."""

    def __init__(self) -> None:
        self.read_end, self._write_end = os.pipe()

    def close(self) -> None:
        os.close(self.read_end)
        os.close(self._write_end)


def stop_with_launcher(grace_s: float = GRACE_S) -> None:
    """Stop this process when its launcher has ended. Does nothing in a process that was not started by a launcher."""
    descriptor = int(os.environ.pop(LIFELINE_VAR, "-1"))
    parent = int(os.environ.get(PARENT_VAR, os.getppid()))

    def wait_for_parent() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        os.kill(os.getpid(), signal.SIGKILL)  # at once: its replacement may start at any moment

    def wait_for_launcher() -> None:
        os.read(descriptor, 1)  # blocks until the launcher's end is closed
        log.warning("the launcher has ended: stopping")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_s)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    if TORCHRUN_VAR in os.environ:
        threading.Thread(target=wait_for_parent, name="lifeline", daemon=True).start()
    elif descriptor >= 0:
        os.set_inheritable(descriptor, False)
        threading.Thread(target=wait_for_launcher, name="lifeline", daemon=True).start()


SAVE_AND_STOP = signal.SIGUSR1


@contextmanager
def signals_to(received: list[int]) -> Iterator[None]:
    """Append received stop signals to a list instead of ending the process."""

    def collect(number: int, frame: FrameType | None) -> None:
        received.append(number)

    numbers = [signal.SIGINT, signal.SIGTERM, SAVE_AND_STOP]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under nohup it stays ignored
        numbers.append(signal.SIGHUP)
    previous = {number: signal.signal(number, collect) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
