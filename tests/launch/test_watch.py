"""When a run that has not failed is spoken about, on a clock of our own."""

from __future__ import annotations

from headrace.launch.watch import Watch, not_up
from headrace.observe.status import ProcessStatus


def status(name: str, time: float, state: str = "working", waiting_for: str = "", since: float = 0.0) -> ProcessStatus:
    return ProcessStatus(name, 1, time, state, waiting_for, since)


def spoken_at(watch: Watch, until: int, progress_at: frozenset[int] = frozenset()) -> list[int]:
    moments, progress = [], 0
    for now in range(until):
        progress += now in progress_at
        if watch.look(now, progress, {"trainer": status("trainer", now)}):
            moments.append(now)
    return moments


def test_a_standstill_is_said_after_a_minute_and_then_at_growing_intervals() -> None:
    assert spoken_at(Watch(0.0), 600) == [60, 120, 240, 480]


def test_a_run_that_moves_is_left_in_peace_and_the_minute_starts_anew() -> None:
    assert spoken_at(Watch(0.0), 200, progress_at=frozenset({0, 50, 100})) == [160]


def test_the_sentence_names_what_is_awaited_from_whom_and_since_when() -> None:
    statuses = {
        "inference": status("inference", 60, "serving"),
        "trainer": status("trainer", 60, "idle", "batch 3 from the orchestrator", 5),
    }
    assert Watch(0.0).look(60, 0, statuses) == [
        "nothing has moved for 60 s. "
        "inference: serving; trainer: idle, waiting for batch 3 from the orchestrator (55 s)"
    ]


def test_a_silent_process_is_named_once_and_again_only_after_twice_the_time() -> None:
    watch = Watch(0.0)
    spoken = [now for now in range(300) if watch.look(now, now, {"trainer": status("trainer", 0)})]
    assert spoken == [60, 120, 240]


def test_a_process_is_up_once_it_does_something_else_than_starting() -> None:
    statuses = {
        "inference": status("inference", 9, "serving"),
        "trainer": status("trainer", 9, "starting", "weights from the disk", 4),
    }
    assert not_up(["inference", "trainer", "orchestrator"], statuses, 9.0) == [
        "trainer (starting, waiting for weights from the disk (5 s))",
        "orchestrator (has not reported yet)",
    ]
