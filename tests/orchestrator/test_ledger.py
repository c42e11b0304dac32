"""The ledger: what a commit may take, in the order of credit, and with which state."""

from headrace.orchestrator.ledger import Ledger, commonest
from headrace.orchestrator.signals import Kind, ScoredGroup, TrainBatch
from headrace.rollout.types import Group, Rollout, RolloutError, Task, Turn
from headrace.transport.journal import AlgorithmState, Clock, Draw, Totals


def make_ledger(**given) -> Ledger:
    values = {"totals": Totals(), "clock": Clock(), "next_credit": 0, "now": 100.0, **given}
    return Ledger(**values)


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
        [r for r in everyone if r.draw_id != lose],
        [(r, "zero_advantage") for r in everyone if r.draw_id == lose],
    )


def test_a_commit_takes_groups_in_the_order_of_credit_up_to_the_first_whose_fate_is_open():
    ledger = make_ledger()
    first, second, third = credited(0), credited(1), credited(2)
    for group in (first, second, third):
        ledger.enter(group)
    ledger.drop_groups([first, third], "off_policy")
    taken = ledger.take(101.0)
    assert [(o.draw, o.reason, o.credit) for o in taken.outcomes] == [(0, "off_policy", 0)]
    assert taken.states == {"env": state(0)}  # not the state after the third, whose draw is not in this commit
    ledger.settle(batch_of(second))
    taken = ledger.take(102.0)
    assert [(o.draw, o.reason) for o in taken.outcomes] == [(1, ""), (2, "off_policy")]
    assert taken.states == {"env": state(2)}


def test_a_group_that_was_never_credited_waits_for_nobody():
    ledger = make_ledger()
    ledger.enter(credited(0))
    ledger.enter(lost(1))
    taken = ledger.take(101.0)
    assert [(o.draw, o.reason, o.credit) for o in taken.outcomes] == [(1, "timeout", None)]
    assert taken.states == {}


def test_totals_count_only_what_is_committed_and_each_draw_once():
    ledger = make_ledger(totals=Totals(10, 100, {"timeout": 1}))
    first, second = credited(0), credited(1, size=3)
    ledger.enter(first)
    ledger.enter(second)
    assert ledger.take(101.0).totals == Totals(10, 100, {"timeout": 1})
    ledger.settle(batch_of(first, second, lose=0))
    assert ledger.take(102.0).totals == Totals(15, 110, {"timeout": 1, "zero_advantage": 2})
    assert ledger.take(103.0).outcomes == []


def test_a_draw_of_which_a_filter_left_nothing_is_dropped_with_its_name():
    ledger = make_ledger()
    first, second = credited(0), credited(1)
    ledger.enter(first)
    ledger.enter(second)
    ledger.settle(batch_of(first, second, lose=1))
    assert [(o.draw, o.reason) for o in ledger.take(101.0).outcomes] == [(0, ""), (1, "zero_advantage")]


def test_the_clock_goes_on_where_the_last_process_left_it():
    ledger = make_ledger(clock=Clock(50.0, 7))
    ledger.arrived([rollout(0)], training=False)
    assert ledger.take(103.0).clock == Clock(53.0, 9)


def test_draws_that_have_no_task_any_more_are_dropped():
    ledger = make_ledger()
    ledger.drop_gone([Draw(4, "env", "key", 4)])
    assert [(o.draw, o.reason) for o in ledger.take(101.0).outcomes] == [(4, "task_gone")]


def test_step_metrics_count_errors_and_drops_since_the_last_step():
    ledger = make_ledger()
    ledger.arrived([rollout(0), rollout(0, error="engine")], training=True)
    ledger.enter(lost(1))
    metrics = ledger.take_step_metrics(102.0)
    assert metrics["errors/engine"] == 1
    assert metrics["dropped/timeout"] == 1
    assert metrics["time/batch"] == 2.0
    assert metrics["perf/sampled_tokens_per_second"] == 2.0
    assert "errors/engine" not in ledger.take_step_metrics(103.0)


def test_the_commonest_reason_is_decided_alike_in_every_replay():
    assert commonest(["timeout", "engine", "timeout"]) == "timeout"
    assert commonest(["b", "a"]) == commonest(["a", "b"])
    assert commonest([]) == "not_trainable"
