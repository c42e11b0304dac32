"""Signals that stop a launcher or a node agent, collected instead of handled at once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

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
