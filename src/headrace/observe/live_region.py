"""A region of lines at the end of a terminal's output that is redrawn in place, below permanent lines."""

from __future__ import annotations

from collections import deque

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

REPEATED_LINES = 8
"""Permanent lines that are printed again after a resize."""


class LiveRegion:
    """A few lines that are redrawn in place.

    After a resize, terminals have wrapped the old lines in different ways, so they cannot be erased one by one: the
    screen is cleared, and the newest permanent lines are printed again above the region.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._messages: deque[str] = deque(maxlen=REPEATED_LINES)
        self._start()

    def _start(self) -> None:
        self._size = self.console.size
        self._live = Live(console=self.console, auto_refresh=False)
        self._live.start()

    def draw(self, content: RenderableType) -> None:
        if self.console.size != self._size:
            self._live.stop()
            self.console.clear()
            for message in self._messages:
                self.console.print(Text(message))
            self._start()
        self._live.update(content, refresh=True)

    def say(self, message: str) -> None:
        self._messages.append(message)
        self.console.print(Text(message))

    def close(self, content: RenderableType) -> None:
        self.draw(content)
        self._live.stop()
