"""Distillation: reference logprobs of a batch from a teacher, and what opd, opsd and sft have in common."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.algorithms.base import Algorithm, Survivor
from headrace.algorithms.declaration import ORDER, SHIFT, SIGNS, ZERO_SUM, AlgorithmDeclaration, Promises
from headrace.algorithms.scoring import Scorer
from headrace.algorithms.tally import Tally
from headrace.inference.client.reference import ReferenceFailed

NO_REFERENCE = "no_reference"
"""The drop reason of a rollout that the teacher did not score completely."""


class DistillationConfig(AlgorithmDeclaration):
    """An algorithm that learns from a teacher and gives no advantages."""

    HAS_ADVANTAGES = False

    def promises(self, algorithm: Algorithm) -> Promises:
        return Promises(frozenset({ORDER}), dict.fromkeys((SHIFT, ZERO_SUM, SIGNS), "it gives no credit"))


async def distil(batch: Sequence[Survivor], hints: Sequence[list[int]], scorer: Scorer, tally: Tally) -> None:
    """Set `ref_logprobs` on every sample, scored after its rollout's hint; a rollout that lacks any is dropped."""
    jobs = [(hint, sample) for survivor, hint in zip(batch, hints, strict=True) for sample in survivor.samples]
    outcomes = iter(await scorer.score(jobs))
    failures = 0
    for survivor in batch:
        for sample in survivor.samples:
            outcome = next(outcomes)
            if isinstance(outcome, ReferenceFailed):
                failures += 1
                survivor.drop(NO_REFERENCE, str(outcome))
            else:
                sample.set_stream("ref_logprobs", outcome)
    tally.count("prefills", len(jobs) - failures)
    tally.count("failures", failures)
