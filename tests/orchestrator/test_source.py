"""The training source: weighted, seeded, and the same after a restart."""

from collections import Counter

import pytest

from headrace.orchestrator.source import TrainSource, TrainTasks
from headrace.rollout.types import Task


def tasks(env: str, count: int, weight: float = 1.0) -> TrainTasks:
    return TrainTasks(env, [Task(env, {"n": n}) for n in range(count)], weight)


def test_every_task_comes_once_before_any_comes_again():
    source = TrainSource([tasks("a", 10)], seed=0)
    first, second = ([source.draw()[1].data["n"] for _ in range(10)] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_draws_follow_the_weights():
    source = TrainSource([tasks("a", 5, 3.0), tasks("b", 5, 1.0)], seed=0)
    counts = Counter(source.draw()[0].env for _ in range(4000))
    assert 2850 < counts["a"] < 3150  # 3000 expected, about 27 standard deviation


def test_a_resumed_source_draws_what_an_uninterrupted_one_would_have_drawn():
    environments = [tasks("a", 7, 2.0), tasks("b", 3, 1.0)]
    uninterrupted = TrainSource(environments, seed=5)
    whole = [uninterrupted.draw() for _ in range(50)]
    drawn = dict(Counter(draw.env for draw, _ in whole[:20]))
    open_draws = [whole[4][0], whole[17][0]]
    resumed = TrainSource(environments, 5, drawn, open_draws)
    again = [resumed.draw() for _ in range(32)]
    assert again[:2] == [whole[4], whole[17]]
    assert again[2:] == whole[20:]


def test_an_environment_without_tasks_is_refused_by_name():
    with pytest.raises(ValueError, match="'hollow'"):
        TrainSource([tasks("hollow", 0)], seed=0)


def test_an_open_draw_whose_task_has_changed_is_handed_back_to_be_dropped():
    draw, _ = TrainSource([tasks("a", 5)], seed=0).draw()
    for now in (tasks("b", 5), TrainTasks("a", [Task("a", {"other": n}) for n in range(5)], 1.0)):
        source = TrainSource([now], 0, {"a": 1}, [draw])
        assert source.missing == [draw]
        assert source.draw()[0].id == 1
