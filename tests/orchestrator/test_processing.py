"""Three levels of work: errors dropped, credit among survivors, filters with and without a slot, scores by group."""

import asyncio
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.algorithms.base import Algorithm
from headrace.algorithms.group_credit import GroupCredit
from headrace.algorithms.grpo import Grpo
from headrace.algorithms.length_penalties import LinearPenaltyConfig
from headrace.environments.base import Environment, EpisodeError
from headrace.orchestrator.batch_metrics import step_metrics
from headrace.orchestrator.filters import has_no_advantage
from headrace.orchestrator.gate import AdvantageRange
from headrace.orchestrator.processing import AlgorithmFailed, EvalProcessing, Filter, TrainProcessing
from headrace.orchestrator.signals import ScoredGroup, TrainBatch
from headrace.rollout.types import Group, Rollout, RolloutError, Task, Turn
from headrace.transport.journal_entries import AlgorithmState
from headrace.transport.rollout_files import write_rollouts

ZERO_ADVANTAGE = Filter("zero_advantage", has_no_advantage, enforce=True)


class Ranked(Environment):
    """Scores a group: the longest answer wins."""

    async def score_group(self, rollouts):
        best = max(rollout.completion_tokens for rollout in rollouts)
        for rollout in rollouts:
            rollout.rewards = {"longest": float(rollout.completion_tokens == best)}


class Unscored(Environment):
    """Scores a group with nothing."""

    async def score_group(self, rollouts):
        for rollout in rollouts:
            rollout.rewards = {"r": math.nan}


class Broken(Environment):
    async def score_group(self, rollouts):
        raise ZeroDivisionError("no judge")


class Counting(Algorithm):
    """Keeps a count, and lets others run in the middle of its update."""

    def __init__(self) -> None:
        self.seen = 0

    async def score_group(self, group):
        before = self.seen
        await asyncio.sleep(0)
        self.seen = before + 1
        for rollout in group:
            rollout.assign_advantages(1.0)

    def state(self):
        return self.seen


def make(
    pre: list[Filter] | None = None,
    post: list[Filter] | None = None,
    algorithm: Algorithm | None = None,
    environment: Environment | None = None,
    seq_len: int = 64,
) -> TrainProcessing:
    return TrainProcessing(
        {"env": algorithm or Grpo()}, {"env": environment or Environment()}, pre or [], post or [], seq_len
    )


def rollout(reward: float, error: str = "", tokens: int = 2) -> Rollout:
    return Rollout(
        env="env",
        reward=reward,
        turns=[Turn([1, 2], [3] * tokens, [-0.5] * tokens, [0] * tokens, 1.0)],
        error=RolloutError(error) if error else None,
    )


async def process(processing: TrainProcessing | EvalProcessing, *members: Rollout) -> ScoredGroup:
    for member in members if isinstance(processing, TrainProcessing) else ():
        await processing.process_rollout(member, Task("env", {}))
    return await processing.process_group(Group("g", Task("env", {}), len(members), 0, draw_id=1), members)


async def test_failed_rollouts_are_dropped_and_survivors_credited_among_themselves():
    scored = await process(make(), rollout(1), rollout(0), rollout(9, error="timeout"))
    assert [r.samples[0].streams["advantages"][-1] for r in scored.rollouts] == [0.5, -0.5]
    assert [reason for _, reason in scored.dropped] == ["timeout"]
    assert scored.credited == [("policy", 1.0), ("policy", 0.0)]
    assert (scored.arrived, scored.sampled_tokens) == (3, 6)


async def test_a_group_without_survivors_is_not_credited():
    scored = await process(make(), rollout(0, error="timeout"), rollout(0, error="environment"))
    assert scored.rollouts == []
    assert scored.credited == []


async def test_a_rollout_that_is_not_trainable_is_neither_credited_nor_dropped():
    opponent = rollout(1)
    opponent.trainable = False
    scored = await process(make(), opponent, rollout(0), rollout(1))
    assert len(scored.rollouts) == 2
    assert scored.dropped == []
    assert scored.arrived == 3


async def test_a_pre_filtered_rollout_is_dropped_and_counted():
    scored = await process(make(pre=[ZERO_ADVANTAGE]), rollout(1), rollout(1))
    assert scored.rollouts == []
    assert [reason for _, reason in scored.dropped] == ["zero_advantage"] * 2
    assert scored.filter_hits == {"pre_filters/zero_advantage": 2}
    assert scored.credited  # it was seen by the algorithm before the filter


async def test_a_post_filtered_rollout_keeps_its_slot_and_is_not_shipped():
    processing = make(post=[ZERO_ADVANTAGE])
    batch = TrainBatch([await process(processing, rollout(1), rollout(1))])
    await processing.process_batch(batch)
    assert len(batch.rollouts) == 2
    assert batch.kept == []
    assert batch.filter_hits == {"filters/zero_advantage": 2}


async def test_a_filter_that_is_not_enforced_only_counts():
    watching = Filter("zero_advantage", has_no_advantage, enforce=False)
    scored = await process(make(pre=[watching]), rollout(1), rollout(1))
    assert len(scored.rollouts) == 2
    assert scored.filter_hits == {"pre_filters/zero_advantage": 2}


async def test_the_first_enforced_filter_that_matches_is_the_reason_and_the_last_to_count():
    always, after = (Filter(name, lambda r: True, enforce=True) for name in ("always", "after"))
    scored = await process(make(pre=[always, after]), rollout(1), rollout(1))
    assert [reason for _, reason in scored.dropped] == ["always"] * 2
    assert scored.filter_hits == {"pre_filters/always": 2}


async def test_a_filter_that_only_monitors_counts_and_hides_nothing_from_one_that_is_enforced():
    watching = Filter("watching", lambda r: True, enforce=False)
    processing = make(post=[watching, ZERO_ADVANTAGE])
    alike = await process(processing, rollout(1), rollout(1))
    batch = TrainBatch([alike, await process(processing, rollout(1), rollout(0))])
    await processing.process_batch(batch)
    assert [reason for _, reason in batch.dropped] == ["zero_advantage"] * 2
    assert len(batch.kept) == 2
    assert batch.filter_hits == {"filters/watching": 4, "filters/zero_advantage": 2}


async def test_rollouts_are_cut_to_the_sequence_length():
    scored = await process(make(seq_len=3), rollout(1), rollout(0))
    assert [len(r.samples[0]) for r in scored.rollouts] == [3, 3]


async def test_an_environment_that_scores_groups_does_so_when_all_are_in():
    scored = await process(make(environment=Ranked()), rollout(math.nan, tokens=5), rollout(math.nan, tokens=2))
    assert [r.reward for r in scored.rollouts] == [1.0, 0.0]
    assert [r.samples[0].streams["advantages"][-1] for r in scored.rollouts] == [0.5, -0.5]


@pytest.mark.parametrize("kind", [TrainProcessing, EvalProcessing])
async def test_one_failed_member_costs_a_group_that_is_scored_together(kind: type):
    processing = make(environment=Ranked()) if kind is TrainProcessing else EvalProcessing({"env": Ranked()})
    scored = await process(processing, rollout(math.nan), rollout(math.nan), rollout(math.nan, error="timeout"))
    assert scored.rollouts == []
    assert sorted(reason for _, reason in scored.dropped) == ["group_failed", "group_failed", "timeout"]


async def test_scores_that_are_not_numbers_are_errors_of_their_rollouts():
    scored = await process(make(environment=Unscored()), rollout(math.nan), rollout(math.nan))
    assert [reason for _, reason in scored.dropped] == ["invalid_reward"] * 2


def score_all_but_one(fails: Callable[[Rollout], Any]) -> Callable[[Rollout], Any]:
    """1 for everyone, but for the one that has 5 tokens."""
    return lambda r: fails(r) if r.completion_tokens == 5 else setattr(r, "rewards", {"r": 1.0})


@pytest.mark.parametrize("rewards", [{"r": math.nan}, {"r": "high"}, {}])
@pytest.mark.parametrize("kind", [TrainProcessing, EvalProcessing])
async def test_one_score_that_is_no_number_costs_a_group_that_is_scored_together(kind: type, rewards: dict[str, Any]):
    environment = Odd(score_all_but_one(lambda r: setattr(r, "rewards", rewards)))
    processing = make(environment=environment) if kind is TrainProcessing else EvalProcessing({"env": environment})
    scored = await process(processing, rollout(math.nan, tokens=5), rollout(math.nan), rollout(math.nan))
    assert scored.rollouts == []
    assert [reason for _, reason in scored.dropped] == ["invalid_reward", "group_failed", "group_failed"]


async def test_a_member_that_its_environment_marks_as_failed_while_scoring_costs_itself_alone():
    environment = Odd(score_all_but_one(lambda r: setattr(r, "error", RolloutError("reward_no_number"))))
    scored = await process(make(environment=environment), rollout(math.nan, tokens=5), rollout(math.nan))
    assert [r.reward for r in scored.rollouts] == [1.0]
    assert [reason for _, reason in scored.dropped] == ["reward_no_number"]


async def test_an_environment_that_fails_to_score_costs_the_group_and_not_the_run():
    scored = await process(make(environment=Broken()), rollout(math.nan), rollout(math.nan))
    assert scored.rollouts == []
    assert {r.error.detail for r, _ in scored.dropped if r.error} == {"score_group: ZeroDivisionError: no judge"}


class Odd(Environment):
    """Scores a group with whatever `act` does to each of its rollouts."""

    def __init__(self, act: Callable[[Rollout], Any]) -> None:
        self._act = act

    async def score_group(self, rollouts):
        for rollout in rollouts:
            self._act(rollout)


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no detail")


def raise_(error: BaseException) -> None:
    raise error


def mark_and_fail(rollout: Rollout) -> None:
    rollout.metrics = {"m": "text"}  # type: ignore[dict-item]
    raise KeyError("halfway")


@pytest.mark.parametrize(
    ("act", "reason", "words"),
    [
        (lambda r: sys.exit(2), "environment", "score_group: SystemExit: 2"),
        (lambda r: raise_(asyncio.CancelledError()), "environment", "score_group: CancelledError: "),
        (lambda r: raise_(ValueError("\ud800")), "environment", r"score_group: ValueError: \ud800"),
        (lambda r: raise_(Mute()), "environment", "score_group: Mute: <exception str() failed>"),
        (lambda r: raise_(TimeoutError("judge")), "environment", "score_group: TimeoutError: judge"),
        (lambda r: raise_(EpisodeError(404, "gone")), "404", "score_group: gone"),
        (lambda r: setattr(r, "rewards", 1.0), "invalid_reward", "rewards are 1.0, not a dict of numbers"),
        (lambda r: setattr(r, "rewards", None), "invalid_reward", "rewards are None, not a dict of numbers"),
        (lambda r: setattr(r, "metrics", {"m": "text"}), "invalid_rollout", "metric 'm' is 'text', not a number"),
        (mark_and_fail, "environment", "score_group: KeyError: 'halfway'"),
    ],
)
async def test_whatever_scoring_does_costs_the_group_and_can_be_recorded(
    act: Callable[[Rollout], Any], reason: str, words: str, tmp_path: Path
):
    scored = await process(make(environment=Odd(act)), rollout(math.nan))
    [(dropped, why)] = scored.dropped
    assert dropped.error is not None
    assert (why, dropped.error.detail) == (reason, words)
    write_rollouts(tmp_path, 1, [], scored.dropped)


async def test_scores_of_any_kind_of_number_are_floats():
    member = rollout(math.nan)
    environment = Odd(lambda r: (setattr(r, "rewards", {"r": np.bool_(True)}), setattr(r, "metrics", {"m": True})))
    await process(make(environment=environment), member)
    assert (member.error, member.reward, member.metrics) == (None, 1.0, {"m": 1.0})
    assert [type(value) for value in (*member.rewards.values(), *member.metrics.values())] == [float, float]


async def test_scoring_that_is_cancelled_from_outside_ends():
    class Waits(Environment):
        async def score_group(self, rollouts):
            await asyncio.sleep(3600)

    scoring = asyncio.create_task(process(make(environment=Waits()), rollout(math.nan)))
    await asyncio.sleep(0.01)
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring


async def test_scoring_past_its_time_limit_is_a_timeout():
    class Waits(Environment):
        async def score_group(self, rollouts):
            await asyncio.sleep(3600)

    scored = await process(EvalProcessing({"env": Waits()}, {"env": 0.01}), rollout(math.nan))
    [(dropped, reason)] = scored.dropped
    assert dropped.error == RolloutError("timeout", "score_group took longer than 0.01 s")
    assert reason == "timeout"


async def test_a_rollout_that_is_not_trained_may_be_without_turns():
    audience = Rollout(env="env", trainable=False, reward=0.0)
    scored = await process(make(), audience, rollout(0), rollout(1))
    assert (audience.samples, audience.stop_reason) == ([], "")
    assert scored.dropped == []


async def test_an_algorithm_that_raises_on_a_group_is_named_with_its_environment_and_task():
    class Raises(Algorithm):
        async def score_group(self, group):
            raise KeyError("baseline")

    with pytest.raises(AlgorithmFailed, match=r"'env'.*KeyError: 'baseline'"):
        await process(make(algorithm=Raises()), rollout(1), rollout(0))


async def test_groups_of_an_algorithm_with_state_are_credited_one_at_a_time():
    processing = make(algorithm=Counting())
    scored = await asyncio.gather(*[process(processing, rollout(1), rollout(0)) for _ in range(5)])
    name = "tests.orchestrator.test_processing:Counting"
    states = [AlgorithmState(name, str(count).encode()) for count in range(1, 6)]
    assert sorted((group.state for group in scored), key=lambda state: state.json) == states


async def test_a_state_that_begins_as_nothing_is_there_after_the_group_that_sets_it():
    class Late(Counting):
        def state(self):
            return self.seen or None

    processing = make(algorithm=Late())
    scored = await asyncio.gather(*[process(processing, rollout(1), rollout(0)) for _ in range(3)])
    assert sorted(group.state.json for group in scored) == [b"1", b"2", b"3"]


async def test_an_algorithm_that_keeps_nothing_commits_nothing():
    assert (await process(make(), rollout(1), rollout(0))).state is None


class Taught(Algorithm):
    """Has references for what earned a reward, and none for the rest."""

    action_loss_type = "ref_kl"

    async def score_batch(self, batch):
        for survivor in batch:
            self.tally.mean("scored", survivor.reward > 0, 1)
            if survivor.reward == 0:
                survivor.drop("no_reference", "the teacher was away")
            for sample in survivor.samples:
                sample.set_stream("ref_logprobs", np.full(len(sample), -0.25))


async def test_what_an_algorithm_drops_at_the_last_moment_is_not_shipped_and_the_reason_is_logged(
    caplog: pytest.LogCaptureFixture,
):
    processing = make(algorithm=Taught())
    batch = TrainBatch([await process(processing, rollout(1), rollout(0), rollout(0))])
    await processing.process_batch(batch)
    assert [member.reward for member in batch.kept] == [1]
    assert [(member.reward, reason) for member, reason in batch.dropped] == [(0, "no_reference")] * 2
    assert "2 of 3 rollouts of env are not trained on: no_reference: the teacher was away" in caplog.text


async def test_what_ships_is_routed_to_the_loss_of_its_algorithm():
    processing = make(algorithm=Taught())
    batch = TrainBatch([await process(processing, rollout(1))])
    await processing.process_batch(batch)
    streams = {name: values.tolist() for name, values in batch.kept[0].samples[0].streams.items()}
    assert streams == {"ref_logprobs": [-0.25] * 4, "rl_weights": [0] * 4, "ref_kl_weights": [0, 0, 1, 1]}


class Uncredited(Algorithm):
    """Assigns no advantage."""


class Unreferenced(Algorithm):
    action_loss_type = "ref_kl"


class Poisoned(Algorithm):
    async def score_batch(self, batch):
        for survivor in batch:
            survivor.assign_advantages(1.0)
            survivor.samples[0].streams["advantages"][-1] = math.nan


@pytest.mark.parametrize(
    ("algorithm", "why"),
    [
        (Uncredited(), "rl loss.*advantages"),
        (Unreferenced(), "ref_kl loss.*ref_logprobs"),
        (Poisoned(), "advantages.*nan"),
    ],
)
async def test_what_the_trainer_would_refuse_does_not_ship_and_names_who_left_it(algorithm: Algorithm, why: str):
    processing = make(algorithm=algorithm)
    batch = TrainBatch([await process(processing, rollout(1))])
    named = f"test_processing:{type(algorithm).__name__} .*'env'.*{Task('env', {}).key}.*{why}"
    with pytest.raises(AlgorithmFailed, match=named):
        await processing.process_batch(batch)


async def test_plain_credit_ships_no_weights():
    processing = make()
    batch = TrainBatch([await process(processing, rollout(1), rollout(0))])
    await processing.process_batch(batch)
    assert {name for member in batch.kept for name in member.samples[0].streams} == {"advantages"}


async def test_what_an_algorithm_counts_is_a_metric_of_the_next_batch_alone():
    processing = make(algorithm=Taught())
    batches = [TrainBatch([await process(processing, rollout(1), rollout(0))]) for _ in range(2)]
    await processing.process_batch(batches[0])
    assert step_metrics(1, batches[0])["algo/env/scored"] == 0.5
    await processing.process_batch(batches[1])
    assert batches[1].tallies == {"algo/env/scored": 0.5}


async def test_what_is_counted_for_a_batch_that_proves_empty_is_a_metric_of_the_next_that_ships():
    processing = make(algorithm=Taught())
    empty, full = [TrainBatch([await process(processing, rollout(0), rollout(reward))]) for reward in (0, 1)]
    await processing.process_batch(empty)
    assert (empty.kept, empty.tallies) == ([], {})
    await processing.process_batch(full)
    assert full.tallies == {"algo/env/scored": 0.25}


async def test_an_all_correct_group_trains_under_a_length_penalty_and_is_filtered_without_one():
    penalized = Grpo(GroupCredit(penalty=LinearPenaltyConfig(coef=0.25).make(64)))
    for algorithm, shipped in ((penalized, 2), (Grpo(), 0)):
        processing = make(post=[ZERO_ADVANTAGE], algorithm=algorithm)
        batch = TrainBatch([await process(processing, rollout(1, tokens=2), rollout(1, tokens=6))])
        await processing.process_batch(batch)
        assert len(batch.kept) == shipped


async def test_training_rewards_are_distinguished_by_agent_where_there_are_several():
    members = [rollout(reward) for reward in (1.0, 0.0, 0.5)]
    members[0].agent, members[1].agent, members[2].agent = "first", "second", "second"
    processing = make()
    batch = TrainBatch([await process(processing, *members)])
    await processing.process_batch(batch)
    metrics = step_metrics(1, batch)
    assert (metrics["reward/env/first"], metrics["reward/env/second"]) == (1.0, 0.25)
    members = [rollout(1.0), rollout(0.0)]
    alone = TrainBatch([await process(processing, *members)])
    await processing.process_batch(alone)
    assert not any(name.startswith("reward/env/policy") for name in step_metrics(1, alone))


async def test_the_age_of_a_rollout_is_that_of_its_oldest_token_in_whichever_of_its_samples():
    members = [rollout(1.0), rollout(0.0)]
    members[0].turns.append(Turn([7], [8, 9], [-0.5] * 2, [1, 2], 1.0))  # of another conversation
    processing = make()
    batch = TrainBatch([await process(processing, *members)])
    await processing.process_batch(batch)
    assert len(members[0].samples) == 2
    metrics = step_metrics(3, batch)
    assert [metrics[f"off_policy/staleness/{name}"] for name in ("min", "mean", "max")] == [2, 2, 2]


async def test_a_group_that_the_gate_rejects_is_credited_counted_and_takes_no_slot():
    processing = TrainProcessing(
        {"env": Grpo()}, {"env": Environment()}, [ZERO_ADVANTAGE], [], 64, gates={"env": AdvantageRange(-0.5, 0.5)}
    )
    rejected = await process(processing, rollout(1), rollout(0), rollout(9, error="timeout"))
    assert rejected.rollouts == []
    assert [reason for _, reason in rejected.dropped] == ["timeout", "gated", "gated"]
    assert rejected.credited == [("policy", 1.0), ("policy", 0.0)]
    assert rejected.filter_hits == {"curriculum/env/gated": 1}
    kept = await process(processing, rollout(2), rollout(0))
    assert len(kept.rollouts) == 2
    failed = await process(processing, rollout(0, error="timeout"))
    assert failed.filter_hits == {}


class SlowerFirst(Environment):
    """Scores the groups that were handed in first last."""

    def __init__(self) -> None:
        self.scored: list[float] = []

    async def score_group(self, rollouts):
        for _ in range(3 - len(rollouts)):
            await asyncio.sleep(0.01)
        for rollout in rollouts:
            rollout.rewards = {"r": float(len(rollouts))}
        self.scored.append(len(rollouts))


class Recording(Algorithm):
    def __init__(self) -> None:
        self.sizes: list[int] = []

    async def score_group(self, group):
        self.sizes.append(len(group))

    def state(self):
        return self.sizes


@pytest.mark.parametrize(("in_order", "expected"), [(True, [1, 2, 3]), (False, [3, 2, 1])])
async def test_groups_are_credited_as_they_were_handed_in_where_that_is_asked_for(in_order: bool, expected: list[int]):
    algorithm, environment = Recording(), SlowerFirst()
    processing = TrainProcessing({"env": algorithm}, {"env": environment}, [], [], 64, in_order=in_order)
    await asyncio.gather(*[process(processing, *[rollout(math.nan) for _ in range(size)]) for size in (1, 2, 3)])
    assert environment.scored == [3, 2, 1]
    assert algorithm.sizes == expected


async def test_a_group_that_was_cancelled_does_not_hold_up_those_after_it():
    processing = TrainProcessing({"env": Grpo()}, {"env": SlowerFirst()}, [], [], 64, in_order=True)
    first = asyncio.create_task(process(processing, rollout(math.nan)))
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(first.cancel)
    assert len((await process(processing, *[rollout(math.nan) for _ in range(3)])).rollouts) == 3
