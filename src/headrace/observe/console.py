"""The terminal of our commands: rich, with the text of others escaped and without markup in it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from headrace.safe_text import escape_control, unescaped


class SafeConsole(Console):
    """A console for text that is not ours: strings are no markup, and only rich itself writes control codes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    @property
    def file(self) -> IO[str]:
        return unescaped(super().file)  # type: ignore[no-any-return]

    @file.setter
    def file(self, file: IO[str]) -> None:
        self._file = file

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(escape_control(segment.text), segment.style)
