"""Lines that are redrawn in place on a terminal, below lines that stay."""

from __future__ import annotations

from collections import deque

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

REPEATED_LINES = 8
"""Lines that stay and are printed again after a resize."""


class LiveRegion:
    """A picture of a few lines at the end of the output.

    After a resize terminals have wrapped the old picture, each in its own way, so that it cannot be erased line by
    line: the screen is cleared, and the newest lines that stay are printed again above the picture.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._said: deque[str] = deque(maxlen=REPEATED_LINES)
        self._start()

    def _start(self) -> None:
        self._size = self.console.size
        self._live = Live(console=self.console, auto_refresh=False)
        self._live.start()

    def draw(self, picture: RenderableType) -> None:
        if self.console.size != self._size:
            self._live.stop()
            self.console.clear()
            for message in self._said:
                self.console.print(Text(message))
            self._start()
        self._live.update(picture, refresh=True)

    def say(self, message: str) -> None:
        self._said.append(message)
        self.console.print(Text(message))

    def close(self, picture: RenderableType) -> None:
        self.draw(picture)
        self._live.stop()
