"""The embedded engine: continuous batching over an ordinary transformers model, with a paged KV cache.

A step decodes one token of every running request and prefills chunks of prompts in one forward, and samples for each
request whose tokens are all computed; so requests join and leave between any two tokens. After a weight update running
requests recompute their tokens with the new weights, or keep their KV cache (`kv_on_update`).

One thread calls `step` and `update_weights` (see `thread`); `submit` and `cancel` may be called from others. A request
that cannot be finished gets an error, and the engine continues. The `scheduler` plans a step without tensors, and a
`runner` computes it; GPUs have their own runner. On a GPU a step is launched before the tokens of the last one are
read, so that it does not wait for Python; a request that ends with a stop token has one token computed in vain.

With `speculative_tokens`, a GPU decodes speculatively while few requests run (see `drafts`).
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable
from operator import eq
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from headrace.inference.backend import EngineError, EngineState, InvalidRequest, RequestCancelled, check_request
from headrace.inference.embedded.adapters import Adapters
from headrace.inference.embedded.block_manager import BLOCK_SIZE, BlockManager, blocks_for
from headrace.inference.embedded.cuda import make_cuda_runner
from headrace.inference.embedded.drafts import Drafter
from headrace.inference.embedded.grammar import Grammars, accept_tokens
from headrace.inference.embedded.request import Decode, Request, StopStrings, Weights
from headrace.inference.embedded.routes import RouteCache
from headrace.inference.embedded.runner import LaunchedStep, PlainRunner, Runner
from headrace.inference.embedded.scheduler import Scheduler, StepPlan
from headrace.inference.experts import find_routers
from headrace.inference.latents import GATES
from headrace.inference.schema import SamplingParams, write_routes
from headrace.inference.weights.file_layout import as_in_files
from headrace.inference.weights.link import WeightsReceiver
from headrace.inference.weights.published import BaseWeights, PublishedWeights, read_published
from headrace.rollout.version import Version

log = logging.getLogger(__name__)

INITIAL = Version(0, 0)
MAX_FAILED_BATCHES = 4
"""Steps of several requests that may fail in a row before the engine itself fails."""
MAX_SCORED_LOGITS = 1 << 27
"""Logits that one forward may hold for prompt logprobs."""


class Engine:
    """A model, its KV cache, and the requests that run on it."""

    def __init__(
        self,
        model: Any,
        *,
        max_model_len: int,
        max_running: int = 128,
        max_step_tokens: int | None = None,
        kv_blocks: int | None = None,
        prefix_cache: bool = True,
        kv_on_update: Literal["recompute", "keep"] = "recompute",
        eos_token_ids: Iterable[int] = (),
        seed: int = 0,
        base: Path | None = None,
        decode: Decode | None = None,
        special_tokens: Collection[int] = (),
        grammars: Grammars | None = None,
        compile: bool = True,
        graphs: bool = True,
        speculative_tokens: int = 0,
        routed_experts: bool = False,
    ) -> None:
        """`base` is the directory that the model was loaded from: published adapters are merged with its files.

        Without `kv_blocks` the KV cache fits `max_running` requests of `max_model_len`. Stop strings are searched in
        the text that `decode` returns, without `special_tokens`. `grammars` compiles structured outputs. `compile`
        fuses or compiles layers; `graphs` captures decode steps as CUDA graphs. `speculative_tokens` is the longest
        draft of a request, on a GPU. `routed_experts`: store the experts of each token, for requests that want them; of
        a model without experts there are none.
        """
        model.eval()
        self.model = model
        self.device: torch.device = model.device
        self._base = None if base is None else BaseWeights(base, self.device)
        self.link = WeightsReceiver(self.device)
        self.max_model_len = max_model_len
        self.max_running = max_running
        self.kv_on_update = kv_on_update
        self.eos_token_ids = frozenset(eos_token_ids)
        self.vocab_size: int = model.get_input_embeddings().num_embeddings
        self._weights = Weights(INITIAL, 0)
        self.paused = False
        self.tokens_sampled = self.tokens_drafted = self.tokens_accepted = 0
        self.steps = self.prefill_steps = 0
        self.device_wait_s = self.device_busy_s = 0.0
        self.finished: Counter[str] = Counter()
        longest = blocks_for(max_model_len)
        blocks = 1 + max(longest, max_running * longest if kv_blocks is None else kv_blocks)
        self.adapters = Adapters(model)
        self._returns_routes = routed_experts
        routers = find_routers(model) if routed_experts else []
        self.routes = RouteCache(model, routers, blocks) if routers else None
        runner: Runner | None = None
        if self.device.type == "cuda":
            options = {"compile": compile, "graphs": graphs, "seed": seed, "routes": self.routes}
            sizes = {"max_running": max_running, "max_model_len": max_model_len}
            runner = make_cuda_runner(model, blocks, self.adapters, **sizes, **options)
        self.runner: Runner = runner or PlainRunner(model, blocks, self.adapters, fuse=compile, routes=self.routes)
        self.scheduler = Scheduler(
            BlockManager(blocks),
            max_running=max_running,
            max_prefill_tokens=max_step_tokens or self.runner.max_prefill_tokens,
            max_scored_tokens=max(1, MAX_SCORED_LOGITS // self.vocab_size),
            prefix_cache=prefix_cache,
            max_wait_steps=self.runner.max_wait_steps,
        )
        self._parameters = as_in_files(model, model.state_dict())  # new weights are copied into these
        self._cancelled: deque[Request] = deque()
        self._random = random.Random(seed)
        self._stop_strings = None if decode is None else StopStrings(decode, special_tokens)
        self._grammars = grammars
        self._drafter = Drafter(speculative_tokens)
        if speculative_tokens and not self.runner.max_draft_rows:
            log.warning("speculative_tokens = %d has no effect: only the runner for GPUs guesses", speculative_tokens)
        self._in_flight: LaunchedStep | None = None
        """The last step, if its output was not read yet."""
        self._failed_batches = 0
        """Steps in a row that failed, although each of their requests succeeded alone."""

    @property
    def version(self) -> Version:
        return self._weights.version

    # From any thread

    def submit(
        self,
        token_ids: list[int],
        params: SamplingParams,
        cache_salt: str | None = None,
        *,
        urgent: bool = False,
        adapter: str | None = None,
        is_checked: bool = False,
    ) -> Request:
        """Append a request to the waiting queue, an urgent one before the others; its `future` gets the result.

        Raises `InvalidRequest`, unless the caller has called `check_request` itself.
        """
        if not is_checked:
            check_request(token_ids, params, self.vocab_size, self.max_model_len)
        if params.stop and self._stop_strings is None:
            raise InvalidRequest("this engine has no tokenizer to find strings with; use stop_token_ids", key="stop")
        if params.latents is not None:
            if (params.latents.kind == "hybrid") != (has_gates := hasattr(self.model, GATES)):
                fact = f"of kind {params.latents.kind}, but the model has {'gates' if has_gates else 'no gates'}"
                raise InvalidRequest(fact, key="latents", fix="Serve the other model, or leave them out.")
            if self._stop_strings is None:
                raise InvalidRequest("this engine has no tokenizer to find the end of thoughts with", key="latents")
        matcher = None
        if params.structured_outputs is not None:
            if self._grammars is None:
                raise InvalidRequest("this engine has no tokenizer to match a grammar with", key="structured_outputs")
            matcher = self._grammars.matcher(params.structured_outputs)
        if params.routed_experts and not self._returns_routes:
            fix = "Start the server with inference.routed_experts = true, or leave them out."
            raise InvalidRequest("this engine does not record them", key="routed_experts", fix=fix)
        max_new_tokens = self.max_model_len - len(token_ids)
        if params.max_tokens is not None:
            max_new_tokens = min(max_new_tokens, params.max_tokens)
        request = Request(
            token_ids,
            params,
            max_new_tokens=max_new_tokens,
            eos_token_ids=self.eos_token_ids,
            shared_random=self._random,
            cache_salt=cache_salt,
            stop_strings=self._stop_strings,
            adapter=None if adapter is None else self.adapters.get(adapter),
            hidden_size=self.model.get_input_embeddings().embedding_dim if params.latents else 0,
            matcher=matcher,
        )
        (self.scheduler.urgent if urgent else self.scheduler.waiting).append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Cancel a request at the next step."""
        self._cancelled.append(request)

    def state(self) -> EngineState:
        scheduler = self.scheduler
        return EngineState(
            version=self.version,
            running=len(scheduler.running),
            waiting=scheduler.num_waiting,
            paused=self.paused,
            capacity=self.max_running,
            kv_usage=scheduler.kv_usage,
            tokens_sampled=self.tokens_sampled,
            tokens_computed=scheduler.tokens_computed,
            tokens_cached=scheduler.tokens_cached,
            tokens_drafted=self.tokens_drafted,
            tokens_accepted=self.tokens_accepted,
            steps=self.steps,
            prefill_steps=self.prefill_steps,
            device_wait_s=self.device_wait_s,
            device_busy_s=self.device_busy_s,
            preemptions=scheduler.preemptions,
            finished=dict(self.finished),
            adapters=self.adapters.names,
        )

    # From the engine's own thread

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        is_scheduling = not self.paused and (self.scheduler.running or self.scheduler.num_waiting)
        return bool(self._cancelled or self._in_flight or is_scheduling)

    @torch.inference_mode()
    def step(self) -> None:
        """Compute and sample once; errors of requests go to their futures, errors of the engine are raised."""
        self.drop_cancelled()
        is_drafting = self._is_drafting()
        if self.paused or is_drafting or not self.scheduler.can_plan_ahead():
            self.finish_step()
        if self.paused:
            return
        plan = self.scheduler.schedule(self._weights)
        if not (plan.decodes or plan.prefills):
            self.finish_step()
            return
        if is_drafting and not plan.prefills:
            plan = self._add_drafts(plan)
            if not plan.drafts:
                self._drafter.observe(dict.fromkeys(plan.decodes, 1), {})
        try:
            self.steps += 1
            self.prefill_steps += bool(plan.prefills)
            launched = self.runner.launch(plan, self.scheduler.unverified_blocks)
            if launched.allows_next:
                for request in launched.sampling:
                    request.append_pending()
            self.finish_step()  # the one before
            launched.sample()
            self._in_flight = launched
            if not launched.allows_next:
                if plan.drafts:
                    self._finish_drafts(plan)
                else:
                    self.finish_step()
            if len(plan.decodes) + len(plan.prefills) > 1:
                self._failed_batches = 0
        except torch.AcceleratorError:
            raise  # the device is lost
        except Exception as error:
            self.finish_step()
            self._isolate([request for request in plan.requests if not request.is_done], error)

    def _is_drafting(self) -> bool:
        """Return whether the next step should have drafts, so that all tokens before it must be known."""
        scheduler = self.scheduler
        if scheduler.num_waiting or scheduler.quarantine:
            return False
        return self._drafter.prepare(scheduler.running, self.runner.max_draft_rows)

    def _add_drafts(self, plan: StepPlan) -> StepPlan:
        """Return the plan with drafts, if there are any, and their blocks."""
        drafts = {}
        for request, draft in self._drafter.draft(plan.decodes, self.runner.max_draft_rows).items():
            if count := self.scheduler.reserve_draft(request, len(draft)):
                drafts[request] = draft[:count]
        return plan._replace(drafts=drafts)

    def _finish_drafts(self, plan: StepPlan) -> None:
        """Wait for a step with drafts, and count how many of their tokens were right."""
        lengths = {request: len(request.tokens) for request in plan.decodes}
        self._drafter.index_sampled(plan.decodes)
        self.finish_step()
        self._drafter.observe(
            {request: len(request.tokens) - lengths[request] for request in plan.decodes}, plan.drafts
        )
        for request, draft in plan.drafts.items():
            self.tokens_drafted += len(draft)
            self.tokens_accepted += sum(map(eq, request.tokens[lengths[request] :], draft))

    def update_weights(self, directory: Path, version: Version) -> str:
        """Read and install a published version, and return its checksum."""
        published = self.read(directory, version)
        try:
            self.install(published)
        finally:
            published.release()
        return published.checksum

    def read(self, directory: Path, version: Version) -> PublishedWeights:
        """Read a published version for this engine; from any thread, while it samples."""
        receive = self.link.receive
        return read_published(directory, version, parameters=self._parameters, receive=receive, base=self._base)

    @torch.inference_mode()
    def install(self, published: PublishedWeights) -> None:
        """Install weights that were read, between two steps; `published` must then be released.

        Copies within the GPU are queued, behind or beside the step in flight, whose output is read meanwhile.
        """
        if not published.is_on_gpu:
            self.finish_step()  # its tokens need not wait for copies from the host
        published.install(self._parameters, self.runner.copy_weights)
        self.finish_step()
        self._weights = Weights(published.version, self._weights.installed + 1)
        for request in self.scheduler.running:
            if self.kv_on_update == "keep" and request.is_verified:
                request.start_span(self.version)
            else:
                self._keep_routes(request)
                self.scheduler.recompute(request, self._weights)

    @torch.inference_mode()
    def release_cache(self) -> int:
        """Free the memory of the KV cache, and return its size; 0 if it cannot be freed.

        Running requests stay running and are recomputed. `runner.restore` must be called before the next step.
        """
        if not self.runner.cache_bytes:
            return 0
        self.finish_step()
        self.scheduler.recompute_all(self._weights)
        self.scheduler.unverified_blocks.clear()  # restored memory is all zeros
        return self.runner.release()

    def fail_all(self, error: EngineError) -> None:
        """Fail all requests; the engine cannot compute afterwards."""
        self._in_flight = None
        for request in self.scheduler.remove_all():
            if not request.future.done():
                self._fail(request, error)

    def drop_cancelled(self) -> None:
        """Remove cancelled requests, without computing."""
        while self._cancelled:
            request = self._cancelled.popleft()
            if not request.future.done():
                self.scheduler.remove(request)
                self._fail(request, RequestCancelled("the request was cancelled"), "cancelled")

    def finish_step(self) -> None:
        """Wait for the step in flight, if there is one, and append each sampled token to its request."""
        if self._in_flight is None:
            return
        launched, self._in_flight = self._in_flight, None
        begun = time.perf_counter()
        output = launched.output()
        self.device_wait_s += time.perf_counter() - begun
        self.device_busy_s += output.device_s
        accept_tokens(
            (request.matcher, token)
            for request, token in zip(*output[:2], strict=True)
            if request.matcher is not None and not request.is_done and token not in request.stop_ids
        )
        finished: list[Request] = []
        log_masses, alternatives = output.log_masses or itertools.repeat(0.0), output.alternatives
        latents = output.latents
        for request, token, logprob, log_mass in zip(*output[:3], log_masses, strict=False):
            if request.is_done or (finished and finished[-1] is request):
                continue  # it ended, or was cancelled, after this step was launched, or within its draft
            try:
                if logprob != logprob or request.prompt_logprobs is not None:
                    self._check_finite(request, logprob)
                top = alternatives.get(request) if alternatives else None
                if request.append(token, logprob, log_mass, top, latents.get(request) if latents else None):
                    finished.append(request)
                else:
                    end = request.prompt_length + len(request.logprobs)
                    if end % BLOCK_SIZE < 2:  # the token ends a block, or a draft ended the block before it
                        self.scheduler.register_block(request, end // BLOCK_SIZE - 1)
                    if request.on_tokens is not None:
                        request.on_tokens()
                self.tokens_sampled += 1
            except Exception as error:  # e.g. of a tokenizer at a stop string: only this request fails
                self._remove_failed(request, error)
        self.scheduler.release_from_quarantine(output.requests)
        for request in finished:
            routes = None
            if self.routes is not None and request.params.routed_experts:
                self._keep_routes(request)
                layers = self.model.config.get_text_config().num_hidden_layers
                routes = write_routes(np.concatenate(request.routes), layers)
            self.scheduler.remove(request)
            self.finished[request.finish_reason] += 1
            self._drafter.add_finished(request)
            request.finish(routes)

    def _check_finite(self, request: Request, logprob: float) -> None:
        """Raise an error if the logprob of a sampled token, or of the prompt before the first one, is NaN."""
        has_nan = logprob != logprob
        if request.prompt_logprobs is not None and not request.has_sampled:
            has_nan |= any(score != score for score in request.prompt_logprobs)
        if has_nan:
            raise EngineError(
                f"weights {self.version} at temperature {request.params.temperature} gave logits that are not "
                "finite (NaN or infinity)"
            )

    def _keep_routes(self, request: Request) -> None:
        """Copy the routes by which the tokens of a request were sampled, before it is computed again."""
        last = request.prompt_length + len(request.logprobs) - 1  # it has not been computed yet
        if self.routes is not None and request.params.routed_experts and request.has_sampled:
            copied = sum(map(len, request.routes))
            if copied < last <= request.computed:
                request.routes.append(self.routes.read(request.blocks, copied, last))

    def _isolate(self, requests: list[Request], error: Exception) -> None:
        """Handle a failed forward: fail its only request, or compute each of several alone to find the one at fault."""
        if len(requests) == 1:
            self._remove_failed(requests[0], error)
            return
        self._failed_batches += 1
        if self._failed_batches > MAX_FAILED_BATCHES:
            raise error  # each request succeeds alone: no request is at fault
        log.exception("a step failed; its %d requests are computed one by one", len(requests))
        for request in requests:
            request.is_verified = False
        self.scheduler.isolate(requests, self._weights)

    def _remove_failed(self, request: Request, error: Exception) -> None:
        """Remove a request that cannot be finished, and give it the error."""
        if not isinstance(error, EngineError):
            log.error("a request failed", exc_info=error)
            error = EngineError(f"the engine failed at this request: {type(error).__name__}: {error}")
        request.is_verified = False
        self.scheduler.remove(request)
        self._fail(request, error)

    def _fail(self, request: Request, error: EngineError, how: str = "error") -> None:
        self.finished[how] += 1
        request.fail(error)

    def reset_counters(self) -> None:
        self.tokens_sampled = self.tokens_drafted = self.tokens_accepted = 0
        self.steps = self.prefill_steps = 0
        self.device_wait_s = self.device_busy_s = 0.0
        self.finished.clear()
        self.scheduler.reset_counters()
