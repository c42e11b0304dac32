"""Algorithms with a teacher: a model that scores samples, a bounded number at a time, and distillation from it.

The reference has the timeouts and retries of a request. This module stops requests to a model that keeps failing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
from pydantic import Field

from headrace.algorithms.base import Algorithm, Survivor
from headrace.config.algorithms import AlgorithmConfig, Promises, hinted_length
from headrace.config.model import ModelReference
from headrace.errors import InvalidValue
from headrace.inference.client.reference import Reference, ReferenceFailed
from headrace.rollout.types import Sample

log = logging.getLogger(__name__)

Job = tuple[list[int], Sample]
"""The tokens of a prompt, and the sample whose completion is scored after it instead of after its own prompt."""

SET_TEACHER = "Set teacher.name, and teacher.base_url to where it is served."
NO_REFERENCE = "no_reference"
"""The drop reason of a rollout that the teacher did not score completely."""
MAX_FAILURES_IN_A_ROW = 3
"""Consecutive failures after which no further request is made, unless one that is in flight succeeds."""


class TaughtAlgorithm(Algorithm):
    """An algorithm whose samples are scored by a frozen teacher, or by the live policy if `teacher` is None.

    `unscored` says what happens to rollouts that are too long to be scored with a hint before them; empty: no hints.
    """

    model_role = "teacher"

    def __init__(self, teacher: Reference | None = None, max_concurrent: int = 32, unscored: str = "") -> None:
        if teacher is not None:
            self.teacher = teacher
        self.max_concurrent = max_concurrent
        self._unscored = unscored
        self._scorer: Scorer

    async def setup(self) -> None:
        """Warn if a sample with its hint may be too long for the teacher."""
        host, capacity = self.host, self.teacher_max_len
        longest = hinted_length(host.seq_len) if self._unscored else 0
        if capacity is not None and capacity < longest:
            message = "%s: %s takes at most %d tokens, and a hint with its sample may have %d: rollouts with longer "
            message += "ones are %s; serve it with max_model_len = %d, unless hints are that much shorter"
            log.warning(message, host.env, self.teacher.name, capacity, longest, self._unscored, longest)
        self._scorer = Scorer(self.teacher, self.max_concurrent)

    def report_separate_hints(self, prompts: int) -> None:
        """Count and log prompts whose hint is a separate conversation before them, because their own is unknown."""
        if prompts:
            self.tally.count("hints_apart", prompts)
            message = "%s: %d prompts are not what the messages of their rollouts render to: their hints stand before "
            message += "them as conversations of their own; an environment's `messages` should be those of its prompts"
            log.warning(message, self.host.env, prompts)

    async def distil(self, batch: Sequence[Survivor], prompts: Sequence[list[int]] | None = None) -> None:
        """Set the teacher's logprobs as `ref_logprobs` of every sample; drop a rollout that is not scored completely.

        `prompts` replace the prompts of the batch's samples, in order.
        """
        scored, failures = await self._scorer.set_stream("ref_logprobs", batch, prompts)
        self.tally.count("prefills", scored)
        self.tally.count("failures", failures)


def own_prompt_job(sample: Sample) -> Job:
    """Return the job of scoring a sample after its own prompt."""
    return sample.token_ids[: sample.prompt_length].tolist(), sample


class Scorer:
    """Scores samples with a reference, at most `max_concurrent` at once."""

    def __init__(self, reference: Reference, max_concurrent: int = 32) -> None:
        self.reference = reference
        self._max_concurrent = max_concurrent

    async def set_stream(
        self, name: str, batch: Sequence[Survivor], prompts: Sequence[list[int]] | None = None
    ) -> tuple[int, int]:
        """Set a stream of every sample to its logprobs; drop rollouts that lack any. Return successes and failures.

        `prompts` replace the prompts of the batch's samples, in order.
        """
        pairs = [(survivor, sample) for survivor in batch for sample in survivor.samples]
        samples = [sample for _, sample in pairs]
        jobs = list(map(own_prompt_job, samples)) if prompts is None else list(zip(prompts, samples, strict=True))
        failures = 0
        for (survivor, sample), outcome in zip(pairs, await self.score(jobs), strict=True):
            if isinstance(outcome, ReferenceFailed):
                failures += 1
                survivor.drop(NO_REFERENCE, str(outcome))
            else:
                sample.set_stream(name, outcome)
        return len(jobs) - failures, failures

    async def score(self, jobs: Sequence[Job]) -> list[np.ndarray | ReferenceFailed]:
        """Return for each job one logprob per token of its sample, at the sample's temperature, or the failure.

        Values of prompt tokens are those of the last tokens of the job's prompt; 0 where it is the shorter prompt.
        After `MAX_FAILURES_IN_A_ROW` the remaining jobs fail without a request, so that a dead model costs the timeout
        of the requests in flight and not of all.
        """
        outcomes: dict[int, np.ndarray | ReferenceFailed] = {}
        # Shortest first: sequences that are too long for the model come last, after all others are scored.
        waiting = deque(sorted(range(len(jobs)), key=lambda n: len(jobs[n][0]) + jobs[n][1].completion_length))
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

    async def _score(self, prompt: list[int], sample: Sample) -> np.ndarray | ReferenceFailed:
        """Return the logprobs of one job, aligned with its sample, or the failure."""
        token_ids = prompt + sample.token_ids[sample.prompt_length :].tolist()
        try:
            scores = await self.reference.score(token_ids, sample.temperature)
        except ReferenceFailed as failure:
            return failure
        if len(scores) != len(token_ids) or not np.all(np.isfinite(scores)):
            return ReferenceFailed(
                f"{self.reference.name} gave no usable scores: {np.count_nonzero(np.isfinite(scores))} finite numbers "
                f"for {len(token_ids)} tokens"
            )
        missing = len(sample) - len(token_ids)
        return np.pad(np.array(scores[max(0, -missing) :], np.float64), (max(0, missing), 0))


class DistillationConfig(AlgorithmConfig):
    """Base of algorithms that learn from a teacher and assign no advantages."""

    HAS_ADVANTAGES = False

    def promises(self, algorithm: Algorithm) -> Promises:
        nothing = "it gives no credit"
        return Promises(frozenset({"order"}), {"shift": nothing, "zero_sum": nothing, "signs": nothing})


class FrozenTeacherConfig(AlgorithmConfig):
    """Base of algorithms that learn from another model, on the policy's own samples."""

    NEEDS_TEACHER = True

    teacher: ModelReference | None = None
    """The model that is learned from."""
    max_concurrent: int = Field(32, ge=1)
    """Requests to the teacher at once."""

    def problems(self) -> Iterator[InvalidValue]:
        yield from super().problems()
        if self.teacher is None:
            yield InvalidValue(f"{self.type} needs a teacher, which is not set", key="teacher", fix=SET_TEACHER)
        if self.teacher == "policy":
            fix = "Set teacher.name and teacher.base_url of another model, "
            fix += 'or type = "opsd", where the policy learns from a demonstration.'
            yield self.invalid("teacher", "the KL of the policy to itself is zero", fix)
