"""The terminal of our commands: rich with escaped text instead of markup, and tables without borders."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

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


def plain_table(*titles: str, left: Collection[str] = (), gap: int = 2) -> Table:
    """Return a table without borders; its first column and those in `left` are aligned left, the others right.

    In a narrow terminal, texts on the left are wrapped before digits on the right are lost. `gap` is the number of
    spaces between columns.
    """
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    for number, title in enumerate(titles):
        is_text = number == 0 or title in left
        table.add_column(Text(title), justify="left" if is_text else "right", no_wrap=not is_text)
    return table
