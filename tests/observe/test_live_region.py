"""Lines that are redrawn in place, on a terminal that changes its size."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from headrace.observe.terminal import LiveRegion

CLEAR = "\x1b[2J\x1b[H"


@pytest.fixture
def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=80, height=24, legacy_windows=False)


def written(terminal: Console) -> str:
    assert isinstance(terminal.file, io.StringIO)
    return terminal.file.getvalue()


def test_after_a_resize_the_screen_is_cleared_and_the_lines_that_stay_come_again(terminal: Console) -> None:
    region = LiveRegion(terminal)
    region.say("starting the trainer")
    region.draw("first")
    region.draw("second")
    assert CLEAR not in written(terminal)
    terminal.size = (40, 24)
    region.draw("third")
    region.finish("fourth")
    before, cleared, after = written(terminal).partition(CLEAR)
    assert cleared
    assert "starting the trainer" in before
    assert after.index("starting the trainer") < after.index("third") < after.index("fourth")
    assert "first" not in after
    assert "second" not in after
    assert CLEAR not in after
