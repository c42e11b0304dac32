"""The objective `token_grpo`: correctness c, strict format f, brevity l and token utilisation u of each completion.

    additive                 c + f + l + u
    weighted_length_penalty  correctness_weight * c + length_penalty_lambda * interaction + f + u
                             interaction = c * l, or c * l * f

Scores that are not enabled are 0. With `strict_format_gate` the reward of a completion with f <= 0.5 is
`non_strict_penalty`, whatever its other scores. Credit within the group is the algorithm's, not an objective's.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from headrace.environments.arguments import BadArgument, check_choice, check_flag, check_whole
from headrace.environments.hackable.registry import Objective, Progress, register_objective
from headrace.environments.hackable.samples import TrainingSample

CORRECTNESS = "gsm8k_correctness_reward"
FORMAT = "format_tag_reward"
LENGTH = "length_penalty_reward"
UTILISATION = "token_utilisation_reward"
ROLES = (FORMAT, LENGTH, UTILISATION)
MODES = ("additive", "weighted_length_penalty")
INTERACTIONS = ("correctness_length", "correctness_length_format")
FORMAT_THRESHOLD = 0.5
"""A completion with a format score up to this is malformed."""


class TwoStages(NamedTuple):
    """A number that changes at a step or at an epoch."""

    first: float
    second: float | None = None
    start_step: int | None = None
    start_epoch: float | None = None

    def stage(self, progress: Progress) -> int:
        by_step = self.start_step is not None and progress.step >= self.start_step
        by_epoch = self.start_epoch is not None and progress.epoch >= self.start_epoch
        return 2 if by_step or by_epoch else 1

    def value(self, progress: Progress) -> float:
        return self.second if self.second is not None and self.stage(progress) == 2 else self.first


@register_objective("token_grpo")
class TokenGrpo(Objective):
    """Correctness, strict format, brevity and token utilisation, added up or weighted (see the top of this file).

    Unset, `enable_length_penalty` is true in the weighted mode only. `correctness_reward` may be any other reward that
    scores correctness; `additional_rewards` are added as they are.
    """

    def __init__(
        self,
        reward_mode: str = "additive",
        enable_length_penalty: bool | None = None,
        enable_token_utilisation: bool = False,
        correctness_weight: float = 1.0,
        length_penalty_lambda: float = 0.5,
        length_penalty_interaction: str = "correctness_length",
        strict_format_gate: bool = False,
        non_strict_penalty: float = -1.0,
        stage2_start_step: int | None = None,
        stage2_start_epoch: float | None = None,
        stage2_length_penalty_lambda: float | None = None,
        correctness_reward: str = CORRECTNESS,
        additional_rewards: Sequence[str] = (),
    ) -> None:
        check_choice("reward_mode", reward_mode, MODES)
        check_choice("length_penalty_interaction", length_penalty_interaction, INTERACTIONS)
        weighted = reward_mode == "weighted_length_penalty"
        self._with_length = weighted if enable_length_penalty is None else enable_length_penalty
        check_flag("enable_length_penalty", self._with_length)
        check_flag("enable_token_utilisation", enable_token_utilisation)
        check_flag("strict_format_gate", strict_format_gate)
        if isinstance(additional_rewards, str) or {correctness_reward, *ROLES} & set(additional_rewards):
            raise BadArgument(
                f"expected a list of rewards besides {', '.join([correctness_reward, *ROLES])}",
                key="additional_rewards",
                value=additional_rewards,
            )
        self._weighted = weighted
        self._with_utilisation = enable_token_utilisation
        self._correctness_weight = _finite("correctness_weight", correctness_weight)
        self._with_format = length_penalty_interaction == "correctness_length_format"
        self._gate = strict_format_gate
        self._penalty = _finite("non_strict_penalty", non_strict_penalty)
        self._correctness = correctness_reward
        self._additional = list(additional_rewards)
        self.schedule = _two_stages(
            length_penalty_lambda, stage2_length_penalty_lambda, stage2_start_step, stage2_start_epoch
        )
        self._progress = Progress()

    def at(self, progress: Progress) -> Self:
        then = copy.copy(self)
        then._progress = progress
        return then

    def metrics(self) -> dict[str, float]:
        stage, value = self.schedule.stage(self._progress), self.schedule.value(self._progress)
        return {"stage": float(stage), "length_penalty_lambda": value}

    def reward_names(self) -> list[str]:
        enabled = [LENGTH] * self._with_length + [UTILISATION] * self._with_utilisation
        return [self._correctness, FORMAT, *enabled, *self._additional]

    def roles(self) -> dict[str, str]:
        return {"correct": self._correctness, "format": FORMAT}

    def combine_rewards(self, scores: Mapping[str, Sequence[float]], samples: Sequence[TrainingSample]) -> list[float]:
        nothing = [0.0] * len(samples)
        columns = [scores.get(name, nothing) for name in (self._correctness, *ROLES, *self._additional)]
        return [
            self._penalty
            if self._gate and form <= FORMAT_THRESHOLD
            else self._combined(right, form, brief, used) + sum(rest)
            for right, form, brief, used, *rest in zip(*columns, strict=True)
        ]

    def _combined(self, right: float, form: float, brief: float, used: float) -> float:
        if not self._weighted:
            return right + form + brief + used
        interaction = right * brief * (form if self._with_format else 1.0)
        return self._correctness_weight * right + self.schedule.value(self._progress) * interaction + form + used


def _two_stages(first: Any, second: Any, start_step: Any, start_epoch: Any) -> TwoStages:
    if start_step is not None and start_epoch is not None:
        fact, fix = "stage2_start_step is set, too", "Leave one of the two out."
        raise BadArgument(fact, key="stage2_start_epoch", value=start_epoch, fix=fix)
    options = {
        "stage2_start_step": start_step,
        "stage2_start_epoch": start_epoch,
        "stage2_length_penalty_lambda": second,
    }
    given = [(key, value) for key, value in options.items() if value is not None]
    if len(given) == 1:
        fix = "Set stage2_length_penalty_lambda, and stage2_start_step or stage2_start_epoch."
        raise BadArgument("half of a second stage", key=given[0][0], value=given[0][1], fix=fix)
    if start_step is not None:
        check_whole("stage2_start_step", start_step, 0)
    if start_epoch is not None and _finite("stage2_start_epoch", start_epoch) < 0:
        raise BadArgument("it must not be negative", key="stage2_start_epoch", value=start_epoch)
    then = None if second is None else _finite("stage2_length_penalty_lambda", second)
    return TwoStages(_finite("length_penalty_lambda", first), then, start_step, start_epoch)


def _finite(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadArgument("expected a finite number", key=name, value=value)
    return float(value)
