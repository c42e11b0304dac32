"""From arrivals to batches: errors dropped, credit among survivors, filters with and without a slot."""

from headrace.algorithms.grpo import Grpo
from headrace.orchestrator.train_sink import Filter, TrainSink
from headrace.rollout.filters import has_no_advantage
from headrace.rollout.types import Group, Rollout, RolloutError, Task, Turn

ZERO_ADVANTAGE = Filter("zero_advantage", has_no_advantage, enforce=True)


def make_sink(pre: list[Filter] | None = None, post: list[Filter] | None = None) -> TrainSink:
    return TrainSink({"env": Grpo()}, pre or [], post or [], seq_len=64)


def rollout(group: str, reward: float, error: str = "") -> Rollout:
    return Rollout(
        env="env",
        group_id=group,
        reward=reward,
        turns=[Turn([1, 2], [3, 4], [-0.5, -0.5], [0, 0], 1.0)],
        error=RolloutError(error) if error else None,
    )


async def complete(sink: TrainSink, name: str, *members: Rollout):
    for member in members:
        await sink.process_rollout(member)
        sink.add(member)
    return await sink.process_group(Group(name, Task("env", {}), len(members), 0, draw_id=1))


def two_rollouts(rollouts: int, tokens: int) -> bool:
    return rollouts >= 2


async def test_failed_rollouts_are_dropped_and_survivors_credited_among_themselves():
    scored = await complete(make_sink(), "g", rollout("g", 1), rollout("g", 0), rollout("g", 9, error="timeout"))
    assert [r.samples[0].streams["advantages"][-1] for r in scored.rollouts] == [0.5, -0.5]
    assert [reason for _, reason in scored.dropped] == ["timeout"]


async def test_a_group_without_survivors_is_lost_to_its_commonest_reason():
    failures = [rollout("g", 0, error=e) for e in ("timeout", "environment", "timeout")]
    scored = await complete(make_sink(), "g", *failures)
    assert scored.rollouts == []
    assert scored.reason == "timeout"


async def test_a_pre_filtered_rollout_takes_no_slot():
    sink = make_sink(pre=[ZERO_ADVANTAGE])
    scored = await complete(sink, "g", rollout("g", 1), rollout("g", 1))
    assert scored.reason == "zero_advantage"
    assert sink.ready_rollouts == 0
    assert sink.take_filter_hits() == {"pre_filters/zero_advantage": 2}


async def test_a_post_filtered_rollout_keeps_its_slot_and_is_not_shipped():
    sink = make_sink(post=[ZERO_ADVANTAGE])
    await complete(sink, "g", rollout("g", 1), rollout("g", 1))
    batch = sink.take_batch(two_rollouts)
    assert batch is not None
    assert len(batch.rollouts) == 2
    assert batch.kept == []
    assert batch.dropped_reason(batch.groups[0]) == "zero_advantage"


async def test_a_filter_that_is_not_enforced_only_counts():
    sink = make_sink(pre=[Filter("zero_advantage", has_no_advantage, enforce=False)])
    await complete(sink, "g", rollout("g", 1), rollout("g", 1))
    assert sink.ready_rollouts == 2
    assert sink.take_filter_hits() == {"pre_filters/zero_advantage": 2}


async def test_a_batch_takes_the_oldest_whole_groups_and_leaves_the_rest():
    sink = make_sink()
    for name in ("a", "b", "c"):
        await complete(sink, name, rollout(name, 1), rollout(name, 0))
    batch = sink.take_batch(lambda rollouts, tokens: rollouts >= 3)
    assert batch is not None
    assert [group.group.id for group in batch.groups] == ["a", "b"]
    assert sink.ready_rollouts == 2
    assert sink.take_batch(lambda rollouts, tokens: rollouts >= 3) is None


async def test_rollouts_are_cut_to_the_sequence_length():
    sink = TrainSink({"env": Grpo()}, [], [], seq_len=3)
    scored = await complete(sink, "g", rollout("g", 1), rollout("g", 0))
    assert [len(r.samples[0]) for r in scored.rollouts] == [3, 3]
