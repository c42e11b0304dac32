"""The runner for GPUs: decode and short prefills as one CUDA graph, from embedding to sampled token.

A step is one copy to the device, one graph and one copy back. The graph reads tokens that the last step sampled on the
device, so that a step can be launched before the output of the last one is read.

Masks of grammars follow from tokens on the host. So a step is launched as always, the output of the last one is read
and masks are computed meanwhile, and a second, small graph masks the logits and samples again.

Long prefills, prompt logprobs and adapters have a second forward, which comes after the graph, when all shared keys and
values are stored. Requests that truncate or penalize the distribution or want top logprobs are sampled from the same
logits by torch, and the next step waits for them. Requests with an adapter, whose hooks change layers, are
computed without graph and compiled layers; those that think in latent space without graph, since their input embeddings
are not those of their tokens.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace.inference.embedded.adapters import Adapters
from headrace.inference.embedded.block_manager import BLOCK_SIZE, blocks_for
from headrace.inference.embedded.cuda.attention import ATTENTION, Step, current_step
from headrace.inference.embedded.cuda.attention_kernels import PartialResults, prefill_tile_tokens
from headrace.inference.embedded.cuda.compilation import (
    MAX_MIXED_PREFILL,
    CompiledLayers,
    StepGraphs,
    batch_sizes,
    layers_in_use,
    mixed_sizes,
    model_layers,
)
from headrace.inference.embedded.cuda.kv_storage import KVStorage
from headrace.inference.embedded.cuda.launched_step import NOT_DRAFTED, CudaStep, SampledPart, StepTimes
from headrace.inference.embedded.cuda.rows import MAX_PREFILLS, PrefillRow, StepRows
from headrace.inference.embedded.cuda.sampling_kernels import TileStats, feed_tokens, mask_tokens, sample_tokens
from headrace.inference.embedded.cuda.steps import GraphedStep, PrefillStep, StepShape, can_flash, join_chunks
from headrace.inference.embedded.cuda.weight_copies import WeightCopies, is_large
from headrace.inference.embedded.grammar import Masks, compute_masks, start_masks
from headrace.inference.embedded.request import Request
from headrace.inference.embedded.routes import RouteCache
from headrace.inference.embedded.runner import (
    PADDED_PREFILL_TOKENS,
    find_logit_rows,
    finish_prefill,
    key_shapes,
    token_inputs,
)
from headrace.inference.embedded.scheduler import CHUNK_TOKENS, Chunk, StepPlan
from headrace.inference.weights.buffers import copy_tensors

log = logging.getLogger(__name__)

FLASH_PREFILL_TOKENS = 16384
"""Prefill budget of a step without graphs: fewer tokens do not keep a GPU busy."""
GRAPHED_PREFILL_TOKENS = MAX_MIXED_PREFILL - CHUNK_TOKENS
"""The same with graphs. A chunk is rounded up, and graphs compute what fits into them."""
MAX_WAIT_STEPS = 4
"""Batching delay: a step with prefill takes up to a fifth longer than one without."""


class CudaRunner:
    """A model on a GPU with its KV cache, CUDA graphs and compiled layers."""

    def __init__(
        self,
        model: Any,
        blocks: int,
        adapters: Adapters,
        *,
        max_running: int,
        max_model_len: int,
        compile: bool,
        graphs: bool,
        seed: int = 0,
        routes: RouteCache | None = None,
    ) -> None:
        model.set_attn_implementation(ATTENTION)
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        (key_heads, dim), *others = set(key_shapes(config))
        if others:
            raise NotImplementedError("the model's layers differ in the size of their keys")
        vocab = model.get_output_embeddings().weight.shape[0]
        self._model = model
        self._device: torch.device = model.device
        self._adapters = adapters
        self._routes = routes
        self._storage = KVStorage(config.num_hidden_layers, blocks, key_heads, dim, model.dtype, self._device)
        self._storage.attach(model)
        self._flash = can_flash(model.dtype, dim, self._device, getattr(config, "attn_logit_softcapping", None))
        self._sizes = batch_sizes(max_running)
        largest = self._sizes[-1]
        self._mixed_sizes = mixed_sizes(largest)
        self._rows = StepRows(
            largest,
            self._mixed_sizes[-1],
            blocks_for(max_model_len),
            key_heads,
            prefill_tile_tokens(heads, key_heads),
            self._device,
            seed,
        )
        self._row_numbers = torch.arange(largest, device=self._device)
        self._partial = PartialResults.allocate(self._rows.max_items(largest), heads, dim, self._device)
        self._tiles = TileStats.allocate(largest, vocab, self._device)
        self._largest = largest
        self._sampled = torch.zeros(2, 2 * largest, dtype=torch.float64, device=self._device)
        """Tokens and logprobs: by row in the first half, of long prefills in the second."""
        words, pinned = -(-vocab // 32), self._device.type == "cuda"
        host_tokens = (torch.zeros(self._sampled.shape, dtype=torch.float64, pin_memory=pinned) for _ in range(2))
        self._host_outputs = deque((memory, StepTimes.make() if pinned else None) for memory in host_tokens)
        """Memory for the sampled tokens of two steps, and when a step began and wrote it."""
        self._staged_masks = torch.zeros(largest, words, dtype=torch.int32, pin_memory=pinned)
        self._masks = torch.zeros(largest, words, dtype=torch.int32, device=self._device)
        self._copies: WeightCopies | None = None
        """Of a large model, whose graphs are divided."""
        self._layers = CompiledLayers(model) if compile else None
        self._graphs = StepGraphs(self._compute, self._pass_middle) if graphs else None
        self._masked_graphs: StepGraphs[StepShape, None] | None = None
        with torch.inference_mode():
            self._warm_up()

    def launch(self, plan: StepPlan, unverified_blocks: list[int]) -> CudaStep:
        host, times = self._host_outputs[0]
        self._host_outputs.rotate()
        if times is not None:
            times.begun.record()
        self._storage.clear_blocks(unverified_blocks)
        unverified_blocks.clear()
        decodes, prefills, others = self._split(plan)
        parts: list[SampledPart] = []
        if decodes or prefills:
            shape, logits = self._run_rows(decodes, prefills, plan.drafts)
            parts.append(self._sampled_part(prefills, plan.drafts, logits))
        if others:
            if self._copies is not None:
                self._copies.wait()
            requests, prefill_logits = self._prefill(plan, others)
            self._pass_middle()
            if prefill_logits is not None:
                parts.append(SampledPart(requests, range(len(requests)), prefill_logits, self._largest, self._model))
        if times is not None:
            times.ended.record()
        is_plain = not others and all(request.is_plain for part in parts for request in part.requests)
        if is_plain and any(request.matcher is not None for part in parts for request in part.requests):
            late: Callable[[], Masks | None] | None = partial(self._mask_and_sample, shape, parts[0], host, times)
        else:
            self._read_sampled(host, times)
            late = None if is_plain else partial(start_masks, plan.requests)
        return CudaStep(parts, host, times, is_plain and not plan.drafts, late)

    def copy_weights(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> torch.cuda.Event | None:
        return copy_tensors(pairs) if self._copies is None else self._copies.copy(pairs)

    def _pass_middle(self) -> None:
        if self._copies is not None:
            self._copies.pass_middle()

    def _sampled_part(
        self, prefills: Sequence[PrefillRow], drafts: Mapping[Request, Sequence[int]], logits: Tensor
    ) -> SampledPart:
        """Return the rows that are sampled: of prefills only those that are complete, of drafts all."""
        requests = list(self._rows.requests)
        incomplete = {prefill.request for prefill in prefills if prefill.end < len(prefill.request.tokens)}
        if not (incomplete or drafts):
            return SampledPart(requests, range(len(requests)), logits, 0, self._model)
        rows = [row for row, request in enumerate(requests) if request not in incomplete]
        if not drafts:
            return SampledPart([requests[row] for row in rows], rows, logits, 0, self._model)
        sampling, rows, drafted = [], [], []
        for row, request in enumerate(requests):
            draft, draft_rows = drafts.get(request, ()), self._rows.draft_rows.get(request, ())
            sampling += [request] * (1 + len(draft))
            rows += [row, *draft_rows]
            drafted += [NOT_DRAFTED, *draft]
        return SampledPart(sampling, rows, logits, 0, self._model, drafted)

    def _mask_and_sample(self, shape: StepShape, part: SampledPart, host: Tensor, times: StepTimes | None) -> None:
        """Sample again with masks, for which the tokens of the step before must be known."""
        requests = ((request.matcher, row, request.is_done) for request, row in zip(*part[:2], strict=True))
        rows = [(matcher, row) for matcher, row, is_done in requests if matcher is not None and not is_done]
        compute_masks(rows, self._staged_masks.numpy())
        count = len(part.logits)
        self._masks[:count].copy_(self._staged_masks[:count], non_blocking=True)
        if self._masked_graphs is None:
            self._sample_masked(part.logits)
        else:
            self._masked_graphs.run(shape)
        self._read_sampled(host, times)

    def _read_sampled(self, host: Tensor, times: StepTimes | None) -> None:
        host.copy_(self._sampled, non_blocking=True)
        if times is not None:
            times.written.record()

    def _split(self, plan: StepPlan) -> tuple[list[Request], list[PrefillRow], list[Chunk]]:
        """Return decodes and prefills that are computed together, and chunks that need a forward of their own.

        Prefills are all of one kind, since they may share blocks that this step computes.
        """
        if not all(map(_fits_graph, plan.decodes)):
            others = [chunk for chunk in plan.chunks if not (chunk.is_decode and _fits_graph(chunk.request))]
            return [request for request in plan.decodes if _fits_graph(request)], [], others
        decodes, others = plan.decodes, plan.prefills
        if any(not _fits_graph(chunk.request) or chunk.request.lacks_prompt_logprobs for chunk in others):
            return decodes, [], others
        prefills = [PrefillRow(*chunk[:3]) for chunk in join_chunks(others)]
        for _, second in plan.duplicates:  # its full blocks are those of the first request
            end = len(second.tokens)
            start = min(end - 1, end // BLOCK_SIZE * BLOCK_SIZE)
            prefills.append(PrefillRow(second, start, end, is_stored=end % BLOCK_SIZE > 0))
        tokens = len(decodes) + sum(prefill.end - prefill.start for prefill in prefills)
        if tokens > self._mixed_sizes[-1] or len(prefills) > MAX_PREFILLS:
            return decodes, [], others
        return decodes, prefills, []

    def _run_rows(
        self,
        decodes: Sequence[Request],
        prefills: Sequence[PrefillRow],
        drafts: Mapping[Request, Sequence[int]],
    ) -> tuple[StepShape, Tensor]:
        """Return the logits of each row that is sampled."""
        tokens = len(decodes) + sum(prefill.end - prefill.start for prefill in prefills)
        tokens += sum(map(len, drafts.values()))
        sizes = self._mixed_sizes if prefills else self._sizes
        shape = StepShape(next(size for size in sizes if size >= tokens), bool(prefills))
        self._rows.arrange(decodes, prefills, shape.tokens, drafts)
        self._rows.send()
        return shape, self._compute(shape) if self._graphs is None else self._graphs.run(shape)

    def _compute(self, shape: StepShape) -> Tensor:
        """Compute what a graph captures: from the rows' inputs to tokens; returns logits by row."""
        step = GraphedStep(self._rows, shape, self._partial)
        feed_tokens(step.ids, step.sources, self._sampled)
        self._adapters.prepare([], step.ids)  # these tokens have no adapter
        kept = self._row_numbers[: step.num_rows] if step.num_rows < shape.tokens else 0
        logits = self._forward(step, step.ids, step.positions, kept, plain=False)
        sample_tokens(logits, step.temperatures, step.uniforms, self._sampled[:, : step.num_rows], self._tiles)
        return logits

    def _sample_masked(self, logits: Tensor) -> None:
        """Compute what the second graph of a step captures: the tokens of all rows, with masks."""
        inputs, rows = self._rows.inputs, slice(0, len(logits))
        mask_tokens(logits, inputs.is_masked[rows], self._masks[rows])
        sample_tokens(logits, inputs.temperatures[rows], inputs.uniforms[rows], self._sampled[:, rows], self._tiles)

    def _prefill(self, plan: StepPlan, chunks: Sequence[Chunk]) -> tuple[list[Request], Tensor | None]:
        """Return the requests whose prompts are complete, and their logits."""
        step = PrefillStep(chunks, self._device, self._model.dtype, flash=self._flash)
        rows, scored, last = find_logit_rows(step.chunks)
        self._adapters.prepare(step.chunks, step.ids)
        plain = any(chunk.request.adapter is not None for chunk in chunks)
        kept = torch.tensor(rows, dtype=torch.long, device=self._device)
        tokens = token_inputs(self._model, step.chunks, step.ids)
        logits = self._forward(step, step.ids, step.positions, kept, plain=plain, tokens=tokens)
        stores = [store for store in (self._storage, self._routes) if store is not None]
        requests, logits = finish_prefill(plan, scored, last, logits, stores)
        if not requests:
            return [], None
        settings = torch.tensor(
            [[request.params.temperature, request.uniform()] for request in requests], dtype=torch.float64
        ).to(self._device)
        temperatures, uniforms = settings[:, 0].float(), settings[:, 1].contiguous()
        sample_tokens(logits, temperatures, uniforms, self._sampled[:, self._largest :], self._tiles)
        return requests, logits

    def _forward(
        self,
        step: Step,
        ids: Tensor,
        positions: Tensor,
        kept: int | Tensor,
        *,
        plain: bool,
        tokens: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Return the logits of the tokens `kept`, 0 for all; `plain` runs layers uncompiled.

        `tokens`: the argument that has the tokens, if it is not `ids`.
        """
        inputs = {"position_ids": positions[None], "logits_to_keep": kept, "use_cache": False}
        inputs |= {"input_ids": ids[None]} if tokens is None else tokens
        layers = None if plain or len(ids) == 1 else self._layers  # one token would need a program of its own
        recording = nullcontext() if self._routes is None else self._routes.recording(step.slots)
        with current_step(step), recording, nullcontext() if layers is None else layers.compiled():
            logits: Tensor = self._model(**inputs).logits[0]
        return logits

    def _warm_up(self) -> None:
        """Run steps without requests: compile layers and capture graphs, or fall back with a warning."""
        # About the usual size, since kernels are tuned for it, but not a size of the model, which the compiler would
        # take for the same dimension.
        shape = StepShape(max(self._sizes[0], self._largest - 1), has_prefill=False)
        self._send_no_requests(shape)
        obstacle = None
        if self._layers is not None:
            start = time.monotonic()
            try:
                self._compute(shape)
            except (torch.AcceleratorError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                obstacle = str(error)
                self._layers = None
            else:
                log.info("layers compiled in %.1f s", time.monotonic() - start)
        self._compute(shape)  # raises if the compiler was not the problem
        if obstacle is not None:
            log.warning("layers run uncompiled, which is slower: they cannot be compiled: %s", obstacle)
        if self._graphs is not None:
            self._check_capturable(shape)
        if self._graphs is not None:
            start = time.monotonic()
            shapes = [StepShape(size, has_prefill=False) for size in self._sizes]
            shapes += [StepShape(size, has_prefill=True) for size in self._mixed_sizes]
            shapes.sort(reverse=True)
            self._copies = self._make_copies(shape)
            with self._divide(self._graphs):
                self._graphs.capture(shapes, self._send_no_requests)
            logits_of = self._graphs.result
            self._masked_graphs = StepGraphs(lambda shape: self._sample_masked(logits_of(shape)))
            self._masked_graphs.capture(shapes)
            log.info("steps of %d shapes captured in %.1f s", len(shapes), time.monotonic() - start)

    def _make_copies(self, shape: StepShape) -> WeightCopies | None:
        if not is_large(model_layers(self._model)):
            return None
        layers = layers_in_use(self._model, lambda: self._compute(shape))
        return WeightCopies(self._model, layers, self._device) if len(layers) > 1 else None

    @contextmanager
    def _divide(self, graphs: StepGraphs[StepShape, Tensor]) -> Iterator[None]:
        """Divide graphs that are captured in the block before the middle layer, if weights are copied beside steps."""
        if self._copies is None:
            yield
            return
        hook = self._copies.middle.register_forward_pre_hook(lambda *_: graphs.split())
        try:
            yield
        finally:
            hook.remove()
        if not graphs.are_halved:
            self._copies = None

    def _send_no_requests(self, shape: StepShape) -> None:
        self._rows.arrange([], [], shape.tokens)
        self._rows.send()

    def _check_capturable(self, shape: StepShape) -> None:
        """Disable graphs if a step synchronizes with the GPU: a failed capture cannot be undone."""
        before = torch.cuda.get_sync_debug_mode()
        try:
            with warnings.catch_warnings():  # of the prototype feature itself
                warnings.simplefilter("ignore")
                torch.cuda.set_sync_debug_mode("error")
            self._compute(shape)
        except (torch.AcceleratorError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            log.warning("decode runs without CUDA graphs, which is slower: steps cannot be captured: %s", error)
            self._graphs = None
        finally:
            torch.cuda.set_sync_debug_mode(before)

    @property
    def max_prefill_tokens(self) -> int:
        if self._graphs is not None:
            return GRAPHED_PREFILL_TOKENS
        return FLASH_PREFILL_TOKENS if self._flash else PADDED_PREFILL_TOKENS

    @property
    def max_draft_rows(self) -> int:
        return self._largest

    @property
    def max_wait_steps(self) -> int:
        return 0 if self._graphs is None else MAX_WAIT_STEPS

    @property
    def cache_bytes(self) -> int:
        return self._storage.bytes

    def release(self) -> int:
        return self._storage.release()

    def restore(self) -> None:
        self._storage.restore()


def _fits_graph(request: Request) -> bool:
    """Return whether a request's tokens can be computed by the graph: by the model as it is, from their ids."""
    return request.adapter is None and request.latents is None
