"""The embedded engine: continuous batching over an ordinary transformers model, with its KV cache in blocks.

A step computes the newest token of every running request and chunks of the prompts that are not computed yet, side by
side in one forward, and samples wherever a request's tokens are all computed; so requests join and leave between any
two tokens. New weights make running requests compute their tokens anew, by the same way (or keep their cache).

The engine is synchronous: one thread calls `step` and `update_weights` (see `thread`); `submit` and `cancel` may come
from others. A request that cannot be finished gets an error; the engine goes on. What a step does is decided without
tensors in `scheduler` and computed by a `runner`, of which there is one for GPUs.

Left out on purpose: speculative decoding.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections import Counter, deque
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Literal

import torch

from headrace.inference.backend import (
    EngineError,
    EngineOverloaded,
    EngineState,
    InvalidRequest,
    RequestCancelled,
    check_request,
)
from headrace.inference.embedded.adapters import Adapters
from headrace.inference.embedded.blocks import BlockPool, blocks_for
from headrace.inference.embedded.cuda import make_cuda_runner
from headrace.inference.embedded.request import Request, Weights
from headrace.inference.embedded.runner import PlainRunner, Runner
from headrace.inference.embedded.scheduler import Plan, Scheduler
from headrace.inference.embedded.stop_strings import Decode, StopStrings
from headrace.inference.schema import SamplingParams
from headrace.inference.weights.base import Base
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
        max_step_tokens: int | None = None,
        kv_blocks: int | None = None,
        prefix_cache: bool = True,
        kv_on_update: Literal["recompute", "keep"] = "recompute",
        eos_token_ids: Iterable[int] = (),
        seed: int = 0,
        version: Version = INITIAL,
        base: Path | None = None,
        decode: Decode | None = None,
        special_tokens: Collection[int] = (),
        compile: bool = True,
        graphs: bool = True,
    ) -> None:
        """`base` is the directory that the model was loaded from: adapters are merged with its files.

        Without `kv_blocks` the cache has room for `max_running` of the longest requests. `decode` makes text of tokens,
        for stop strings; `special_tokens` are no part of what is said. Layers are compiled, and on a GPU steps are
        captured as graphs, unless told not to.
        """
        model.eval()
        self.model = model
        self.device: torch.device = model.device
        self._base = None if base is None else Base(base, self.device)
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
        self.adapters = Adapters(model)
        self.runner = self._make_runner(blocks, compile=compile, graphs=graphs)
        self.scheduler = Scheduler(
            BlockPool(blocks),
            max_running=max_running,
            step_tokens=max_step_tokens or self.runner.step_tokens,
            scored_tokens=max(1, SCORED_LOGITS // self.vocab_size),
            prefix_cache=prefix_cache,
            patience=self.runner.patience,
        )
        self._parameters: dict[str, torch.Tensor] = model.state_dict()  # where new weights go, which never moves
        self._cancelled: deque[Request] = deque()
        self._random = random.Random(seed)
        self._stop_strings = None if decode is None else StopStrings(decode, special_tokens)
        self._failed_together = 0
        """Steps in a row that failed, although each of their requests alone did not."""

    def _make_runner(self, blocks: int, *, compile: bool, graphs: bool) -> Runner:
        """What computes here: the GPU's own where it has what that needs."""
        runner: Runner | None = None
        if self.device.type == "cuda":
            runner = make_cuda_runner(
                self.model,
                blocks,
                self.adapters,
                max_running=self.max_running,
                max_model_len=self.max_model_len,
                compile=compile,
                graphs=graphs,
            )
        return runner or PlainRunner(self.model, blocks, self.adapters, fuse=compile)

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
        if params.stop and self._stop_strings is None:
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
            stop_strings=self._stop_strings,
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
            max_requests=None if self.max_waiting is None else self.max_running + self.max_waiting,
        )

    # What the engine's own thread does

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._cancelled or (not self.paused and (self.scheduler.running or self.scheduler.waiting)))

    @torch.inference_mode()
    def step(self) -> None:
        """Compute and sample once. Errors go to the requests they concern; what is raised is the engine's end."""
        self.drop_cancelled()
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
        try:
            self.install(published)
        finally:
            published.release()
        return published.checksum

    def read(self, directory: Path, version: Version) -> PublishedWeights:
        """Read a published version for this engine; from any thread, while it samples."""
        return read_published(
            directory, version, parameters=self._parameters, receive=self.link.receive, base=self._base
        )

    @torch.inference_mode()
    def install(self, published: PublishedWeights) -> None:
        """Go on with weights that were read elsewhere, between two steps."""
        install(self._parameters, published.tensors)
        self._weights = Weights(published.version, self._weights.installed + 1)
        for request in self.scheduler.running:
            if self.kv_on_update == "keep" and request.is_proven:
                request.sampled_by(self.version)
            else:
                self.scheduler.compute_again(request, self._weights)

    @property
    def cache_bytes(self) -> int:
        """Memory of keys and values that `release_cache` would give back."""
        return self.runner.cache_bytes

    @torch.inference_mode()
    def release_cache(self) -> int:
        """Give the memory of keys and values back, where that can be; returns how many bytes that was.

        Requests that run keep their places and are computed again. No step may follow before `restore_cache`.
        """
        if not self.cache_bytes:
            return 0
        self.scheduler.pool.forget_all()
        for request in self.scheduler.running:
            self.scheduler.compute_again(request, self._weights)
        self.scheduler.unproven.clear()  # what comes back is all zeros
        return self.runner.release()

    def restore_cache(self) -> None:
        """Take the memory of keys and values again; `OutOfDeviceMemory` if there is not enough."""
        self.runner.restore()

    def fail_all(self, error: EngineError) -> None:
        """End everything that waits or runs with this error; the engine computes nothing after that."""
        for request in self.scheduler.give_up():
            if not request.future.done():
                self._fail(request, error)

    def drop_cancelled(self) -> None:
        """Let those go that were given up. Nothing is computed for that."""
        while self._cancelled:
            request = self._cancelled.popleft()
            if not request.future.done():
                self.scheduler.drop(request)
                self._fail(request, RequestCancelled("the request was cancelled"), "cancelled")

    def _compute(self, plan: Plan) -> None:
        """Carry a plan out, and give every request its token."""
        outcome = self.runner.run(plan, self.scheduler.unproven)
        finished: list[Request] = []
        masses = outcome.log_masses or itertools.repeat(0.0)
        for request, token, logprob, log_mass in zip(*outcome[:3], masses, strict=False):
            try:
                if logprob != logprob or (request.prompt_logprobs and request.has_bad_scores):
                    at = f"weights {self.version} at temperature {request.params.temperature}"
                    raise EngineError(f"{at} gave logits that are not finite (NaN or infinity)")
                if request.add(int(token), logprob, log_mass, outcome.alternatives.get(request)):
                    finished.append(request)
                elif request.on_tokens is not None:
                    request.on_tokens()
                self.tokens_sampled += 1
            except Exception as error:  # a tokenizer may raise at a stop string: that is this request's matter alone
                self._end_with(request, error)
        self.scheduler.proven(outcome.requests)
        for request in finished:
            self.scheduler.drop(request)
            self.finished[request.finish_reason] += 1
            request.finish()

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
