"""Objectives that ship. `token_grpo` combines correctness c, strict format f, brevity l and token utilisation u:

    additive                 c + f + l + u
    weighted_length_penalty  correctness_weight * c + length_penalty_lambda * interaction + f + u
                             interaction = c * l, or c * l * f

Scores that are not enabled are 0. With `strict_format_gate` the reward of a completion with f <= 0.5 is
`non_strict_penalty`, whatever its other scores. Credit within the group is the algorithm's, not an objective's.

`latent_neuralese` and `soft_tokens` are for a policy that thinks in latent space; `headrace.inference.latents` has the
formulas. Tokens stay discrete, so that rewards and formats are those of any other run.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

from headrace.environments.arguments import BadArgument, check_choice, check_flag, check_whole
from headrace.environments.hackable.registry import Objective, Progress, TrainingSample, register_objective

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
@dataclass(eq=False)
class TokenGrpo(Objective):
    """Correctness, strict format, brevity and token utilisation, added up or weighted (see the top of this file).

    Unset, `enable_length_penalty` is true in the weighted mode only. `correctness_reward` may be any other reward that
    scores correctness; `additional_rewards` are added as they are.
    """

    reward_mode: str = "additive"
    enable_length_penalty: bool | None = None
    enable_token_utilisation: bool = False
    correctness_weight: float = 1.0
    length_penalty_lambda: float = 0.5
    length_penalty_interaction: str = "correctness_length"
    strict_format_gate: bool = False
    non_strict_penalty: float = -1.0
    stage2_start_step: int | None = None
    stage2_start_epoch: float | None = None
    stage2_length_penalty_lambda: float | None = None
    correctness_reward: str = CORRECTNESS
    additional_rewards: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_choice("reward_mode", self.reward_mode, MODES)
        check_choice("length_penalty_interaction", self.length_penalty_interaction, INTERACTIONS)
        self._weighted = self.reward_mode == "weighted_length_penalty"
        if self.enable_length_penalty is None:
            self.enable_length_penalty = self._weighted
        for flag in ("enable_length_penalty", "enable_token_utilisation", "strict_format_gate"):
            check_flag(flag, getattr(self, flag))
        for number in ("correctness_weight", "non_strict_penalty"):
            _check_finite(number, getattr(self, number))
        used, others = [self.correctness_reward, *ROLES], self.additional_rewards
        if isinstance(others, str) or set(used) & set(others):
            fact = f"expected a list of rewards besides {', '.join(used)}"
            raise BadArgument(fact, key="additional_rewards", value=others)
        stage2 = self.stage2_length_penalty_lambda, self.stage2_start_step, self.stage2_start_epoch
        self._schedule = _build_schedule(self.length_penalty_lambda, *stage2)
        self._progress = Progress()

    def at(self, progress: Progress) -> Self:
        objective = copy.copy(self)
        objective._progress = progress
        return objective

    def metrics(self) -> dict[str, float]:
        stage, value = self._schedule.stage(self._progress), self._schedule.value(self._progress)
        return {"stage": float(stage), "length_penalty_lambda": value}

    def reward_names(self) -> list[str]:
        enabled = [LENGTH] * bool(self.enable_length_penalty) + [UTILISATION] * self.enable_token_utilisation
        return [self.correctness_reward, FORMAT, *enabled, *self.additional_rewards]

    def roles(self) -> dict[str, str]:
        return {"correct": self.correctness_reward, "format": FORMAT}

    def combine_rewards(self, scores: Mapping[str, Sequence[float]], samples: Sequence[TrainingSample]) -> list[float]:
        zeros = [0.0] * len(samples)
        columns = [scores.get(name, zeros) for name in (self.correctness_reward, *ROLES, *self.additional_rewards)]
        return [self._combine(*parts) for parts in zip(*columns, strict=True)]

    def _combine(self, correct: float, form: float, brevity: float, utilisation: float, *others: float) -> float:
        if self.strict_format_gate and form <= FORMAT_THRESHOLD:
            return self.non_strict_penalty
        if not self._weighted:
            return correct + form + brevity + utilisation + sum(others)
        interaction = correct * brevity * (1.0 if self.length_penalty_interaction == "correctness_length" else form)
        weighted = self.correctness_weight * correct + self._schedule.value(self._progress) * interaction
        return weighted + form + utilisation + sum(others)


def _build_schedule(first: Any, second: Any, start_step: Any, start_epoch: Any) -> TwoStages:
    """Return the checked schedule of `length_penalty_lambda`."""
    if start_step is not None and start_epoch is not None:
        fact, fix = "stage2_start_step is set, too", "Leave one of the two out."
        raise BadArgument(fact, key="stage2_start_epoch", value=start_epoch, fix=fix)
    options = {"start_step": start_step, "start_epoch": start_epoch, "length_penalty_lambda": second}
    set_options = [(f"stage2_{key}", value) for key, value in options.items() if value is not None]
    if len(set_options) == 1:
        fix = "Set stage2_length_penalty_lambda, and stage2_start_step or stage2_start_epoch."
        raise BadArgument("half of a second stage", key=set_options[0][0], value=set_options[0][1], fix=fix)
    if start_step is not None:
        check_whole("stage2_start_step", start_step, 0)
    if start_epoch is not None and _check_finite("stage2_start_epoch", start_epoch) < 0:
        raise BadArgument("it must not be negative", key="stage2_start_epoch", value=start_epoch)
    second = None if second is None else _check_finite("stage2_length_penalty_lambda", second)
    return TwoStages(_check_finite("length_penalty_lambda", first), second, start_step, start_epoch)


def _check_finite(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadArgument("expected a finite number", key=name, value=value)
    return float(value)


@register_objective("reward_sum")
class RewardSum(Objective):
    """The sum of `rewards`, each times its number in `weights` (1.0 where unset)."""

    def __init__(self, rewards: Sequence[str], weights: Sequence[float] | None = None) -> None:
        if isinstance(rewards, str) or not rewards:
            raise BadArgument("expected a list of rewards", key="rewards", value=rewards)
        if weights is not None and len(weights) != len(rewards):
            fact, fix = f"there are {len(rewards)} rewards", "Give one for each."
            raise BadArgument(fact, key="weights", value=weights, fix=fix)
        self._weights = dict(zip(rewards, weights or [1.0] * len(rewards), strict=True))

    def reward_names(self) -> list[str]:
        return list(self._weights)

    def combine_rewards(self, scores: Mapping[str, Sequence[float]], samples: Sequence[TrainingSample]) -> list[float]:
        columns = [[weight * score for score in scores[name]] for name, weight in self._weights.items()]
        return [sum(parts) for parts in zip(*columns, strict=True)]


def on_policy_settings(latents: str) -> dict[str, Any]:
    """Return the sections of a run file for thoughts of this type: no importance ratio, hence no stale rollouts."""
    return {
        "model": {"latents": {"type": latents}},
        "orchestrator": {"max_async_level": 0},
        "trainer": {"loss": {"type": "reinforce"}},
    }


@register_objective("latent_neuralese")
class LatentNeuralese(TokenGrpo):
    """The rewards of `token_grpo`, for thoughts that blend tokens with expected embeddings.

    The input embedding of each thought is a blend, by trained gates, of the token's embedding and the expected one
    (arXiv 2505.18454). Per token, with advantages divided by the standard deviation of the group:

        loss = -(A * log pi(y) - beta * k3),  beta = 0.005, k3 against the initial model without latents

    The loss is a mean over the tokens of a step, as in every run, and not over completions first.
    """

    algorithm: ClassVar[str | dict[str, Any]] = {
        "type": "grpo", "normalize": "std", "kl": {"coef": 0.005, "estimator": "k3"},
    }  # fmt: skip
    settings: ClassVar[dict[str, Any]] = on_policy_settings("hybrid")


@register_objective("soft_tokens")
class SoftTokens(TokenGrpo):
    """The rewards of `token_grpo`, for thoughts that are noisy expected embeddings.

    The log-density of the noise takes the place of the token's logprob (arXiv 2509.19170). The trained model is used
    with ordinary tokens, so that any engine serves it. The advantage is the reward minus the group's mean; that minus
    the mean of the others (RLOO) is n / (n - 1) times as large in a group of n.
    """

    settings: ClassVar[dict[str, Any]] = on_policy_settings("soft")
