"""When a stalled run is reported, in simulated time."""

from __future__ import annotations

import pytest

from headrace.launch.watch import Watch, not_up
from headrace.observe.status import ObservedStatus, Progress


def status(name: str, state: str = "working", waiting_s: float = 0.0, silent_s: float = 0.0) -> ObservedStatus:
    waiting_for = "batch 3 from the orchestrator" if waiting_s else ""
    return ObservedStatus(name, 1, 1000.0, state, waiting_for, 1000.0 - waiting_s, silent_s=silent_s)


def reported_at(watch: Watch, until: int, progress_at: frozenset[int] = frozenset()) -> list[int]:
    moments, progress = [], 0
    for now in range(until):
        progress += now in progress_at
        if watch.find_problems(now, progress, {"trainer": status("trainer")}):
            moments.append(now)
    return moments


def test_a_stall_is_reported_after_a_minute_and_then_at_growing_intervals() -> None:
    assert reported_at(Watch(0.0), 600) == [60, 120, 240, 480]


def test_progress_restarts_the_minute() -> None:
    assert reported_at(Watch(0.0), 200, progress_at=frozenset({0, 50, 100})) == [160]


@pytest.mark.parametrize(
    ("step_seconds", "threshold"),
    [([], 60), ([2.0, 3.0], 60), ([84.0], 252), ([500.0, *[30.0] * 10], 90)],
)
def test_a_stall_is_judged_by_the_longest_recent_step(step_seconds: list[float], threshold: float) -> None:
    watch, statuses = Watch(0.0), {"trainer": status("trainer")}
    assert watch.find_problems(threshold - 1, 0, statuses, step_seconds) == []
    assert len(watch.find_problems(threshold, 0, statuses, step_seconds)) == 1


def test_steps_that_take_longer_than_a_minute_are_not_called_a_stall() -> None:
    watch = Watch(0.0)
    reported = [now for now in range(600) if watch.find_problems(now, now // 84, {}, [84.0] * (now // 84))]
    assert reported == [60]  # in the first step, when no length is known


def test_a_micro_batch_counts_as_progress() -> None:
    def training(now: int) -> dict[str, ObservedStatus]:
        micro_batch = Progress("micro-batch", min(now // 50, 4), 4, 0.0)
        return {"trainer": ObservedStatus("trainer", 1, now, "training step 1", progress=micro_batch)}

    watch = Watch(0.0)
    assert [now for now in range(300) if watch.find_problems(now, 0, training(now))] == [260]


def test_a_reported_problem_is_not_a_stall() -> None:
    retrying = ObservedStatus("orchestrator", 1, 0.0, "collecting batch 1", problem="every reward was 0")
    watch = Watch(0.0)
    for now in range(300):
        assert watch.find_problems(now, 0, {"orchestrator": retrying}) == []


def test_the_message_has_the_activity_of_each_process() -> None:
    statuses = {
        "inference": status("inference", "serving"),
        "trainer": status("trainer", "idle", waiting_s=55),
    }
    assert Watch(0.0).find_problems(60, 0, statuses) == [
        "no progress for 60 s (no step has finished yet). "
        "inference: serving; trainer: idle, waiting for batch 3 from the orchestrator (55 s)"
    ]


def test_a_silent_process_is_named_once_and_again_only_after_twice_the_time() -> None:
    watch = Watch(0.0)
    silent = (status("trainer", silent_s=now) for now in range(300))
    reported = [now for now, trainer in enumerate(silent) if watch.find_problems(now, now, {"trainer": trainer})]
    assert reported == [60, 120, 240]


def test_a_process_is_up_once_it_does_something_else_than_starting() -> None:
    statuses = {
        "inference": status("inference", "serving"),
        "trainer": status("trainer", "starting", waiting_s=5),
    }
    assert not_up(["inference", "trainer", "orchestrator"], statuses) == [
        "trainer (starting, waiting for batch 3 from the orchestrator (5 s))",
        "orchestrator (has not reported yet)",
    ]
