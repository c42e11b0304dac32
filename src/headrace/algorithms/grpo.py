"""GRPO: a rollout's credit is its reward minus the mean reward of its group.

    A_i = r_i - mean(r)                      normalize = None
    A_i = (r_i - mean(r)) / (std(r) + 1e-6)  normalize = "std"

Left out on purpose: division by the standard deviation by default (it weighs nearly solved and nearly hopeless prompts
up), and any term of the loss: clipping and KL are the trainer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from headrace.algorithms.base import Algorithm, RolloutView
from headrace.rollout.credit import center, standardize


class Grpo(Algorithm):
    def __init__(self, normalize: Literal["std"] | None = None) -> None:
        self.credit = standardize if normalize == "std" else center

    async def score_group(self, group: Sequence[RolloutView]) -> None:
        rewards = np.array([rollout.reward for rollout in group])
        for rollout, advantage in zip(group, self.credit(rewards), strict=True):
            rollout.assign_advantages(float(advantage))
