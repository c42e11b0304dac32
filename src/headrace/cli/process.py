"""What the processes of a run do alike: lifeline, log, status file, and stopping when asked."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from headrace.observe.status import Status
    from headrace.transport.run_dir import RunDir


@contextmanager
def process(name: str, run: RunDir) -> Iterator[Status]:
    """The surroundings of a process of a run. Its status file says at the end how it ended.

    Of several ranks the first speaks for all; the others have their status files in a place of their own.
    """
    from headrace.launch.errors import naming_run
    from headrace.launch.own_code import add_code_folders_of
    from headrace.launch.process import stop_with_launcher
    from headrace.observe.logs import setup_logging
    from headrace.observe.status import Status

    rank = int(os.environ.get("RANK", "0"))
    setup_logging(f"rank {rank}" if rank else "")
    stop_with_launcher()
    add_code_folders_of(run)
    with naming_run(run.root):
        status = Status(run.status / "ranks", f"{name}-{rank}") if rank else Status(run.status, name)
        try:
            yield status
        except BaseException:
            status.close("failed")
            raise
        status.close("finished")


class StopRequest:
    """Set by SIGTERM or SIGINT. A second one ends the process at once, as does the first before it has begun to work.

    Nobody looks at the request while libraries are imported and a model is loaded, and nothing is lost.
    """

    def __init__(self, status: Status) -> None:
        from headrace.launch.supervisor import is_up

        self.stopped = threading.Event()
        self.exit_code = 0
        self._has_begun: Callable[[], bool] = lambda: is_up(status.current)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.exit_code = 128 + number
        self.stopped.set()
        signal.signal(number, signal.SIG_DFL)
        if not self._has_begun():
            os.kill(os.getpid(), number)


def leave_at_once(code: int) -> NoReturn:
    """End without waiting for threads that a user's code has left behind; everything that matters is on disk."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)
