"""The buffer: what a commit may take, in the order of credit, and with which state."""

from headrace.orchestrator.journal_buffer import JournalBuffer, most_common_reason
from headrace.orchestrator.signals import Kind, ScoredGroup, TrainBatch
from headrace.rollout.types import Group, Rollout, RolloutError, Task, Turn
from headrace.transport.journal_entries import AlgorithmState, Clock, Draw, Totals


def make_buffer(**given) -> JournalBuffer:
    values = {"totals": Totals(), "clock": Clock(), "next_credit": 0, "now": 100.0, **given}
    return JournalBuffer(**values)


def rollout(draw: int, error: str = "") -> Rollout:
    return Rollout(
        draw_id=draw,
        turns=[Turn([1], [2, 3], [0.0, 0.0], [0, 0], 1.0)],
        error=RolloutError(error) if error else None,
    )


def state(draw: int) -> AlgorithmState:
    return AlgorithmState("mine:Algorithm", str(draw).encode())


def credited(draw: int, size: int = 2, env: str = "env") -> ScoredGroup:
    rollouts = [rollout(draw) for _ in range(size)]
    return ScoredGroup(
        Kind.TRAIN,
        Group(f"g{draw}", Task(env, {}), size, 0, draw),
        rollouts,
        [],
        arrived=size,
        sampled_tokens=2 * size,
        credited=[("policy", 1.0)] * size,
        state=state(draw),
    )


def lost(draw: int, reason: str = "timeout") -> ScoredGroup:
    group = Group(f"g{draw}", Task("env", {}), 1, 0, draw)
    return ScoredGroup(Kind.TRAIN, group, [], [(rollout(draw, reason), reason)], arrived=1)


def batch_of(*groups: ScoredGroup, lose: int | None = None) -> TrainBatch:
    """A processed batch; `lose` is a draw of which a filter took everything."""
    everyone = [r for group in groups for r in group.rollouts]
    return TrainBatch(
        list(groups),
        kept=[r for r in everyone if r.draw_id != lose],
        dropped=[(r, "zero_advantage") for r in everyone if r.draw_id == lose],
    )


def test_a_commit_takes_groups_in_the_order_of_credit_up_to_the_first_whose_fate_is_open():
    buffer = make_buffer()
    first, second, third = credited(0), credited(1), credited(2)
    for group in (first, second, third):
        buffer.add_group(group)
    buffer.drop_groups([first, third], "off_policy")
    taken = buffer.take_entries(101.0)
    assert [(o.draw, o.reason, o.credit) for o in taken.outcomes] == [(0, "off_policy", 0)]
    assert taken.states == {"env": state(0)}  # not the state after the third, whose draw is not in this commit
    buffer.finalize_batch(batch_of(second))
    taken = buffer.take_entries(102.0)
    assert [(o.draw, o.reason) for o in taken.outcomes] == [(1, ""), (2, "off_policy")]
    assert taken.states == {"env": state(2)}


def test_a_group_that_was_never_credited_does_not_wait():
    buffer = make_buffer()
    buffer.add_group(credited(0))
    buffer.add_group(lost(1))
    taken = buffer.take_entries(101.0)
    assert [(o.draw, o.reason, o.credit) for o in taken.outcomes] == [(1, "timeout", None)]
    assert taken.states == {}


def test_totals_count_only_what_is_committed_and_each_draw_once():
    buffer = make_buffer(totals=Totals(10, 100, {"timeout": 1}))
    first, second = credited(0), credited(1, size=3)
    buffer.add_group(first)
    buffer.add_group(second)
    assert buffer.take_entries(101.0).totals == Totals(10, 100, {"timeout": 1})
    buffer.finalize_batch(batch_of(first, second, lose=0))
    assert buffer.take_entries(102.0).totals == Totals(15, 110, {"timeout": 1, "zero_advantage": 2})
    assert buffer.take_entries(103.0).outcomes == []


def test_a_draw_of_which_a_filter_left_nothing_is_dropped_with_its_name():
    buffer = make_buffer()
    first, second = credited(0), credited(1)
    buffer.add_group(first)
    buffer.add_group(second)
    buffer.finalize_batch(batch_of(first, second, lose=1))
    assert [(o.draw, o.reason) for o in buffer.take_entries(101.0).outcomes] == [(0, ""), (1, "zero_advantage")]


def test_the_clock_goes_on_where_the_last_process_left_it():
    buffer = make_buffer(clock=Clock(50.0, 7))
    buffer.count_rollouts([rollout(0)], training=False)
    assert buffer.take_entries(103.0).clock == Clock(53.0, 9)


def test_draws_that_have_no_task_any_more_are_dropped():
    buffer = make_buffer()
    buffer.drop_missing([Draw(4, "env", "key", 4)])
    assert [(o.draw, o.reason) for o in buffer.take_entries(101.0).outcomes] == [(4, "task_gone")]


def test_step_metrics_count_errors_and_drops_since_the_last_step():
    buffer = make_buffer()
    buffer.count_rollouts([rollout(0), rollout(0, error="engine")], training=True)
    buffer.add_group(lost(1))
    metrics = buffer.take_step_metrics(102.0)
    assert metrics["errors/engine"] == 1
    assert metrics["dropped/timeout"] == 1
    assert metrics["time/batch"] == 2.0
    assert metrics["perf/sampled_tokens_per_second"] == 2.0
    assert "errors/engine" not in buffer.take_step_metrics(103.0)


def test_the_commonest_reason_is_decided_alike_in_every_replay():
    assert most_common_reason(["timeout", "engine", "timeout"]) == "timeout"
    assert most_common_reason(["b", "a"]) == most_common_reason(["a", "b"])
    assert most_common_reason([]) == "not_trainable"
