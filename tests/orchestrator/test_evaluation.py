"""Evaluation: when it is due, and its numbers."""

from collections.abc import Iterable

import pytest

from headrace.errors import BadInput
from headrace.orchestrator.evaluation import EvalEnv, EvalSource, EvalTracker
from headrace.orchestrator.signals import Kind, ScoredGroup
from headrace.rollout.types import Group, Task
from headrace.rollout.version import Version


def env(interval: int = 10, tasks: int = 2, group_size: int = 1) -> EvalEnv:
    return EvalEnv("heldout", [Task("heldout", {"n": n}) for n in range(tasks)], interval, group_size)


def due_versions(source: EvalSource, steps: Iterable[int], incarnation: int = 0) -> list[int]:
    found = []
    for version in (Version(incarnation, step) for step in steps):
        source.discard_newer(version)
        for entry in source.due(version):
            source.open(entry, version)
            found.append(version.step)
    return found


def test_the_base_model_is_evaluated_then_every_multiple_of_the_interval():
    assert due_versions(EvalSource([env()], evaluated={}), range(25)) == [0, 10, 20]


def test_the_base_model_can_be_left_out():
    assert due_versions(EvalSource([env()], evaluated={"heldout": Version(0, 0)}), range(25)) == [10, 20]


def test_a_skipped_multiple_fires_once_at_the_first_version_past_it():
    assert due_versions(EvalSource([env()], evaluated={"heldout": Version(0, 0)}), [9, 12, 13, 31, 32]) == [12, 31]


def test_a_resumed_step_is_not_evaluated_again():
    assert due_versions(EvalSource([env()], evaluated={"heldout": Version(0, 30)}), [30, 31, 40]) == [40]


def test_the_last_version_is_evaluated_only_if_it_was_not():
    source = EvalSource([env()], evaluated={"heldout": Version(0, 0)})
    due_versions(source, [10])
    assert source.due(Version(0, 10), final=True) == []
    assert [entry.name for entry in source.due(Version(0, 12), final=True)] == ["heldout"]


def scored(group: Group) -> ScoredGroup:
    return ScoredGroup(Kind.EVAL, group, [], [])


def test_the_last_group_of_an_epoch_completes_it_whichever_that_is():
    entry = env(tasks=3)
    source, tracker = EvalSource([entry], {}), EvalTracker()
    first, second, third = source.open(entry, Version(0, 7))
    tracker.open(entry, Version(0, 7), [first, second, third])
    assert tracker.add(scored(third)) is None
    assert tracker.add(scored(first)) is None
    assert tracker.tasks == (2, 3)
    batch = tracker.add(scored(second))
    assert batch is not None
    assert (batch.env, batch.version, len(batch.groups)) == ("heldout", Version(0, 7), 3)
    assert tracker.open_evals == 1
    tracker.record_reported()
    assert tracker.open_evals == 0


def test_epochs_of_one_environment_may_overlap():
    entry = env(tasks=1)
    source, tracker = EvalSource([entry], {}), EvalTracker()
    (early,), (late,) = source.open(entry, Version(0, 0)), source.open(entry, Version(0, 10))
    tracker.open(entry, Version(0, 0), [early])
    tracker.open(entry, Version(0, 10), [late])
    batch = tracker.add(scored(late))
    assert tracker.tasks == (1, 2)
    assert batch is not None
    assert batch.version == Version(0, 10)


def test_a_pinned_epoch_holds_the_version_until_its_last_group_is_in():
    entry = EvalEnv("heldout", [Task("heldout", {"n": n}) for n in range(2)], 10, 1, pinned=True)
    source, tracker = EvalSource([entry], {}), EvalTracker()
    first, second = source.open(entry, Version(0, 0))
    tracker.open(entry, Version(0, 0), [first, second])
    tracker.add(scored(first))
    assert tracker.pinned_evals
    tracker.add(scored(second))
    assert not tracker.pinned_evals


def test_an_environment_without_tasks_is_refused_by_name():
    with pytest.raises(BadInput) as error:
        EvalSource([env(tasks=0)], {})
    assert (error.value.key, error.value.value) == ("orchestrator.eval.env", "heldout")


def test_a_rewound_trainer_has_what_it_lost_evaluated_again():
    source = EvalSource([env()], evaluated={"heldout": Version(0, 0)})
    due_versions(source, [10, 20])
    assert due_versions(source, [15, 16, 20, 21], incarnation=1) == [20]


@pytest.mark.parametrize("seen_before", [[], [58], [0]])
def test_what_a_lost_lineage_evaluated_is_due_again_whatever_the_engines_served_when_the_run_went_on(seen_before):
    source = EvalSource([env()], evaluated={"heldout": Version(0, 50)})
    assert due_versions(source, seen_before) == []  # [0]: what was published died with its trainer
    assert due_versions(source, range(20, 61), incarnation=1) == [30, 40, 50, 60]


def test_what_the_lineage_of_the_engines_has_evaluated_is_not_due_again():
    source = EvalSource([env()], evaluated={"heldout": Version(1, 30)})
    assert due_versions(source, range(30, 45), incarnation=1) == [40]


@pytest.mark.parametrize("seen_before", [[], [58]])
def test_a_resumed_step_is_evaluated_again_if_that_is_wanted(seen_before):
    source = EvalSource([env()], {"heldout": Version(0, 50)}, again_on_resume=True)
    assert due_versions(source, seen_before) == []
    assert due_versions(source, range(20, 45), incarnation=1) == [20, 30, 40]


def test_a_base_model_that_is_left_out_stays_so_when_the_run_begins_again_with_it():
    source = EvalSource([env()], {"heldout": Version(0, 0)}, again_on_resume=True)
    assert due_versions(source, range(15), incarnation=1) == [10]
