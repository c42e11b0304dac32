"""Stop a process when its launcher has ended, even if the launcher was killed.

The launcher holds the write end of a pipe and never writes; every process that it starts reads from the other end. When
the launcher ends, the kernel closes the pipe and the process stops itself. (Linux's parent-death signal does the same,
but not on macOS.) torchrun does not pass the pipe on to a rank: a rank polls its parent process id instead.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

log = logging.getLogger(__name__)

TORCHRUN_VAR = "TORCHELASTIC_RUN_ID"
"""Set in a process that torchrun has started."""
PARENT_VAR = "HEADRACE_RANKS_OF"
"""The process id of the parent of the ranks; it may have ended before they read it."""
LIFELINE_VAR = "HEADRACE_LIFELINE"
"""The file descriptor to read from."""
PARENT_POLL_S = 0.2
GRACE_S = 10.0
"""Time to stop in order before the process and its children are killed."""


class Lifeline:
    """The launcher's end of the pipe. Closing it stops the processes."""

    def __init__(self) -> None:
        self.read_end, self._write_end = os.pipe()

    def close(self) -> None:
        os.close(self.read_end)
        os.close(self._write_end)


def watch(grace_s: float = GRACE_S) -> None:
    """Stop this process when its launcher has ended. Does nothing in a process that was not started by a launcher."""
    descriptor = os.environ.pop(LIFELINE_VAR, None)
    if TORCHRUN_VAR in os.environ:
        parent = int(os.environ.get(PARENT_VAR, os.getppid()))
        threading.Thread(target=_wait_for_parent, args=(parent,), name="lifeline", daemon=True).start()
        return
    if descriptor is None:
        return
    os.set_inheritable(int(descriptor), False)
    threading.Thread(target=_wait, args=(int(descriptor), grace_s), name="lifeline", daemon=True).start()


def _wait_for_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)  # at once: its replacement may start at any moment


def _wait(descriptor: int, grace_s: float) -> None:
    os.read(descriptor, 1)  # blocks until the launcher's end is closed
    log.warning("the launcher has ended: stopping")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
