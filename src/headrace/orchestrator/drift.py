"""Drift between the logprobs of sampling and of training, split into its causes by scoring sequences again.

For a token, i is the logprob it was sampled with, e the engine's logprob of the same sequence with the current weights
and a fresh cache, t the trainer's with those weights. The difference x of each part, over a few sequences per version:

    engine      t - e   of the trainer's probe: the same weights in two implementations
    routing     t - r   of the same tokens, where r is the trainer's logprob with the experts that the engine took when
                        it sampled them: what the trainer's own choice of experts changes
    staleness   e - i   of its sequences that were sampled entirely from one older version
    decode      e - i   of completions sampled entirely from this version: decoding against scoring
    kept_kv     e - i   of completions begun with older versions and ended with this one, tokens since the last update:
                        the effect of older keys and values; as small as `decode` if the engine recomputes them
    truncation  log of the probability mass that top-p and top-k keep, over the whole batch of the step

`drift/PART` is the mean of exp(x) - x - 1, as in `mismatch_kl`; `/abs` is the mean of |x|; `/tokens` the number of
tokens. They are recorded at the step of the scored version, `truncation` at the step of its batch. Scores by any other
version are discarded. A part without tokens is left out, so `truncation` exists only if sampling truncates and the
engine reports it. Versions within a sample have no incarnation: after a rewind, tokens of lost versions are stale.

All requests run in the background: failed ones are counted, and a new version cancels those in flight.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

import numpy as np

from headrace.errors import Failure
from headrace.inference.client.engine_client import EngineClient
from headrace.inference.schema import Completion
from headrace.observe.metrics import Means
from headrace.rollout.types import NOT_SAMPLED, TRUNCATED, Sample
from headrace.rollout.version import Version
from headrace.transport.batches import REPLAYED_LOGPROBS, TRAINER_LOGPROBS, ProbeStore

log = logging.getLogger(__name__)

PARTS = ("engine", "routing", "staleness", "decode", "kept_kv", "truncation")
PROBE_TIMEOUT_S, PROBE_TIMEOUT_SHARED_S = 60.0, 600.0
"""Timeout of a request; the second one if the engine may pause for a training step."""
MAX_CONCURRENT_REQUESTS = 8
MIN_TOKENS_SINCE_UPDATE = 4
"""Tokens since an update that a completion needs to be scored: the first completions to end have almost none."""

DriftReport = tuple[int, dict[str, float]]
"""Step of the scored version, and its metrics."""


class Drift:
    """Scores the trainer's probe, and `completions` of each kind, once per version that the engines sample from."""

    def __init__(
        self,
        client: EngineClient,
        probes: ProbeStore,
        *,
        completions: int,
        max_model_len: int,
        timeout_s: float = PROBE_TIMEOUT_S,
    ) -> None:
        self._client, self._probes = client, probes
        self._completions, self._timeout_s = completions, timeout_s
        self._max_tokens = max_model_len - 1  # an engine that scores a prompt also samples a token after it
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)
        self._window: _Window | None = None
        self._logged: set[str] = set()

    def follow(self, version: Version) -> DriftReport | None:
        """Start scoring with the version that the engines now sample from; return the metrics of the previous one."""
        report = self.end()
        self._window = window = _Window(version, self._completions)

        async def score_probe() -> None:
            for sample in await asyncio.to_thread(self._probes.read, version):
                self._spawn(window, partial(self._score_sample, window, sample))

        self._spawn(window, score_probe)
        return report

    def observe(self, prompt_ids: list[int], completion: Completion, temperature: float) -> None:
        """Score a completion again if it is one of the first that the current version ended."""
        window = self._window
        if window is None or not completion.spans or completion.spans[-1].version != str(window.version):
            return
        last = completion.spans[-1]
        part = "decode" if last.start == 0 else "kept_kv"
        if window.left[part] and (part == "decode" or last.end - last.start >= MIN_TOKENS_SINCE_UPDATE):
            window.left[part] -= 1
            self._spawn(window, partial(self._score_completion, window, part, prompt_ids, completion, temperature))

    async def wait_for_requests(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for the requests in flight."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self._window is not None and self._window.tasks:
            left = deadline - asyncio.get_running_loop().time()
            if not (await asyncio.wait(self._window.tasks, timeout=max(0.0, left)))[0]:
                return

    def end(self) -> DriftReport | None:
        """Cancel the requests in flight; return the metrics of the current version."""
        window, self._window = self._window, None
        return None if window is None else window.close()

    async def _score_sample(self, window: _Window, sample: Sample) -> None:
        if REPLAYED_LOGPROBS in sample.streams:
            own, replayed = sample.streams[TRAINER_LOGPROBS], sample.streams[REPLAYED_LOGPROBS]
            add_part(window.means, "routing", (own - replayed)[sample.mask])
        scores = await self._score(window, sample.token_ids.tolist(), sample.temperature)
        scored = np.flatnonzero(sample.mask[: len(scores)])
        add_part(window.means, "engine", sample.streams[TRAINER_LOGPROBS][scored] - scores[scored])
        versions = set(sample.versions[sample.mask].tolist())
        if len(scored) and len(versions) == 1 and (age := window.version.step - versions.pop()) > 0:
            add_part(window.means, "staleness", scores[scored] - sample.logprobs[scored])
            window.means.add("drift/staleness/age", age * len(scored), len(scored))

    async def _score_completion(
        self, window: _Window, part: str, prompt_ids: list[int], completion: Completion, temperature: float
    ) -> None:
        scores = await self._score(window, prompt_ids + completion.token_ids, temperature)
        start = completion.spans[-1].start
        rescored = scores[len(prompt_ids) + start :]
        add_part(window.means, part, rescored - np.array(completion.logprobs[start : start + len(rescored)]))

    async def _score(self, window: _Window, token_ids: list[int], temperature: float) -> np.ndarray:
        """Return the engine's logprobs of a sequence, cut to its limit; empty if it has loaded another version."""
        async with self._slots:
            scores = await self._client.score(token_ids[: self._max_tokens], temperature, urgent=True)
        if scores.version != window.version:
            window.discarded += 1
            return np.zeros(0)
        return np.array(scores.logprobs)

    def _spawn(self, window: _Window, work: Callable[[], Awaitable[None]]) -> None:
        task = asyncio.create_task(self._run_counting_failures(window, work))
        window.tasks.add(task)
        task.add_done_callback(window.tasks.discard)

    async def _run_counting_failures(self, window: _Window, work: Callable[[], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await work()
        except Exception as error:  # a failed diagnosis does not end the run
            window.failed += 1
            if type(error).__name__ not in self._logged:
                self._logged.add(type(error).__name__)
                trace = None if isinstance(error, Failure | TimeoutError) else error
                log.warning("a drift probe failed; failures like it are only counted: %s", error, exc_info=trace)


class _Window:
    """Requests and results while the engines sample from one version."""

    def __init__(self, version: Version, completions: int) -> None:
        self.version = version
        self.left = {"decode": completions, "kept_kv": completions}
        """Completions of each kind that may still be scored."""
        self.tasks: set[asyncio.Task[None]] = set()
        self.means = Means()
        self.discarded = 0
        self.failed = 0

    def close(self) -> DriftReport | None:
        """Cancel the requests in flight; return the metrics, or None if there was no request."""
        for task in self.tasks:
            self.discarded += task.cancel()
        if not (self.means.counts or self.discarded or self.failed):
            return None
        counts = {"drift/discarded": self.discarded, "drift/failed": self.failed}
        return self.version.step, part_metrics(self.means) | counts


def truncation_metrics(samples: Iterable[Sample]) -> dict[str, float]:
    """Return the truncation metrics of a batch; empty if no sample has truncated logprobs."""
    means = Means()
    for sample in samples:
        if TRUNCATED in sample.streams:
            sampled = sample.versions != NOT_SAMPLED
            add_part(means, "truncation", (sample.logprobs - sample.streams[TRUNCATED])[sampled])
    return part_metrics(means)


def add_part(means: Means, part: str, differences: np.ndarray) -> None:
    """Add `differences`, one difference of logprobs per token, to the sums of a part of the drift."""
    if len(differences):
        x = differences.astype(np.float64)
        with np.errstate(over="ignore"):
            means.add(f"drift/{part}", float((np.expm1(x) - x).sum()), len(x))
        means.add(f"drift/{part}/abs", float(np.abs(x).sum()), len(x))


def part_metrics(means: Means) -> dict[str, float]:
    """Return the metrics of the parts. Values that overflowed are left out: monitors cannot show them."""
    tokens = {f"drift/{p}/tokens": int(means.counts[f"drift/{p}"]) for p in PARTS if f"drift/{p}" in means.counts}
    return {name: value for name, value in {**means.values(), **tokens}.items() if math.isfinite(value)}
