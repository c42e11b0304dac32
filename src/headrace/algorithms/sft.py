"""SFT inside a run: a frozen teacher plays the episodes, and the policy is trained on its tokens.

    loss = -log p(token)    on every token that the teacher sampled

Rewards are logged and not used. The teacher is the `sampling.source` of the episodes, so the orchestrator connects to
it and not this algorithm.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from headrace.algorithms.base import Algorithm, MakeContext
from headrace.algorithms.teacher import SET_TEACHER, DistillationConfig
from headrace.config.algorithms import ALGORITHMS, AlgoSamplingConfig
from headrace.config.model import ModelReference, describe_model
from headrace.errors import InvalidValue


@ALGORITHMS.register
class SftAlgoConfig(DistillationConfig):
    """A frozen teacher plays, the policy learns to say the same."""

    LOSS = "ce"
    CREDIT = "none: a frozen teacher plays, the policy learns to say the same"
    ON_POLICY = False
    NEEDS_TEACHER = True

    type: Literal["sft"] = "sft"
    teacher: ModelReference | None = None
    """Another name of `sampling.source`, which holds the value."""

    def make(self, context: MakeContext) -> Sft:
        return Sft()

    @model_validator(mode="after")
    def _teacher_is_source(self) -> Self:
        teacher, source = self.teacher, self.sampling.source
        if teacher is not None and "source" in self.sampling.model_fields_set and teacher != source:
            fact = f"another name of sampling.source, which is {describe_model(source)}"
            fix = "Give one of them, or the same value twice."
            raise InvalidValue(fact, key="teacher", value=describe_model(teacher), fix=fix)
        source = source if teacher is None else teacher
        if source == "policy":
            fact = "sft learns what another model writes, and would sample from the policy"
            raise InvalidValue(fact, key="teacher", fix=SET_TEACHER)
        object.__setattr__(self, "sampling", AlgoSamplingConfig(source=source))
        object.__setattr__(self, "teacher", None)
        return self


class Sft(Algorithm):
    action_loss_type = "ce"
