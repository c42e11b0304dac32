"""What exists once everything is loaded is left alone."""

import gc

from headrace.garbage import settled


class Loop:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.own = self
        made.append(self)

    def __del__(self) -> None:
        deleted.append(id(self))


made: list[Loop] = []
deleted: list[int] = []


def test_collections_look_at_what_came_since_and_at_nothing_older():
    older = id(Loop())
    with settled():
        newer = id(Loop())
        made.clear()
        gc.collect()
        assert deleted == [newer]
    gc.collect()
    assert deleted == [newer, older]
