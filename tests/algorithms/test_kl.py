"""The penalty for the distance to a reference: in the loss by weights and logprobs, in the reward before comparison."""

from typing import Any

import numpy as np
import pytest

from headrace.algorithms.base import Algorithm, MakeContext
from headrace.algorithms.kl import METRIC, estimate, make_algorithm
from headrace.environments.base import Environment
from headrace.orchestrator.filters import has_no_advantage
from headrace.orchestrator.processing import Filter, TrainProcessing
from headrace.orchestrator.signals import ScoredGroup, TrainBatch
from headrace.rollout.types import Group, Rollout
from headrace.tools.check_algorithm.fixtures import algorithm_config
from tests.algorithms.teachers import SEQ_LEN, TASK, Teacher, rollout_of, set_up

FROZEN = {"name": "frozen", "base_url": "http://frozen.invalid/v1"}
FILTER = Filter("zero_advantage", has_no_advantage, enforce=True)


async def algorithm_of(kl: dict[str, Any] | None, teacher: Teacher | None = None, **keys: Any) -> Algorithm:
    config = algorithm_config({"type": "grpo", **keys, **({} if kl is None else {"kl": kl})}, "test")
    return await set_up(make_algorithm(config, MakeContext(SEQ_LEN, lambda _: teacher)))


async def train(algorithm: Algorithm, *rollouts: Rollout) -> tuple[ScoredGroup, TrainBatch]:
    """All that the orchestrator does with a group that becomes a batch."""
    processing = TrainProcessing({"env": algorithm}, {"env": Environment()}, [], [FILTER], SEQ_LEN)
    for rollout in rollouts:
        await processing.process_rollout(rollout, TASK)
    scored = await processing.process_group(Group("group-0", TASK, len(rollouts), 0, draw_id=4), rollouts)
    await processing.process_batch(batch := TrainBatch([scored]))
    return scored, batch


def streams_of(batch: TrainBatch) -> list[dict[str, list[float]]]:
    return [{n: v.tolist() for n, v in s.streams.items()} for r in batch.kept for s in r.samples]


@pytest.mark.parametrize(("estimator", "expected"), [("k1", -0.5), ("k2", 0.125), ("k3", np.exp(0.5) - 1.5)])
def test_the_estimate_of_a_token_is_that_of_the_formula(estimator: str, expected: float):
    assert estimate(estimator, np.float32([-1.0]), np.float32([-0.5])) == pytest.approx([expected])


@pytest.mark.parametrize("reference", ["start", {"every": 5}])
async def test_in_the_loss_every_sampled_token_has_the_coefficient_as_its_weight(reference: Any):
    algorithm = await algorithm_of({"coef": 0.25, "estimator": "k2", "reference": reference})
    _, batch = await train(algorithm, rollout_of([1, 2], [3], reward=1, one_sample=True), rollout_of([4]))
    assert [streams["k2_weights"] for streams in streams_of(batch)] == [[0, 0.25, 0.25, 0, 0.25], [0, 0.25]]
    assert not any("kl_logprobs" in streams for streams in streams_of(batch))  # the trainer has the reference


async def test_a_frozen_reference_scores_the_rollouts_that_are_trained():
    teacher = Teacher(lambda ids, temperature: -np.arange(len(ids)) / temperature)
    algorithm = await algorithm_of({"coef": 0.25, "reference": FROZEN}, teacher)
    assert teacher.checked is not None
    _, batch = await train(algorithm, rollout_of([1, 2], reward=1, temperature=0.5), rollout_of([4]))
    assert [streams["kl_logprobs"] for streams in streams_of(batch)] == [[0, -2, -4], [0, -1]]
    assert [streams["k3_weights"] for streams in streams_of(batch)] == [[0, 0.25, 0.25], [0, 0.25]]
    await algorithm.stop()
    assert teacher.closed


async def test_a_rollout_that_a_frozen_reference_does_not_score_is_dropped():
    teacher = Teacher(fails=lambda ids: ids[-1] == 66)
    algorithm = await algorithm_of({"coef": 0.25, "reference": FROZEN}, teacher)
    _, batch = await train(algorithm, rollout_of([1], reward=1), rollout_of([66]))
    assert [reason for _, reason in batch.dropped] == ["no_reference"]
    assert len(batch.kept) == 1


async def test_a_rollout_without_an_advantage_is_still_pulled_to_the_reference():
    _, without = await train(await algorithm_of(None), rollout_of([1]), rollout_of([2]))
    _, batch = await train(await algorithm_of({"coef": 0.1}), rollout_of([1]), rollout_of([2]))
    assert (len(without.kept), len(batch.kept)) == (0, 2)


@pytest.mark.parametrize("place", ["loss", "reward"])
async def test_a_coefficient_of_0_leaves_no_trace(place: str):
    kl = {"coef": 0, "place": place, "reference": FROZEN}
    algorithm = await algorithm_of(kl, teacher := Teacher())
    _, batch = await train(algorithm, rollout_of([1], reward=1), rollout_of([2]))
    _, without = await train(await algorithm_of(None), rollout_of([1], reward=1), rollout_of([2]))
    assert streams_of(batch) == streams_of(without)
    assert (teacher.asked, teacher.checked) == ([], None)


@pytest.mark.parametrize("kind", ["grpo", "reward"])
async def test_in_the_reward_it_is_subtracted_before_rollouts_are_compared(kind: str):
    teacher = Teacher(lambda ids, _: np.full(len(ids), -1.0 - 0.5 * ids[-1]))
    kl = {"coef": 0.1, "estimator": "k1", "place": "reward", "reference": FROZEN}
    algorithm = await algorithm_of(kl, teacher, type=kind)
    # Sampled at -1 each: the distances are 0.5 * 2 for two tokens each, and 0.5 * 6.
    rollouts = rollout_of([1, 2], reward=1), rollout_of([6], reward=1)
    scored, batch = await train(algorithm, *rollouts)
    assert [rollout.metrics[METRIC] for rollout in rollouts] == [2.0, 3.0]
    assert [rollout.reward for rollout in rollouts] == [1, 1]  # what metrics and files show
    assert scored.credited == [("policy", pytest.approx(0.8)), ("policy", pytest.approx(0.7))]
    advantages = [streams["advantages"][-1] for streams in streams_of(batch)]
    assert advantages == pytest.approx([0.05, -0.05] if kind == "grpo" else [0.8, 0.7])
    assert not any(name.startswith("k") for streams in streams_of(batch) for name in streams)


async def test_a_rollout_whose_reward_cannot_be_charged_fails_on_arrival():
    teacher = Teacher(fails=lambda ids: ids[-1] == 66)
    algorithm = await algorithm_of({"coef": 0.1, "place": "reward", "reference": FROZEN}, teacher)
    scored, _ = await train(algorithm, rollout_of([1], reward=1), rollout_of([2]), rollout_of([66]))
    assert [reason for _, reason in scored.dropped] == ["no_reference"]
    assert len(scored.credited) == 2
