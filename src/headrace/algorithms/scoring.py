"""Score many sequences with another model, a bounded number at a time.

Timeouts and retries of a request belong to the reference. Here a model that keeps failing is given up.
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
"""The tokens of a hint, possibly empty, and the sample that is scored after it."""

MAX_FAILURES_IN_A_ROW = 3
"""Consecutive failures after which no further request is made, unless one that is in flight succeeds."""


async def open_scorer(
    teacher: Reference | None, host: Host, max_concurrent: int, longest: int = 0, cost: str = ""
) -> Scorer:
    """Return a scorer for the teacher, or for the policy; raise `BadInput` if the model cannot score samples.

    `longest` is the length of a sample with a hint before it. A model that takes fewer tokens is only warned about,
    since hints may be short; `cost` says what happens to rollouts that are too long.
    """
    reference = host.policy if teacher is None else teacher
    capacity = await reference.check(host.tokenizer, host.seq_len, host.temperature)
    if capacity is not None and capacity < longest:
        words = "%s: %s takes at most %d tokens, and a hint with its sample may have %d: %s; serve it with "
        words += "max_model_len = %d, unless hints are that much shorter"
        log.warning(words, host.env, reference.name, capacity, longest, cost, longest)
    return Scorer(reference, max_concurrent)


class Scorer:
    def __init__(self, reference: Reference, max_concurrent: int = 32) -> None:
        self.reference = reference
        self._max_concurrent = max_concurrent

    async def score(self, jobs: Sequence[Job]) -> list[np.ndarray | ReferenceFailed]:
        """Return for each job one logprob per token of its sample, at the sample's temperature, or the failure.

        After `MAX_FAILURES_IN_A_ROW` the remaining jobs fail without a request, so that a dead model costs the timeout
        of the requests in flight and not of all.
        """
        outcomes: dict[int, np.ndarray | ReferenceFailed] = {}
        # Shortest first: sequences that are too long for the model come last, after all others are scored.
        waiting = deque(sorted(range(len(jobs)), key=lambda index: len(jobs[index][0]) + len(jobs[index][1])))
        running: dict[asyncio.Task[np.ndarray | ReferenceFailed], int] = {}
        failures: list[ReferenceFailed] = []
        try:
            while running or (waiting and len(failures) < MAX_FAILURES_IN_A_ROW):
                while waiting and len(running) < self._max_concurrent and len(failures) < MAX_FAILURES_IN_A_ROW:
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
