"""Many sequences scored by another model: a bounded number at once, and no longer than the model answers.

Nothing is tried again here: how long a request may take, and how often it is repeated, is the reference's business.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence

import numpy as np

from headrace.algorithms.base import Host
from headrace.inference.client.reference import Reference, ReferenceFailed
from headrace.rollout.types import Sample

log = logging.getLogger(__name__)

Job = tuple[list[int], Sample]
"""The tokens of a hint, which may be none, and the sample that is scored after it."""

PATIENCE = 3
"""Failures in a row after which nothing more is asked, unless something that is still under way succeeds."""


async def open_scorer(
    teacher: Reference | None, host: Host, max_concurrent: int, longest: int = 0, cost: str = ""
) -> Scorer:
    """A scorer by this model, or by the policy, that has said it can; raises `BadInput` if it cannot.

    `longest` is how long a sample may be with a hint before it, and `cost` says what becomes of those too long for the
    model: hints may be short, so that is only told.
    """
    reference = host.policy if teacher is None else teacher
    room = await reference.check(host.tokenizer, host.seq_len, host.temperature)
    if room is not None and room < longest:
        words = "%s: %s takes at most %d tokens, and a hint with its sample may have %d: %s; serve it with "
        words += "max_model_len = %d, unless hints are that much shorter"
        log.warning(words, host.env, reference.name, room, longest, cost, longest)
    return Scorer(reference, max_concurrent)


class Scorer:
    def __init__(self, reference: Reference, max_concurrent: int = 32) -> None:
        self.reference = reference
        self._max_concurrent = max_concurrent

    async def score(self, jobs: Sequence[Job]) -> list[np.ndarray | ReferenceFailed]:
        """For each job one logprob per token of its sample, at the sample's temperature; or why there are none.

        A model that does not answer is given up: one that is dead or hangs costs the time of those requests that are
        under way at once, and not that of each. A sequence that is too long for it costs nothing but its own scores.
        """
        outcomes: dict[int, np.ndarray | ReferenceFailed] = {}
        # The shortest first: where one is too long, so are those after it, and those before it are scored.
        waiting = deque(sorted(range(len(jobs)), key=lambda index: len(jobs[index][0]) + len(jobs[index][1])))
        running: dict[asyncio.Task[np.ndarray | ReferenceFailed], int] = {}
        failures: list[ReferenceFailed] = []
        try:
            while running or (waiting and len(failures) < PATIENCE):
                while waiting and len(running) < self._max_concurrent and len(failures) < PATIENCE:
                    index = waiting.popleft()
                    running[asyncio.create_task(self._score(*jobs[index]))] = index
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    outcome = outcomes[running.pop(task)] = task.result()
                    failures = [*failures, outcome] if isinstance(outcome, ReferenceFailed) else []
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return [outcomes[index] if index in outcomes else failures[-1] for index in range(len(jobs))]

    async def _score(self, hint: list[int], sample: Sample) -> np.ndarray | ReferenceFailed:
        token_ids = hint + sample.token_ids.tolist()
        try:
            scores = await self.reference.score(token_ids, sample.temperature)
        except ReferenceFailed as failure:
            return failure
        if len(scores) != len(token_ids) or not np.all(np.isfinite(scores)):
            return ReferenceFailed(
                f"{self.reference.name} gave no usable scores: {np.count_nonzero(np.isfinite(scores))} finite numbers "
                f"for {len(token_ids)} tokens"
            )
        return np.array(scores[len(hint) :], np.float64)
