"""Versions and the two rules that follow from them (spec, "Versions")."""

import pytest

from headrace.rollout.version import Version, may_ship, past_step, staleness


def test_a_rewound_trainer_is_newer_than_what_it_lost():
    assert Version(1, 50) > Version(0, 73)
    assert max(Version(0, 73), Version(1, 50), Version(0, 74)) == Version(1, 50)


def test_within_an_incarnation_more_steps_are_newer():
    assert sorted([Version(0, 10), Version(0, 9), Version(0, 2)]) == [Version(0, 2), Version(0, 9), Version(0, 10)]


def test_a_version_reads_what_it_writes():
    assert str(Version(2, 17)) == "2-17"
    assert Version.parse("2-17") == Version(2, 17)


@pytest.mark.parametrize("text", ["", "3", "-3", "0-", "a-b", "1-2-3", "0--1", "v-0-1", " 0-1"])
def test_what_is_no_version_is_refused_with_the_expected_form(text: str):
    with pytest.raises(ValueError, match="INCARNATION-STEP"):
        Version.parse(text)


def test_staleness_counts_steps_behind_the_weights_that_are_trained():
    assert staleness(batch_step=1, oldest_version=0) == 0  # batch 1 trains version 0
    assert staleness(batch_step=10, oldest_version=7) == 2


def test_at_level_zero_a_batch_waits_for_its_own_version():
    assert may_ship(1, 0, 0)
    assert not may_ship(2, 0, 0)
    assert may_ship(2, 1, 0)


def test_at_level_one_a_batch_may_run_one_version_ahead():
    assert may_ship(2, 0, 1)
    assert not may_ship(3, 0, 1)
    assert may_ship(3, 1, 1)


@pytest.mark.parametrize("max_async_level", [0, 1, 3])
@pytest.mark.parametrize("every", [1, 2, 5])
def test_the_past_policy_of_a_batch_is_published_when_the_batch_may_ship_and_changes_every_so_many_steps(
    every: int, max_async_level: int
):
    steps = [past_step(batch, every, max_async_level) for batch in range(1, 30)]
    assert all(may_ship(batch, step, max_async_level + every - 1) for batch, step in enumerate(steps, 1))
    assert all(step <= max(0, batch - 1 - max_async_level) for batch, step in enumerate(steps, 1))
    assert sorted(set(steps)) == list(range(0, steps[-1] + 1, every))
