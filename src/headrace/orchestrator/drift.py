"""Why the trainer finds other logprobs than a token was sampled with, taken apart by asking the engine once more.

Of a token, i is the logprob it was sampled with, e what the engine finds for the same sequence with the weights of the
moment and a fresh cache, t what the trainer finds with those same weights. The difference x of a part is, over a few
sequences per version:

    engine      t - e   of the trainer's probe: the same weights in two implementations
    staleness   e - i   of those sequences of it that one older version sampled from beginning to end
    decode      e - i   of completions that this version sampled from beginning to end: decoding against scoring
    kept_kv     e - i   of completions that this version ended and older ones began, the tokens since the last update:
                        what keys and values of older weights do; as small as `decode` where the engine recomputes them
    truncation  log of the probability that top-p and top-k left to choose from, over the whole batch of the step

`drift/PART` is the mean of exp(x) - x - 1, as in `mismatch_kl`; `/abs` that of |x|; `/tokens` says over how many. They
are recorded at the step of the version that was asked, `truncation` at that of its batch. An answer by any other
version is discarded. A part without tokens is left out, so `truncation` is there only where sampling truncates and the
engine says how. Versions within a sample have no lineage: after a rewind, a token of the lost one counts as stale.

All of it runs beside the loop: a question that fails is counted, and one that a new version overtakes is given up.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

import numpy as np

from headrace.errors import Failure
from headrace.inference.client.completion import Completion
from headrace.inference.client.engine_client import EngineClient
from headrace.observe.metrics import Means
from headrace.rollout.types import NOT_SAMPLED, TRUNCATED, Sample
from headrace.rollout.version import Version
from headrace.transport.probes import TRAINER_LOGPROBS, ProbeStore

log = logging.getLogger(__name__)

PARTS = ("engine", "staleness", "decode", "kept_kv", "truncation")
PATIENCE, PATIENCE_IN_TURNS = 60.0, 600.0
"""Seconds that a question may take, and where the engine may stand still for a training step meanwhile."""
AT_ONCE = 8
"""Questions in flight."""
FEWEST_SINCE_UPDATE = 4
"""Tokens that a completion has since an update before it is worth a question: the first to end have next to none."""

Report = tuple[int, dict[str, float]]
"""A step and what was found out at it."""


class Drift:
    """Follows what the engines sample from. `completions` of each kind are scored again per version."""

    def __init__(
        self,
        client: EngineClient,
        probes: ProbeStore,
        *,
        completions: int,
        max_model_len: int,
        patience: float = PATIENCE,
    ) -> None:
        self._client = client
        self._patience = patience
        self._probes = probes
        self._completions = completions
        self._longest = max_model_len - 1  # an engine that scores a prompt also samples a token after it
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._window: _Window | None = None
        self._told: set[str] = set()

    def follow(self, version: Version) -> Report | None:
        """The engines sample from `version` now. Returns what was found out about the one before."""
        report = self.end()
        self._window = window = _Window(version, self._completions)
        self._ask(window, partial(self._score_probe, window))
        return report

    def observe(self, prompt_ids: list[int], completion: Completion, temperature: float) -> None:
        """Take note of a completion; the first few whose last tokens are of the current version are scored again."""
        window = self._window
        if window is None or not completion.spans or completion.spans[-1].version != str(window.version):
            return
        last = completion.spans[-1]
        part = "decode" if last.start == 0 else "kept_kv"
        if window.left[part] and (part == "decode" or last.end - last.start >= FEWEST_SINCE_UPDATE):
            window.left[part] -= 1
            self._ask(window, partial(self._score_completion, window, part, prompt_ids, completion, temperature))

    async def settle(self, seconds: float) -> None:
        """Wait at most so long for the answers that are under way."""
        deadline = asyncio.get_running_loop().time() + seconds
        while self._window is not None and self._window.questions:
            left = deadline - asyncio.get_running_loop().time()
            if not (await asyncio.wait(self._window.questions, timeout=max(0.0, left)))[0]:
                return

    def end(self) -> Report | None:
        """Give up what is under way; returns what was found out about the current version."""
        window, self._window = self._window, None
        return None if window is None else window.close()

    async def _score_probe(self, window: _Window) -> None:
        for sample in await asyncio.to_thread(self._probes.read, window.version):
            self._ask(window, partial(self._score_sample, window, sample))

    async def _score_sample(self, window: _Window, sample: Sample) -> None:
        scores = await self._score(window, sample.token_ids.tolist(), sample.temperature)
        known = np.flatnonzero(sample.mask[: len(scores)])
        window.add("engine", sample.streams[TRAINER_LOGPROBS][known] - scores[known])
        versions = set(sample.versions[sample.mask].tolist())
        if len(known) and len(versions) == 1 and (age := window.version.step - versions.pop()) > 0:
            window.add("staleness", scores[known] - sample.logprobs[known])
            window.means.add("drift/staleness/age", age * len(known), len(known))

    async def _score_completion(
        self, window: _Window, part: str, prompt_ids: list[int], completion: Completion, temperature: float
    ) -> None:
        scores = await self._score(window, prompt_ids + completion.token_ids, temperature)
        start = completion.spans[-1].start
        again = scores[len(prompt_ids) + start :]
        window.add(part, again - np.array(completion.logprobs[start : start + len(again)]))

    async def _score(self, window: _Window, token_ids: list[int], temperature: float) -> np.ndarray:
        """The engine's logprobs of a sequence, as far as it takes it; none if it has moved on to another version."""
        async with self._slots:
            scores = await self._client.score(token_ids[: self._longest], temperature, urgent=True)
        if scores.version != window.version:
            window.discarded += 1
            return np.zeros(0)
        return np.array(scores.logprobs)

    def _ask(self, window: _Window, work: Callable[[], Awaitable[None]]) -> None:
        task = asyncio.create_task(self._finish(window, work))
        window.questions.add(task)
        task.add_done_callback(window.questions.discard)

    async def _finish(self, window: _Window, work: Callable[[], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(self._patience):
                await work()
        except Exception as error:  # a diagnosis may fail, and the run goes on
            window.failed += 1
            if type(error).__name__ not in self._told:
                self._told.add(type(error).__name__)
                trace = None if isinstance(error, Failure | TimeoutError) else error
                log.warning("a probe of drift failed; others alike are only counted: %s", error, exc_info=trace)


class _Window:
    """What is found out while the engines sample from one version."""

    def __init__(self, version: Version, completions: int) -> None:
        self.version = version
        self.left = {"decode": completions, "kept_kv": completions}
        """Completions of each kind that may still be asked about."""
        self.questions: set[asyncio.Task[None]] = set()
        self.means = Means()
        self.discarded = 0
        self.failed = 0

    def add(self, part: str, differences: np.ndarray) -> None:
        add_part(self.means, part, differences)

    def close(self) -> Report | None:
        """Nothing if nothing was asked."""
        for question in self.questions:
            self.discarded += question.cancel()
        if not (self.means.counts or self.discarded or self.failed):
            return None
        return self.version.step, {
            **part_values(self.means),
            "drift/discarded": self.discarded,
            "drift/failed": self.failed,
        }


def truncation(samples: Iterable[Sample]) -> dict[str, float]:
    """What top-p and top-k took away from a batch's tokens; nothing where no sample says."""
    means = Means()
    for sample in samples:
        if TRUNCATED in sample.streams:
            sampled = sample.versions != NOT_SAMPLED
            add_part(means, "truncation", (sample.logprobs - sample.streams[TRUNCATED])[sampled])
    return part_values(means)


def add_part(means: Means, part: str, differences: np.ndarray) -> None:
    """Add tokens to a part of the drift, given the difference of logprobs of each."""
    if len(differences):
        x = differences.astype(np.float64)
        with np.errstate(over="ignore"):
            means.add(f"drift/{part}", float((np.expm1(x) - x).sum()), len(x))
        means.add(f"drift/{part}/abs", float(np.abs(x).sum()), len(x))


def part_values(means: Means) -> dict[str, float]:
    """What is recorded of the parts. What overflowed is left out: it is no number that a monitor can show."""
    tokens = {f"drift/{p}/tokens": int(means.counts[f"drift/{p}"]) for p in PARTS if f"drift/{p}" in means.counts}
    return {name: value for name, value in {**means.values(), **tokens}.items() if math.isfinite(value)}
