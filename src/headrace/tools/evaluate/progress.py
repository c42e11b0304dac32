"""How far each model of an evaluation has come: a bar each on a terminal, else a line at its beginning and end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Show = Callable[[str, int, int], AbstractContextManager[Callable[[], None]]]


@contextmanager
def showing_progress(console: Console) -> Iterator[Show]:
    """Yield what shows a model from so many of its episodes to all of them; called back as each one ends."""
    if not console.is_terminal:
        yield _lines(console)
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as bars:

        @contextmanager
        def show(name: str, done: int, total: int) -> Iterator[Callable[[], None]]:
            task = bars.add_task(escape(name), total=total, completed=done)
            yield lambda: bars.advance(task)
            bars.stop_task(task)

        yield show


def _lines(console: Console) -> Show:
    @contextmanager
    def show(name: str, done: int, total: int) -> Iterator[Callable[[], None]]:
        ended = done

        def count() -> None:
            nonlocal ended
            ended += 1

        _say(console, f"{name}: {total - done} of {total} episodes to run")
        try:
            yield count
        finally:
            _say(console, f"{name}: {ended} of {total} episodes done")

    return show


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, soft_wrap=True)
