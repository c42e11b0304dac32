"""The garbage collector of a process that has loaded everything."""

import gc

from headrace.machine import frozen_gc


class Loop:
    """An object that only the cyclic garbage collector deletes."""

    def __init__(self) -> None:
        self.own = self
        made.append(self)

    def __del__(self) -> None:
        deleted.append(id(self))


made: list[Loop] = []
deleted: list[int] = []


def test_objects_from_before_are_not_collected_while_frozen():
    older = id(Loop())
    with frozen_gc():
        newer = id(Loop())
        made.clear()
        gc.collect()
        assert deleted == [newer]
    gc.collect()
    assert deleted == [newer, older]
