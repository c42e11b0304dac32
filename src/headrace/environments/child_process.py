"""Child processes that end with their parent: those that run episodes, and those that run a single function.

A child inherits two descriptors, whose numbers are its arguments: a socket to the parent, and the read end of a pipe
(the lifeline) that closes when the parent ends for any reason.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headrace.safe_text import escape_output

PR_SET_CHILD_SUBREAPER = 36
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Environment variables for a process that runs one call at a time."""


@contextmanager
def connect_to_child() -> Iterator[tuple[socket.socket, int, tuple[int, int]]]:
    """Open the connection of a child, which must be started in the block.

    Yields our socket, our end of the lifeline, and the two descriptors for the child. The child's descriptors
    are closed afterwards; ours only if the block raises.
    """
    ours, theirs = socket.socketpair()
    watched, lifeline = os.pipe()
    try:
        yield ours, lifeline, (theirs.fileno(), watched)
    except BaseException:
        ours.close()
        os.close(lifeline)
        raise
    finally:
        theirs.close()
        os.close(watched)


def connect_to_parent() -> socket.socket:
    """Return a child's socket to its parent, have this process end with the parent, and escape what it prints."""
    escape_output()
    channel, lifeline = int(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end
    for descriptor in (channel, lifeline):
        os.set_inheritable(descriptor, False)  # grandchildren must not hold them open
    _end_with_parent(lifeline)
    return socket.socket(fileno=channel)


def _end_with_parent(lifeline: int) -> None:
    """Have the kernel end this process group when the parent's end of the pipe closes.

    A thread that waits for it could not run while C code (a regular expression, a huge power) holds the interpreter.
    """
    if sys.platform == "linux":
        signal.signal(signal.SIGIO, signal.SIG_DFL)  # ends the process
    else:  # other systems ignore SIGIO by default
        signal.signal(signal.SIGIO, lambda number, frame: os._exit(1))
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # closed before the signal was set up
        os._exit(1)


def kill_group(pid: int) -> None:
    """Kill a process that leads its group, and all processes in the group."""
    with suppress(ProcessLookupError, PermissionError):  # the group is empty, which macOS reports as EPERM
        os.killpg(pid, signal.SIGKILL)


def describe_exit(status: int) -> str:
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"


def resident_mb(pid: int) -> float:
    """Return the resident memory of a process in MiB; 0 if it has ended or the system does not report it."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ends. Only on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
