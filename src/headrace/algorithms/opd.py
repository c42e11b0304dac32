"""On-policy distillation: the policy learns from a frozen teacher on its own samples.

    ref_t = log p_teacher(token_t | all before it)        KL(policy || teacher), estimated on the policy's own tokens

The teacher scores the sample's own tokens at the temperature that they were sampled at. Rewards are logged and not
used. A rollout that the teacher did not score is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import Field

from headrace.algorithms.base import MakeContext, Survivor
from headrace.algorithms.teacher import DistillationConfig, TaughtAlgorithm
from headrace.config.algorithms import ALGORITHMS
from headrace.config.model import ModelReference
from headrace.errors import InvalidValue


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
        return Opd(context.reference(self.teacher), self.max_concurrent)

    def problems(self) -> Iterator[InvalidValue]:
        yield from super().problems()
        if self.teacher is None:
            yield InvalidValue(
                "opd needs a teacher, which is not set",
                key="teacher",
                fix="Set teacher.name, and teacher.base_url to where it is served.",
            )
        if self.teacher == "policy":
            yield InvalidValue(
                "the KL of the policy to itself is zero",
                key="teacher",
                value="policy",
                fix='Set teacher.name and teacher.base_url of another model, or type = "opsd", where the policy learns '
                "from a demonstration.",
            )


class Opd(TaughtAlgorithm):
    action_loss_type = "ref_kl"

    async def score_batch(self, batch: Sequence[Survivor]) -> None:
        await self.distil(batch, [[] for _ in batch])
