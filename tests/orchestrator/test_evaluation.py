"""Evaluation: when it is due, and its numbers."""

import pytest

from headrace.errors import BadInput
from headrace.orchestrator.evaluation import EvalEnv, EvalSink, EvalSource
from headrace.orchestrator.signals import Kind, ScoredGroup
from headrace.rollout.types import Group, Task


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


def scored(group: Group) -> ScoredGroup:
    return ScoredGroup(Kind.EVAL, group, [], [])


def test_the_last_group_of_an_epoch_completes_it_whichever_that_is():
    entry = env(tasks=3)
    source, sink = EvalSource([entry], {}), EvalSink()
    first, second, third = source.open(entry, 7)
    sink.open(entry, 7, [first, second, third])
    assert sink.add(scored(third)) is None
    assert sink.add(scored(first)) is None
    batch = sink.add(scored(second))
    assert batch is not None
    assert (batch.env, batch.version, len(batch.groups)) == ("heldout", 7, 3)
    assert sink.open_epochs == 1
    sink.close()
    assert sink.open_epochs == 0


def test_epochs_of_one_environment_may_overlap():
    entry = env(tasks=1)
    source, sink = EvalSource([entry], {}), EvalSink()
    (early,), (late,) = source.open(entry, 0), source.open(entry, 10)
    sink.open(entry, 0, [early])
    sink.open(entry, 10, [late])
    batch = sink.add(scored(late))
    assert batch is not None
    assert batch.version == 10


def test_a_pinned_epoch_holds_the_version_until_its_last_group_is_in():
    entry = EvalEnv("heldout", [Task("heldout", {"n": n}) for n in range(2)], 10, 1, pinned=True)
    source, sink = EvalSource([entry], {}), EvalSink()
    first, second = source.open(entry, 0)
    sink.open(entry, 0, [first, second])
    sink.add(scored(first))
    assert sink.pins_version
    sink.add(scored(second))
    assert not sink.pins_version


def test_an_environment_without_tasks_is_refused_by_name():
    with pytest.raises(BadInput, match="'heldout' has no tasks"):
        EvalSource([env(tasks=0)], {})


def test_a_rewound_trainer_has_what_it_lost_evaluated_again():
    source = EvalSource([env()], evaluated={"heldout": 0})
    due_versions(source, [10, 20])
    source.rewind(15)
    assert due_versions(source, [15, 16, 20, 21]) == [20]
