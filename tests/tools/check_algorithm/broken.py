"""Algorithms that each break one invariant, and some that are correct in an unusual way."""

import asyncio
import math
import random
from collections import Counter
from typing import ClassVar

import numpy as np

from headrace.algorithms.base import Algorithm
from headrace.algorithms.rlcsd import Rlcsd
from headrace.inference.client.reference import ReferenceFailed
from headrace.rollout.credit import center


class Sound(Algorithm):
    """Subtracts the group's mean as a baseline; correct in every respect."""

    async def score_group(self, group):
        for rollout, advantage in zip(group, self.credit(np.array([r.reward for r in group])), strict=True):
            rollout.assign_advantages(float(advantage))

    def credit(self, rewards):
        return center(rewards)


class Uncentered(Sound):
    promises = ("shift",)

    def credit(self, rewards):
        return rewards


class NotSummingToZero(Sound):
    promises = ("zero_sum", "shift")

    def credit(self, rewards):
        return rewards - rewards.max()


class NotANumber(Sound):
    def credit(self, rewards):
        with np.errstate(invalid="ignore"):
            return center(rewards) / rewards.std()


class Rounding(Sound):
    def credit(self, rewards):
        rewards = rewards.astype(np.float32)
        return rewards - rewards.sum() / len(rewards)


class RoundingMadeLarge(Sound):
    """Divides the rounding error of equal rewards by a rounding error."""

    promises = ("zero_sum",)

    def credit(self, rewards):
        return (rewards - rewards.mean()) / max(rewards.std(), 1e-12)


class FirstCome(Sound):
    promises = ("order",)

    def credit(self, rewards):
        return rewards - rewards[0]


class Dice(Sound):
    def credit(self, rewards):
        return center(rewards) + random.random()


class LonelyFails(Sound):
    def credit(self, rewards):
        second = rewards[1]  # may not exist
        return center(rewards) + 0 * second


class OfAnotherLength(Sound):
    async def score_group(self, group):
        for rollout in group:
            for sample in rollout.samples:
                sample.streams["advantages"] = np.zeros(3, np.float32)


class OnPrompts(Sound):
    async def score_group(self, group):
        for rollout in group:
            for sample in rollout.samples:
                sample.set_stream("advantages", np.ones(len(sample)))


class Nothing(Algorithm):
    """Assigns no credit, so the tokens have no loss."""


class NoReference(Algorithm):
    action_loss_type = "ref_kl"


class LastToken(Algorithm):
    """Correct: imitates the last token of each sample alone."""

    action_loss_type = "ce"

    async def score_batch(self, batch):
        for survivor in batch:
            for sample in survivor.samples:
                weights = np.zeros(len(sample))
                weights[np.flatnonzero(sample.mask)[-1:]] = 0.5
                sample.set_stream("ce_weights", weights)


class NoSuchLoss(Sound):
    action_loss_type = "dpo"


class Meddling(Sound):
    async def score_group(self, group):
        await super().score_group(group)
        for rollout in group:
            rollout.rollout.reward = 0.0


class Adviser(Sound):
    """Requests logprobs from the policy and does not handle failures."""

    async def score_batch(self, batch):
        for survivor in batch:
            for sample in survivor.samples:
                await self.host.policy.score(sample.token_ids.tolist(), sample.temperature)


class Inventive(Algorithm):
    """Invents logprobs when a request to the policy fails."""

    action_loss_type = "ref_kl"

    async def score_batch(self, batch):
        for survivor in batch:
            for sample in survivor.samples:
                try:
                    scores = await self.host.policy.score(sample.token_ids.tolist(), sample.temperature)
                except ReferenceFailed:
                    scores = np.zeros(len(sample))
                sample.set_stream("ref_logprobs", scores)


class CountingOnAll(Sound):
    """Assumes in `score_batch` that no member of a group was filtered."""

    def __init__(self):
        self.sizes = {}

    async def score_group(self, group):
        await super().score_group(group)
        self.sizes[group[0].group_id] = len(group)

    async def score_batch(self, batch):
        for group_id, size in Counter(survivor.group_id for survivor in batch).items():
            if self.sizes[group_id] != size:
                raise KeyError(group_id)


class SignsTurned(Rlcsd):
    async def score_batch(self, batch):
        await super().score_batch(batch)
        for survivor in batch:
            for sample in survivor.samples:
                sample.set_stream("advantages", -sample.streams["advantages"])


class Counting(Sound):
    """Divides by the number of groups so far; `load_state` does not restore it."""

    def __init__(self):
        self.groups = 0

    def credit(self, rewards):
        self.groups += 1
        return center(rewards) / self.groups

    def state(self):
        return self.groups

    def load_state(self, state):
        pass


class CountingLate(Counting):
    """Correct: it has a state after its first group."""

    def state(self):
        return self.groups or None

    def load_state(self, state):
        self.groups = state


class CountingBatches(Counting):
    async def score_batch(self, batch):
        self.groups += 1

    def load_state(self, state):
        self.groups = state


class HiddenBaseline(Algorithm):
    """Updates a baseline from group to group without a state that survives a restart."""

    def __init__(self):
        self.baseline = 0.0

    async def score_group(self, group):
        for rollout in group:
            rollout.assign_advantages(rollout.reward - self.baseline)
        self.baseline += 0.1 * (np.mean([rollout.reward for rollout in group]) - self.baseline)


class FirstOfTask(Algorithm):
    """The baseline is the first reward of the task in any instance."""

    SEEN: ClassVar[dict[str, float]] = {}

    async def score_group(self, group):
        for rollout in group:
            rollout.assign_advantages(rollout.reward - self.SEEN.setdefault(rollout.task.key, rollout.reward))


class Interrupted(Algorithm):
    """Keeps the baseline in an attribute across an await, where another group may overwrite it."""

    async def score_group(self, group):
        self.baseline = max(rollout.reward for rollout in group)
        await asyncio.sleep(0)
        for rollout in group:
            rollout.assign_advantages(rollout.reward - self.baseline)


class SmallerFromBatchToBatch(Sound):
    """Divides by the number of batches so far."""

    def __init__(self):
        self.batches = 0

    async def score_batch(self, batch):
        self.batches += 1
        for survivor in batch:
            for sample in survivor.samples:
                sample.set_stream("advantages", sample.streams["advantages"] / self.batches)


class RandomSibling(Algorithm):
    """Correct: the baseline is a sibling's reward, drawn with the group's id as seed."""

    promises = ("shift",)

    async def score_group(self, group):
        rng = random.Random(group[0].group_id)
        for rollout in group:
            others = [other.reward for other in group if other is not rollout]
            rollout.assign_advantages(rollout.reward - rng.choice(others) if others else 0.0)


class SeededByTask(Algorithm):
    """Correct: the credit depends on the task's key."""

    async def score_group(self, group):
        scale = random.Random(group[0].task.key).random()
        for rollout in group:
            rollout.assign_advantages(rollout.reward * scale)


class Exponential(Algorithm):
    """Correct as long as rewards are of an ordinary size."""

    async def score_group(self, group):
        for rollout in group:
            rollout.assign_advantages(math.exp(rollout.reward))


class Unconstructible(Sound):
    def __init__(self):
        raise KeyError("model")
