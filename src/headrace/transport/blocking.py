"""Files that may block the process that opens them: FIFOs, devices, and files on a mount whose server is gone.

The first two are refused before they are opened. No check finds the third, so a thread that can be left behind reads.
"""

from __future__ import annotations

import errno
import stat
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def require_regular(path: Path) -> Path:
    """Return the path of a regular file; raises `OSError` for another one or none."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return path


def in_daemon_thread(function: Callable[[], T]) -> Future[T]:
    """Run a function in a thread of its own, which does not delay the end of the process.

    The threads of executors would: the interpreter waits for them.
    """
    future: Future[T] = Future()

    def run() -> None:
        future.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=f"reading-{id(future):x}", daemon=True).start()
    return future
