"""The embedded engine: continuous batching over an ordinary transformers model, with its KV cache in blocks.

A step computes the newest token of every running request and chunks of the prompts that are not computed yet, side by
side in one forward, and samples wherever a request's tokens are all computed; so requests join and leave between any
two tokens. New weights make running requests compute their tokens anew, by the same way (or keep their cache).

The engine is synchronous: one thread calls `step` and `update_weights` (see `thread`); `submit` and `cancel` may come
from others. A request that cannot be finished gets an error; the engine goes on. What a step does is decided without
tensors in `scheduler`, laid out in `batch`, and attended to in `kv_cache`.

Left out on purpose: CUDA graphs, speculative decoding.
"""

from __future__ import annotations

import logging
import random
from collections import Counter, deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch

from headrace.inference.backend import (
    Alternatives,
    EngineError,
    EngineOverloaded,
    EngineState,
    InvalidRequest,
    RequestCancelled,
)
from headrace.inference.embedded.adapters import Adapters
from headrace.inference.embedded.batch import Batch, make_batch
from headrace.inference.embedded.blocks import BLOCK, BlockPool, blocks_for
from headrace.inference.embedded.kv_cache import ATTENTION, KVCache
from headrace.inference.embedded.request import Decode, Request, Weights
from headrace.inference.embedded.sampling import likeliest, sample, scaled_logprobs
from headrace.inference.embedded.scheduler import Chunk, Plan, Scheduler
from headrace.inference.embedded.window import Window
from headrace.inference.limits import check_request
from headrace.inference.schema import SamplingParams
from headrace.inference.weights.link import WeightsReceiver
from headrace.inference.weights.published import PublishedWeights, install, read_published
from headrace.rollout.version import Version

log = logging.getLogger(__name__)

INITIAL = Version(0, 0)
FAILURES_TOGETHER = 4
"""Steps of several requests that may fail in a row, until that is the engine's fault and its end."""
SCORED_LOGITS = 1 << 27
"""Logits that one forward may hold where prompt logprobs are asked for."""


class Engine:
    """A model, its KV cache, and the requests that run on it."""

    def __init__(
        self,
        model: Any,
        *,
        max_model_len: int,
        max_running: int = 128,
        max_waiting: int | None = None,
        max_step_tokens: int = 2048,
        kv_blocks: int | None = None,
        prefix_cache: bool = True,
        kv_on_update: Literal["recompute", "keep"] = "recompute",
        eos_token_ids: Iterable[int] = (),
        seed: int = 0,
        version: Version = INITIAL,
        base: Path | None = None,
        decode: Decode | None = None,
    ) -> None:
        """`base` is the directory that the model was loaded from: adapters are merged with its files.

        Without `kv_blocks` the cache has room for `max_running` of the longest requests. `decode` makes text of tokens,
        for stop strings.
        """
        model.eval()
        model.set_attn_implementation(ATTENTION)
        self.model = model
        self.base = base
        self.device: torch.device = model.device
        self.link = WeightsReceiver(self.device)
        self.max_model_len = max_model_len
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.kv_on_update = kv_on_update
        self.eos_token_ids = frozenset(eos_token_ids)
        self.vocab_size: int = model.get_input_embeddings().num_embeddings
        self._weights = Weights(version, 0)
        self.paused = False
        self.tokens_sampled = 0
        self.finished: Counter[str] = Counter()
        longest = blocks_for(max_model_len)
        blocks = 1 + max(longest, max_running * longest if kv_blocks is None else kv_blocks)
        self.scheduler = Scheduler(
            BlockPool(blocks),
            max_running=max_running,
            step_tokens=max_step_tokens,
            scored_tokens=max(1, SCORED_LOGITS // self.vocab_size),
            prefix_cache=prefix_cache,
        )
        self._cache = KVCache(model.config.get_text_config().num_hidden_layers, blocks)
        self._window = Window(2 * BLOCK * blocks) if self.device.type == "cpu" else None
        self.adapters = Adapters(model)
        self._cancelled: deque[Request] = deque()
        self._random = random.Random(seed)
        self._decode = decode
        self._failed_together = 0
        """Steps in a row that failed, although each of their requests alone did not."""

    @property
    def version(self) -> Version:
        return self._weights.version

    # What callers do, from any thread

    def submit(
        self,
        token_ids: list[int],
        params: SamplingParams,
        cache_salt: str | None = None,
        *,
        urgent: bool = False,
        adapter: str | None = None,
    ) -> Request:
        """Put a request in line, an urgent one in front. Its `future` will hold the result."""
        check_request(token_ids, params, self.vocab_size, self.max_model_len)
        if params.stop and self._decode is None:
            raise InvalidRequest("stop: this engine has no tokenizer to find strings with; use stop_token_ids")
        self._refuse_if_overloaded()
        room = self.max_model_len - len(token_ids)
        request = Request(
            token_ids,
            params,
            max_new=room if params.max_tokens is None else min(room, params.max_tokens),
            eos_token_ids=self.eos_token_ids,
            shared_random=self._random,
            cache_salt=cache_salt,
            decode=self._decode,
            adapter=None if adapter is None else self.adapters.get(adapter),
        )
        (self.scheduler.urgent if urgent else self.scheduler.line).append(request)
        return request

    def _refuse_if_overloaded(self) -> None:
        places = 0 if self.paused else max(0, self.max_running - len(self.scheduler.running))
        if self.max_waiting is not None and self.scheduler.waiting >= self.max_waiting + places:
            raise EngineOverloaded(f"{self.scheduler.waiting} requests wait already: come again later")

    def cancel(self, request: Request) -> None:
        """Give a request up; it leaves at the next step."""
        self._cancelled.append(request)

    def state(self) -> EngineState:
        scheduler = self.scheduler
        return EngineState(
            version=self.version,
            running=len(scheduler.running),
            waiting=scheduler.waiting,
            paused=self.paused,
            capacity=self.max_running,
            kv_usage=scheduler.kv_usage,
            tokens_sampled=self.tokens_sampled,
            tokens_computed=scheduler.tokens_computed,
            tokens_cached=scheduler.tokens_cached,
            preemptions=scheduler.preemptions,
            finished=dict(self.finished),
            adapters=self.adapters.names,
            most=None if self.max_waiting is None else self.max_running + self.max_waiting,
        )

    # What the engine's own thread does

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._cancelled or (not self.paused and (self.scheduler.running or self.scheduler.waiting)))

    @torch.inference_mode()
    def step(self) -> None:
        """Compute and sample once. Errors go to the requests they concern; what is raised is the engine's end."""
        self._drop_cancelled()
        if self.paused:
            return
        plan = self.scheduler.plan(self._weights)
        if not plan.chunks:
            return
        try:
            self._compute(plan)
            if len(plan.chunks) > 1:
                self._failed_together = 0
        except torch.AcceleratorError:
            raise  # the device is lost, and with it everything
        except Exception as error:
            concerned = [*(chunk.request for chunk in plan.chunks), *(twin for _, twin in plan.twins)]
            self._isolate([*dict.fromkeys(concerned)], error)

    def update_weights(self, directory: Path, version: Version) -> str:
        """Read a published version and go on with it. Returns its checksum."""
        published = self.read(directory, version)
        self.install(published)
        return published.checksum

    def read(self, directory: Path, version: Version) -> PublishedWeights:
        """Read a published version for this engine; from any thread, while it samples."""
        return read_published(
            directory, version, parameters=self.model.state_dict(), receive=self.link.receive, base=self.base
        )

    @torch.inference_mode()
    def install(self, published: PublishedWeights) -> None:
        """Go on with weights that were read elsewhere, between two steps."""
        install(self.model, published.tensors)
        self._weights = Weights(published.version, self._weights.installed + 1)
        for request in self.scheduler.running:
            if self.kv_on_update == "keep" and request.is_proven:
                request.sampled_by(self.version)
            else:
                self.scheduler.compute_again(request, self._weights)

    def fail_all(self, error: EngineError) -> None:
        """End everything that waits or runs with this error; the engine computes nothing after that."""
        for request in self.scheduler.give_up():
            if not request.future.done():
                self._fail(request, error)

    def _drop_cancelled(self) -> None:
        while self._cancelled:
            request = self._cancelled.popleft()
            if not request.future.done():
                self.scheduler.drop(request)
                self._fail(request, RequestCancelled("the request was cancelled"), "cancelled")

    def _compute(self, plan: Plan) -> None:
        """One forward, and what comes of it."""
        chunks = plan.chunks
        seeded = any(chunk.request.params.seed is not None for chunk in chunks) and self.device.type == "cpu"
        single = len(chunks) == 1 and chunks[0].end - chunks[0].start == 1
        batch = make_batch(chunks, self.device, self.model.dtype, self._window, doubled=seeded and single)
        rows, scored, last = _rows_with_logits(batch)
        kept = rows * 2 if seeded and len(rows) == 1 else rows
        self._cache.prepare(batch, self.scheduler.unproven)
        self.scheduler.unproven.clear()
        self.adapters.prepare(batch)
        logits = self.model(
            input_ids=batch.ids[None],
            position_ids=batch.positions[None],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=torch.tensor(kept, device=self.device, dtype=torch.long),
            paged=self._cache,
        ).logits[0]
        self._score(scored, logits)
        self._share(plan.twins, last)
        if last:
            chosen = [*last.values()]
            in_order = chosen == list(range(len(chosen)))  # mostly, and then nothing needs to be copied
            self._sample(
                [*last], logits[: len(chosen)] if in_order else logits[torch.tensor(chosen, device=self.device)]
            )

    def _share(self, twins: list[tuple[Request, Request]], last: dict[Request, int]) -> None:
        """Give requests what was computed for another one with the same prompt."""
        copied = [(first.blocks[-1], second.blocks[-1]) for first, second in twins if len(second.tokens) % BLOCK]
        if copied:
            self._cache.copy(*zip(*copied, strict=True))
        for first, second in twins:
            last[second] = last[first]

    def _score(self, scored: list[tuple[Chunk, int]], logits: torch.Tensor) -> None:
        """Give requests the logprobs of their prompts, as far as they are computed."""
        for (request, start, end, _), first in sorted(scored, key=lambda entry: entry[0].start):
            assert request.prompt_logprobs is not None
            targets = request.tokens[start + 1 : min(end + 1, request.prompt_length)]
            if not targets:
                continue
            rows = logits[first : first + len(targets)]
            logprobs = scaled_logprobs(rows, [request.params.temperature] * len(targets))
            request.prompt_logprobs += logprobs.gather(-1, _column(targets, self.device))[:, 0].tolist()
            if request.prompt_top_logprobs is not None:
                count = request.params.prompt_logprobs or 0
                request.prompt_top_logprobs += likeliest(logprobs, [count] * len(targets))

    def _sample(self, requests: list[Request], logits: torch.Tensor) -> None:
        """The next token of each."""
        uniforms = [request.uniform() for request in requests]
        sampled = sample(logits, [request.params for request in requests], uniforms)
        # Token ids and float32 values are exact in float64: one copy to the host carries them all.
        columns = [column.double() for column in sampled if column is not None]
        top = self._alternatives(requests, logits)
        finished: list[Request] = []
        for request, (token, logprob, *log_mass) in zip(requests, torch.stack(columns, 1).tolist(), strict=True):
            try:
                if logprob != logprob or request.has_bad_scores:
                    at = f"weights {self.version} at temperature {request.params.temperature}"
                    raise EngineError(f"{at} gave logits that are not finite (NaN or infinity)")
                if request.add(int(token), logprob, log_mass[0] if log_mass else 0.0, top.get(request)):
                    finished.append(request)
                elif request.on_tokens is not None:
                    request.on_tokens()
                self.tokens_sampled += 1
            except Exception as error:  # a tokenizer may raise at a stop string: that is this request's matter alone
                self._end_with(request, error)
        self.scheduler.proven(requests)
        for request in finished:
            self.scheduler.drop(request)
            self.finished[request.finish_reason] += 1
            request.finish()

    def _alternatives(self, requests: list[Request], logits: torch.Tensor) -> dict[Request, Alternatives]:
        asked = [row for row, request in enumerate(requests) if request.params.logprobs]
        if not asked:
            return {}
        counts = [requests[row].params.logprobs or 0 for row in asked]
        found = likeliest(scaled_logprobs(logits[asked], [requests[row].params.temperature for row in asked]), counts)
        return {requests[row]: pairs for row, pairs in zip(asked, found, strict=True)}

    def _isolate(self, requests: list[Request], error: Exception) -> None:
        """A forward failed: the only request in it gets the error; of several, each is tried alone."""
        if len(requests) == 1:
            self._end_with(requests[0], error)
            return
        self._failed_together += 1
        if self._failed_together > FAILURES_TOGETHER:
            raise error  # each alone goes well: it is not a request that is at fault
        log.exception("a step failed; its %d requests are tried one by one", len(requests))
        self.scheduler.suspect(requests, self._weights)

    def _end_with(self, request: Request, error: Exception) -> None:
        if not isinstance(error, EngineError):
            log.error("a request ends with an error", exc_info=error)
            error = EngineError(f"the engine failed at this request: {type(error).__name__}: {error}")
        self.scheduler.drop(request)
        self._fail(request, error)

    def _fail(self, request: Request, error: EngineError, how: str = "error") -> None:
        self.finished[how] += 1
        request.fail(error)

    def forget_counts(self) -> None:
        """Begin to count anew."""
        self.tokens_sampled = 0
        self.finished.clear()
        self.scheduler.forget_counts()


def _rows_with_logits(batch: Batch) -> tuple[list[int], list[tuple[Chunk, int]], dict[Request, int]]:
    """The tokens of a batch whose logits are needed. Among those: where each chunk begins that is scored, and where the
    last token is of each request whose tokens are all computed."""
    rows: list[int] = []
    scored: list[tuple[Chunk, int]] = []
    last: dict[Request, int] = {}
    row = 0
    for chunk in batch.chunks:
        length = chunk.end - chunk.start
        is_complete = chunk.end == len(chunk.request.tokens)
        if chunk.request.lacks_prompt_logprobs:
            scored.append((chunk, len(rows)))
            rows += range(row, row + length)
        elif is_complete:
            rows.append(row + length - 1)
        if is_complete:
            last[chunk.request] = len(rows) - 1
        row += length
    return rows, scored, last


def _column(tokens: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(tokens, device=device)[:, None]
