"""Echo: group credit on what the policy wrote, cross-entropy on what its environment answered.

    loss = rl(credit) on sampled tokens  +  alpha_role * -log p(token) on observed ones

Observed are the tokens after the first response that the policy did not write, message bodies alone, and of them those
whose role has an `alpha`. The trainer's mean is over all observed tokens of the step, and `alpha` scales it. A rollout
without credit (all its group did as well) still learns from what it observed, and from that alone.

Left out on purpose: any choice by content. A `keep` function of your own makes it, and can only narrow the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from headrace.algorithms.base import Algorithm, RolloutView
from headrace.algorithms.group_credit import GroupCredit
from headrace.algorithms.user_function import name_of
from headrace.rollout.merge import observed_roles
from headrace.rollout.types import ROLES, Rollout, Sample

Role = Literal["system", "user", "assistant", "tool"]
Keep = Callable[[Rollout], Any]
"""For each turn of the rollout a mask over its prompt's tokens, or None to keep them all."""


class Echo(Algorithm):
    def __init__(self, credit: GroupCredit, alphas: Mapping[Role, float], keep: Keep | None = None) -> None:
        self._credit = credit
        self._alphas = np.zeros(len(ROLES))
        for role, alpha in alphas.items():
            self._alphas[ROLES.index(role)] = alpha
        self._keep = keep

    async def score_rollout(self, rollout: RolloutView) -> None:
        masks = None if self._keep is None else _masks(self._keep, rollout.rollout)
        for sample in rollout.samples:
            roles = observed_roles(sample, rollout.rollout.turns)
            if roles is None:
                raise ValueError(
                    "echo must know who wrote each token, and the model's own chat template does not tell: set "
                    "orchestrator.renderer.name to the renderer of the model's family"
                )
            weights = self._alphas[roles]
            if masks is not None:
                _narrow(weights, sample, masks)
            if weights.any():
                sample.set_stream("ce_weights", weights)

    async def score_group(self, group: Sequence[RolloutView]) -> None:
        for rollout, advantage in zip(group, self._credit.of(group, self.tally), strict=True):
            rollout.assign_advantages(float(advantage))
            if advantage == 0 and any("ce_weights" in sample.streams for sample in rollout.samples):
                for sample in rollout.samples:  # else its tokens would count where there is nothing to learn
                    sample.set_stream("rl_weights", np.zeros(len(sample)))


def _masks(keep: Keep, rollout: Rollout) -> list[np.ndarray | None]:
    """What the user's function gives, one mask per turn."""
    given = keep(rollout)
    if not isinstance(given, list | tuple) or len(given) != len(rollout.turns):
        what = f"{len(given)} masks" if isinstance(given, list | tuple) else f"a {type(given).__name__}"
        raise ValueError(
            f"{name_of(keep)} gave {what} for {len(rollout.turns)} turns: give a list with a mask for each, or None"
        )
    masks = [None if mask is None else np.asarray(mask, np.bool_) for mask in given]
    for index, (mask, turn) in enumerate(zip(masks, rollout.turns, strict=True)):
        if mask is not None and mask.shape != turn.prompt_ids.shape:
            raise ValueError(
                f"{name_of(keep)} gave a mask of shape {mask.shape} for turn {index}, whose prompt has "
                f"{len(turn.prompt_ids)} tokens: give one value for each of them, or None to keep them all"
            )
    return masks


def _narrow(weights: np.ndarray, sample: Sample, masks: Sequence[np.ndarray | None]) -> None:
    """Take the weight from observed tokens that their turn's mask leaves out."""
    for start, turn, prompt_start, length in sample.obs_spans:
        mask = masks[turn]
        if mask is not None:
            place = sample.prompt_length + start
            weights[place : place + length] *= mask[prompt_start : prompt_start + length]
