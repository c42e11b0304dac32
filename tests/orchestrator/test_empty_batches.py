"""When a run that gets nothing to train on is given up, and with which words."""

import msgspec
import pytest

from headrace.orchestrator.empty_batches import EmptyBatches, RunFailed, likely_cause
from headrace.orchestrator.signals import Kind, ScoredGroup, TrainBatch
from headrace.rollout.types import Group, Rollout, RolloutError, Task
from headrace.transport.journal_entries import GROUP_FAILED


def group(kept: int = 0, *, failed: int = 0, dropped: str = "", size: int = 2) -> ScoredGroup:
    """`kept` rollouts are left, `failed` had errors, and the rest was dropped for a reason."""
    errors = [Rollout(env="maze", error=RolloutError("timeout", f"no answer to {n}")) for n in range(failed)]
    rest = [Rollout(reward=0.0) for _ in range(size - kept - failed)] if dropped else []
    lost = [*((rollout, "timeout") for rollout in errors), *((rollout, dropped) for rollout in rest)]
    rollouts = [Rollout(reward=1.0) for _ in range(kept)]
    return ScoredGroup(Kind.TRAIN, Group("g", Task("maze", {}), size, 0), rollouts, lost, arrived=size)


def failed(size: int) -> ScoredGroup:
    return group(failed=size, size=size)


def test_failures_in_a_row_end_a_run_with_the_last_of_them():
    empty_batches = EmptyBatches(max_empty_batches=None, environments={"maze"})
    empty_batches.record_group(failed(16), 1, rollouts_per_batch=16)
    with pytest.raises(RunFailed) as failure:
        empty_batches.record_group(failed(16), 1, rollouts_per_batch=16)
    for part in ("32 episodes", "'maze'", "timeout: no answer to 15"):
        assert part in str(failure.value)


@pytest.mark.parametrize(("size", "rollouts_per_batch"), [(16, 64), (64, 2)])
def test_it_takes_two_batches_of_failures_and_a_batch_holds_whole_groups(size: int, rollouts_per_batch: int):
    empty_batches = EmptyBatches(max_empty_batches=None, environments={"maze"})
    for _ in range(128 // size - 1):
        empty_batches.record_group(failed(size), 1, rollouts_per_batch)
    with pytest.raises(RunFailed):
        empty_batches.record_group(failed(size), 1, rollouts_per_batch)


def test_one_success_resets_the_count_of_failures():
    empty_batches = EmptyBatches(max_empty_batches=None, environments={"maze"})
    for scored in (failed(16), group(kept=1, failed=1), failed(16)):
        empty_batches.record_group(scored, 1, rollouts_per_batch=16)
    with pytest.raises(RunFailed, match=r"^32 episodes"):
        empty_batches.record_group(failed(16), 1, rollouts_per_batch=16)


def test_as_long_as_one_environment_has_not_failed_the_others_failures_do_not_end_the_run():
    empty_batches = EmptyBatches(max_empty_batches=None, environments={"maze", "slow"})
    for _ in range(10):
        empty_batches.record_group(failed(16), 1, rollouts_per_batch=16)
    slow = failed(16)
    slow.group = msgspec.structs.replace(slow.group, task=Task("slow", {}))
    with pytest.raises(RunFailed, match="176"):
        empty_batches.record_group(slow, 1, rollouts_per_batch=16)


def test_members_that_failed_because_of_another_are_not_counted_as_failures():
    empty_batches = EmptyBatches(max_empty_batches=None, environments={"maze"})
    empty_batches.record_group(failed(16), 1, rollouts_per_batch=16)
    scored = failed(16)
    scored.dropped[1] = (scored.dropped[1][0], GROUP_FAILED)
    empty_batches.record_group(scored, 1, rollouts_per_batch=16)
    empty_batches.record_group(failed(16), 1, rollouts_per_batch=16)
    with pytest.raises(RunFailed, match=r"^32 episodes"):
        empty_batches.record_group(failed(16), 1, rollouts_per_batch=16)


def test_groups_that_leave_nothing_are_an_empty_batch_when_they_would_have_filled_one():
    empty_batches = EmptyBatches(max_empty_batches=1, environments={"maze"})
    empty_batches.record_group(group(dropped="zero_advantage"), 7, rollouts_per_batch=4)
    with pytest.raises(RunFailed) as failure:
        empty_batches.record_group(group(dropped="zero_advantage"), 7, rollouts_per_batch=4)
    for part in ("step 7", "(zero_advantage 4)", *likely_cause("zero_advantage", [0.0])):
        assert part in str(failure.value)


def test_a_group_with_something_left_forgets_what_was_lost_before():
    empty_batches = EmptyBatches(max_empty_batches=1, environments={"maze"})
    for scored in (group(dropped="filter"), group(kept=2), group(dropped="filter")):
        empty_batches.record_group(scored, 1, rollouts_per_batch=4)
    assert not empty_batches.problem


def test_only_a_batch_that_ships_ends_a_row_of_empty_ones():
    empty_batches = EmptyBatches(max_empty_batches=2, environments={"maze"})
    empty = TrainBatch([group(kept=2)], dropped=[(Rollout(), "too_long"), (Rollout(), "too_long")])
    full = TrainBatch([group(kept=2)], kept=[Rollout()])
    empty_batches.record_batch(empty, 1)
    empty_batches.record_batch(full, 1)
    empty_batches.record_batch(empty, 2)
    empty_batches.record_group(group(kept=2), 2, rollouts_per_batch=4)
    with pytest.raises(RunFailed) as failure:
        empty_batches.record_batch(empty, 2)
    assert "step 2" in str(failure.value) and "(too_long 2)" in str(failure.value)


def test_without_a_limit_empty_batches_never_end_the_run():
    empty_batches = EmptyBatches(max_empty_batches=None, environments={"maze"})
    empty = TrainBatch([group(kept=2)], dropped=[(Rollout(), "too_long")])
    for _ in range(50):
        empty_batches.record_batch(empty, 1)
    assert "50 batches" in empty_batches.problem


def test_the_cause_of_empty_batches_is_shown_and_logged_at_growing_intervals(caplog: pytest.LogCaptureFixture):
    empty_batches = EmptyBatches(max_empty_batches=None, environments={"maze"})
    assert not empty_batches.problem
    for _ in range(9):
        empty_batches.record_group(group(dropped="zero_advantage"), 1, rollouts_per_batch=2)
    cause, advice = likely_cause("zero_advantage", [0.0])
    for part in ("9 batches in a row", cause, advice, "Ctrl-C", "orchestrator.max_empty_batches"):
        assert part in empty_batches.problem
    assert [record.message.rpartition("(")[2] for record in caplog.records] == [
        "1 in a row)",
        "2 in a row)",
        "4 in a row)",
        "8 in a row)",
    ]
    empty_batches.record_batch(TrainBatch([group(kept=2)], kept=[Rollout()]), 1)
    assert not empty_batches.problem


def test_the_likely_cause_follows_from_the_reason_and_the_rewards():
    reason = {
        likely_cause("zero_advantage", [0.0, 1.0]): "equal within each group",
        likely_cause("zero_advantage", [0.5, 0.5]): "every reward was 0.5",
        likely_cause("not_trainable", []): "trainable",
        likely_cause("too_long", []): "'too_long'",
    }
    assert all(words in cause for (cause, _), words in reason.items())
    assert len({advice for _, advice in reason}) == 4


def test_a_run_with_a_limit_says_when_it_will_end():
    empty_batches = EmptyBatches(max_empty_batches=3, environments={"maze"})
    empty_batches.record_group(group(dropped="zero_advantage"), 1, rollouts_per_batch=2)
    assert "after 3 (orchestrator.max_empty_batches)" in empty_batches.problem


def test_the_cause_is_judged_by_all_that_was_lost_not_by_the_last_group():
    empty_batches = EmptyBatches(max_empty_batches=1, environments={"maze"})
    alike = [group(dropped="zero_advantage"), group(dropped="zero_advantage")]
    for rollout, _ in alike[1].dropped:
        rollout.reward = 1.0
    empty_batches.record_group(alike[0], 1, rollouts_per_batch=4)
    with pytest.raises(RunFailed) as failure:
        empty_batches.record_group(alike[1], 1, rollouts_per_batch=4)
    assert "rewards were equal within each group" in str(failure.value)


def test_a_group_without_anything_to_train_can_be_the_one_that_fills_an_empty_batch():
    empty_batches = EmptyBatches(max_empty_batches=1, environments={"maze"})
    empty_batches.record_group(group(dropped="zero_advantage", size=3), 1, rollouts_per_batch=4)
    with pytest.raises(RunFailed) as failure:
        empty_batches.record_group(group(), 1, rollouts_per_batch=4)
    assert "(not_trainable 2, zero_advantage 3); every reward was 0" in str(failure.value)
