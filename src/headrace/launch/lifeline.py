"""How a process notices that its launcher is gone, even one that was killed without a word.

The launcher holds the write end of a pipe and never writes; every process it starts watches the read end. When the
launcher ends, however it ends, the kernel closes the pipe and the process stops itself. (Linux's parent-death signal
would do the same, but not on macOS.) A rank has torchrun between itself and the launcher, which hands no pipe on: it
watches who its parent is.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

log = logging.getLogger(__name__)

TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Set in a process that torchrun has started."""
PARENT = "HEADRACE_RANKS_OF"
"""The process that starts ranks; it may be gone before they look."""
VARIABLE = "HEADRACE_LIFELINE"
"""Carries the file descriptor to watch."""
LOOK_AT_PARENT = 0.2
"""Seconds between two looks at who the parent is."""
GRACE = 10.0
"""Seconds to stop in order before the process and all it has started are killed."""


class Lifeline:
    """The launcher's end. Keep it for as long as the processes shall live."""

    def __init__(self) -> None:
        self.read_end, self._write_end = os.pipe()

    def close(self) -> None:
        os.close(self.read_end)
        os.close(self._write_end)


def watch(grace: float = GRACE) -> None:
    """In a launched process: stop when the launcher is gone. Does nothing in a process that was started by hand."""
    descriptor = os.environ.pop(VARIABLE, None)
    if TORCHRUN in os.environ:
        parent = int(os.environ.get(PARENT, os.getppid()))
        threading.Thread(target=_wait_for_parent, args=(parent,), name="lifeline", daemon=True).start()
        return
    if descriptor is None:
        return
    os.set_inheritable(int(descriptor), False)
    threading.Thread(target=_wait, args=(int(descriptor), grace), name="lifeline", daemon=True).start()


def _wait_for_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_AT_PARENT)
    os.kill(os.getpid(), signal.SIGKILL)  # at once: others may be started in its place any moment


def _wait(descriptor: int, grace: float) -> None:
    os.read(descriptor, 1)  # blocks until the launcher's end is closed
    log.warning("the launcher is gone: stopping")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
