"""Echo: group credit on the policy's tokens, cross-entropy on the tokens of its environment.

    loss = rl(credit) on sampled tokens  +  alpha_role * -log p(token) on observed ones

Observed tokens are those after the first response that the policy did not write: message bodies only, and only of roles
that have an `alpha`. The trainer's mean is over all observed tokens of the step, and `alpha` scales it. A rollout whose
advantage is 0 (its whole group has the same reward) learns only from what it observed.

Left out on purpose: any choice by content. A `keep` function of the user can narrow the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from headrace.algorithms.base import Algorithm, CreditTerm, MakeContext, RolloutView
from headrace.algorithms.group_credit import GroupCredit, GroupCreditConfig
from headrace.config.algorithms import ALGORITHMS, ImportConfig
from headrace.config.base import Config, as_table
from headrace.errors import InvalidValue
from headrace.imports import load_function, name_of
from headrace.rollout.merge import observed_roles
from headrace.rollout.types import ROLES, Rollout

Keep = Callable[[Rollout], Any]
"""Returns for each turn of a rollout a mask over the tokens of its prompt, or None to keep them all."""


Role = Literal["system", "user", "assistant", "tool"]


class EchoRoleConfig(Config):
    """The weight of one role's tokens; the number alone is enough."""

    alpha: float = Field(0.1, gt=0)
    """Weight of the tokens that this role wrote."""

    @model_validator(mode="before")
    @classmethod
    def _read_number(cls, value: Any) -> Any:
        return as_table(value, "alpha", (int, float))


def _default_roles() -> dict[Role, EchoRoleConfig]:
    return {"tool": EchoRoleConfig()}


@ALGORITHMS.register
class EchoConfig(GroupCreditConfig):
    """GRPO on what the policy wrote, cross-entropy on what its environment answered."""

    LOSS = "rl and ce"
    CREDIT = "as `grpo` on what the policy wrote; cross-entropy with weight `alpha` on what tools or users answered"
    RENDERER_FOR = "must know who wrote each token"
    NEEDS_ROLES = True

    type: Literal["echo"] = "echo"
    roles: dict[Role, EchoRoleConfig] = Field(default_factory=_default_roles)
    """Whose tokens are learned; setting any role replaces the table."""
    filter: ImportConfig | None = None
    """A function of a rollout that gives one keep-mask per turn; it can only narrow."""

    def make(self, context: MakeContext) -> Echo:
        alphas = {role: entry.alpha for role, entry in self.roles.items()}
        return Echo(self.make_credit(context), alphas, self._load_filter())

    def check_imports(self) -> None:
        super().check_imports()
        self._load_filter()

    def _load_filter(self) -> Keep | None:
        own = self.filter
        return None if own is None else load_function(own.import_path, own.kwargs, "filter of echo")

    @field_validator("roles")
    @classmethod
    def _some_role(cls, roles: Any) -> Any:
        if not roles:
            fix = 'Set alpha of a role, as tool.alpha = 0.1, leave roles out for that, or set type = "grpo".'
            raise InvalidValue("echo without a role is grpo", value=roles, fix=fix)
        return roles


class Echo(Algorithm):
    def __init__(self, credit: GroupCredit, alphas: Mapping[Role, float], keep: Keep | None = None) -> None:
        self._credit = credit
        self._alphas = np.zeros(len(ROLES))
        for role, alpha in alphas.items():
            self._alphas[ROLES.index(role)] = alpha
        self._keep = keep

    async def score_rollout(self, rollout: RolloutView) -> None:
        masks = [] if self._keep is None else _keep_masks(self._keep, rollout.rollout)
        for sample in rollout.samples:
            roles = observed_roles(sample, rollout.rollout.turns)
            if roles is None:
                raise ValueError(
                    "echo needs the role that wrote each token, which the model's own chat template does not give: set "
                    "orchestrator.renderer.name to the renderer of the model's family"
                )
            weights = self._alphas[roles]
            for start, turn, prompt_start, length in sample.obs_spans if masks else ():
                if (mask := masks[turn]) is not None:  # 0 for observed tokens where the mask of their turn is false
                    first = sample.prompt_length + start
                    weights[first : first + length] *= mask[prompt_start : prompt_start + length]
            if weights.any():
                sample.set_stream("ce_weights", weights)

    def credit_terms(self, group: Sequence[RolloutView]) -> list[CreditTerm]:
        return self._credit.terms(group, self.tally)

    async def score_group(self, group: Sequence[RolloutView]) -> None:
        for rollout, advantage in zip(group, self._credit.advantages(group, self.tally), strict=True):
            rollout.assign_advantages(float(advantage))
            if advantage == 0 and any("ce_weights" in sample.streams for sample in rollout.samples):
                for sample in rollout.samples:  # otherwise its tokens would count in the mean of the rl loss
                    sample.set_stream("rl_weights", np.zeros(len(sample)))


def _keep_masks(keep: Keep, rollout: Rollout) -> list[np.ndarray | None]:
    """Call the user's filter; return one mask per turn, or raise if its result has another form."""
    masks = keep(rollout)
    if not isinstance(masks, list | tuple) or len(masks) != len(rollout.turns):
        what = f"{len(masks)} masks" if isinstance(masks, list | tuple) else f"a {type(masks).__name__}"
        raise ValueError(
            f"{name_of(keep)} returned {what} for {len(rollout.turns)} turns: give a list with a mask for each, or None"
        )
    masks = [None if mask is None else np.asarray(mask, np.bool_) for mask in masks]
    for index, (mask, turn) in enumerate(zip(masks, rollout.turns, strict=True)):
        if mask is not None and mask.shape != turn.prompt_ids.shape:
            raise ValueError(
                f"{name_of(keep)} returned a mask of shape {mask.shape} for turn {index}, whose prompt has "
                f"{len(turn.prompt_ids)} tokens: give one value for each of them, or None to keep them all"
            )
    return masks
