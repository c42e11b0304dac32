"""A custom algorithm and a custom term: a leave-one-out baseline, a bonus for answers that siblings did not give."""

from collections.abc import Sequence

import numpy as np

from headrace.algorithms.base import Algorithm, RolloutView
from headrace.rollout.credit import center


class Rloo(Algorithm):
    """RLOO (arXiv 2402.14740): the baseline of a rollout is the mean reward of the others.

    A_i = r_i - mean of r_j, j != i = (r_i - mean(r)) * n / (n - 1)
    """

    promises = ("order", "shift", "zero_sum")  # `headrace check-algorithm` holds it to them

    async def score_group(self, group: Sequence[RolloutView]) -> None:
        rewards = np.array([rollout.reward for rollout in group])
        scale = len(group) / max(1, len(group) - 1)
        for rollout, advantage in zip(group, center(rewards) * scale, strict=True):
            rollout.assign_advantages(float(advantage))
        self.tally.mean("solved", float(np.count_nonzero(rewards == 1)), len(group))  # logged as algo/ENV/solved


def novelty(group: Sequence[RolloutView], weight: float = 0.1) -> list[float]:
    """A term for grpo: up to `weight` for an answer, by the share of siblings whose answer is another one."""
    answers = [str(rollout.rollout.messages[-1]["content"]) for rollout in group]
    return [weight * (1 - answers.count(answer) / len(answers)) for answer in answers]
