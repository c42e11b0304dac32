"""Evaluation: when it is due, and its numbers."""

from headrace.orchestrator.evaluation import EvalEnv, EvalSink, EvalSource
from headrace.rollout.types import Rollout, RolloutError, Task, Turn


def env(interval: int = 10, tasks: int = 2, group_size: int = 1) -> EvalEnv:
    return EvalEnv("heldout", [Task("heldout", {"n": n}) for n in range(tasks)], interval, group_size)


def due_versions(source: EvalSource, versions: list[int]) -> list[int]:
    found = []
    for version in versions:
        for entry in source.due(version):
            source.open(entry, version)
            found.append(version)
    return found


def test_the_base_model_is_evaluated_then_every_multiple_of_the_interval():
    assert due_versions(EvalSource([env()], evaluated={}), list(range(25))) == [0, 10, 20]


def test_the_base_model_can_be_left_out():
    assert due_versions(EvalSource([env()], evaluated={"heldout": 0}), list(range(25))) == [10, 20]


def test_a_skipped_multiple_fires_once_at_the_first_version_past_it():
    assert due_versions(EvalSource([env()], evaluated={"heldout": 0}), [9, 12, 13, 31, 32]) == [12, 31]


def test_a_resumed_step_is_not_evaluated_again():
    assert due_versions(EvalSource([env()], evaluated={"heldout": 30}), [30, 31, 40]) == [40]


def test_the_last_version_is_evaluated_only_if_it_was_not():
    source = EvalSource([env()], evaluated={"heldout": 0})
    due_versions(source, [10])
    assert source.overdue_at_end(10) == []
    assert [entry.name for entry in source.overdue_at_end(12)] == ["heldout"]


def rollout(reward: float, versions: list[int]) -> Rollout:
    turn = Turn([1], [2] * len(versions), [0.0] * len(versions), versions, 1.0)
    return Rollout(reward=reward, rewards={"r": reward}, turns=[turn])


def test_avg_and_pass_at_k_count_tasks_and_episodes():
    entry = env(tasks=2, group_size=2)
    source, sink = EvalSource([entry], {}), EvalSink()
    first, second = source.open(entry, 0)
    sink.open(entry, 0, [first, second])
    assert sink.add(first, [rollout(1.0, [0, 0])], False) is None
    assert sink.add(first, [rollout(0.5, [0, 1])], True) is None
    assert sink.add(second, [rollout(0.0, [1])], False) is None
    failed = Rollout(error=RolloutError("timeout"))
    result = sink.add(second, [failed], True)
    assert result is not None
    # Three finished episodes: (1 + .5 + 0) / 3; one of two tasks was solved once; one of four failed.
    assert result.metrics["eval/heldout/avg@2"] == 0.5
    assert result.metrics["eval/heldout/pass@2"] == 0.5
    assert result.metrics["eval/heldout/errors"] == 0.25
    assert (result.metrics["eval/heldout/version/min"], result.metrics["eval/heldout/version/max"]) == (0, 1)
