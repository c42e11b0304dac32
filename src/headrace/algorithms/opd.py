"""On-policy distillation: the policy learns from a frozen teacher on its own samples.

    ref_t = log p_teacher(token_t | all before it)        KL(policy || teacher), estimated on the policy's own tokens

The teacher scores the sample's own tokens at the temperature that they were sampled at. Rewards are logged and not
used. A rollout that the teacher did not score is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from headrace.algorithms.base import Algorithm, Survivor
from headrace.algorithms.declaration import MakeContext
from headrace.algorithms.distillation import DistillationConfig, distil
from headrace.algorithms.scoring import Scorer, open_scorer
from headrace.config.algorithms import ALGORITHMS
from headrace.config.model_reference import ModelReference
from headrace.errors import InvalidValue
from headrace.inference.client.reference import Reference


@ALGORITHMS.register
class OpdConfig(DistillationConfig):
    """On-policy distillation: towards a frozen teacher on the policy's own samples."""

    LOSS = "ref_kl"
    CREDIT = "none: towards a frozen teacher, on the policy's own tokens"
    NEEDS_TEACHER = True

    type: Literal["opd"] = "opd"
    teacher: ModelReference | None = None
    """The model that is learned from."""
    max_concurrent: int = Field(32, ge=1)
    """Requests to the teacher at once."""

    def make(self, context: MakeContext) -> Opd:
        teacher = context.reference(self.teacher)
        assert teacher is not None, "a section without a frozen teacher is refused"
        return Opd(teacher, self.max_concurrent)

    @model_validator(mode="after")
    def _has_another_teacher(self) -> Self:
        if self.teacher is None:
            raise InvalidValue(
                "opd needs a teacher, which is not set",
                key="teacher",
                fix="Set teacher.name, and teacher.base_url to where it is served.",
            )
        if self.teacher == "policy":
            raise InvalidValue(
                "the KL of the policy to itself is zero",
                key="teacher",
                value="policy",
                fix='Set teacher.name and teacher.base_url of another model, or type = "opsd", where the policy learns '
                "from a demonstration.",
            )
        return self


class Opd(Algorithm):
    action_loss_type = "ref_kl"
    model_role = "teacher"

    def __init__(self, teacher: Reference, max_concurrent: int = 32) -> None:
        self._teacher = teacher
        self._max_concurrent = max_concurrent
        self._scorer: Scorer

    async def setup(self) -> None:
        self._scorer = await open_scorer(self._teacher, self.host, self._max_concurrent)

    async def close(self) -> None:
        await self._teacher.close()

    async def score_batch(self, batch: Sequence[Survivor]) -> None:
        no_hints: list[list[int]] = [[] for _ in batch]
        await distil(batch, no_hints, self._scorer, self.tally)
