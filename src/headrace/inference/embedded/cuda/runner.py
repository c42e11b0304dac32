"""The runner for GPUs: decode and short prefills as one CUDA graph, from embedding to sampled token.

A step is one copy to the device, one graph and one copy back. The graph reads tokens that the last step sampled on the
device, so that a step can be launched before the output of the last one is read.

Long prefills, prompt logprobs and adapters have a second forward, which comes after the graph, when all shared keys and
values are stored. Requests that truncate or change the distribution or want top logprobs are sampled from the same
logits by torch; masks of grammars are computed meanwhile. Requests with an adapter, whose hooks change layers, are
computed without graph and compiled layers; those that think in latent space without graph, since their input embeddings
are not those of their tokens.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
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
    mixed_sizes,
)
from headrace.inference.embedded.cuda.kv_storage import KVStorage
from headrace.inference.embedded.cuda.rows import MAX_PREFILLS, PrefillRow, StepRows
from headrace.inference.embedded.cuda.sampling_kernels import TileStats, feed_tokens, sample_tokens
from headrace.inference.embedded.cuda.steps import GraphedStep, PrefillStep, StepShape, can_flash, join_chunks
from headrace.inference.embedded.grammar import Masks, start_masks
from headrace.inference.embedded.logits_processing import process_logits
from headrace.inference.embedded.request import Request
from headrace.inference.embedded.routes import RouteCache
from headrace.inference.embedded.runner import (
    PADDED_PREFILL_TOKENS,
    StepOutput,
    find_logit_rows,
    finish_prefill,
    key_shapes,
    next_latents,
    token_inputs,
    top_alternatives,
)
from headrace.inference.embedded.sampling import sample
from headrace.inference.embedded.scheduler import CHUNK_TOKENS, Chunk, StepPlan

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
        self._host_outputs = deque(self._make_host_output() for _ in range(2))
        """Memory for the sampled tokens of two steps, and when a step began and wrote it."""
        self._layers = CompiledLayers(model) if compile else None
        self._graphs = StepGraphs(self._compute) if graphs else None
        with torch.inference_mode():
            self._warm_up()

    def _make_host_output(self) -> tuple[Tensor, StepTimes | None]:
        on_gpu = self._device.type == "cuda"
        memory = torch.zeros(self._sampled.shape, dtype=torch.float64, pin_memory=on_gpu)
        return memory, StepTimes.make() if on_gpu else None

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
            logits = self._run_rows(decodes, prefills)
            requests = list(self._rows.requests)
            incomplete = {prefill.request for prefill in prefills if prefill.end < len(prefill.request.tokens)}
            rows = [row for row, request in enumerate(requests) if request not in incomplete]
            sampling = [requests[row] for row in rows] if incomplete else requests
            parts.append(SampledPart(sampling, rows, logits, 0, self._model))
        if others:
            requests, prefill_logits = self._prefill(plan, others)
            if prefill_logits is not None:
                parts.append(SampledPart(requests, range(len(requests)), prefill_logits, self._largest, self._model))
        host.copy_(self._sampled, non_blocking=True)
        if times is not None:
            times.ended.record()
        is_plain = not others and all(request.is_plain for part in parts for request in part.requests)
        masks = None if is_plain else start_masks(plan.requests)  # while the GPU computes
        return CudaStep(parts, host, times, allows_next=is_plain, masks=masks)

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

    def _run_rows(self, decodes: Sequence[Request], prefills: Sequence[PrefillRow]) -> Tensor:
        """Return the logits of each row that is sampled."""
        tokens = len(decodes) + sum(prefill.end - prefill.start for prefill in prefills)
        sizes = self._mixed_sizes if prefills else self._sizes
        shape = StepShape(next(size for size in sizes if size >= tokens), bool(prefills))
        self._rows.arrange(decodes, prefills, shape.tokens)
        self._rows.send()
        return self._compute(shape) if self._graphs is None else self._graphs.run(shape)

    def _compute(self, shape: StepShape) -> Tensor:
        """Compute what a graph captures: from the rows' inputs to tokens; returns logits by row."""
        step = GraphedStep(self._rows, shape, self._partial)
        feed_tokens(step.ids, step.sources, self._sampled)
        self._adapters.prepare([], step.ids)  # these tokens have no adapter
        kept = self._row_numbers[: step.num_rows] if step.num_rows < shape.tokens else 0
        logits = self._forward(step, step.ids, step.positions, kept, plain=False)
        sample_tokens(logits, step.temperatures, step.uniforms, self._sampled[:, : step.num_rows], self._tiles)
        return logits

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
        self._rows.arrange([], [], shape.tokens)
        self._rows.send()
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
            self._rows.arrange([], [], shapes[0].tokens)
            self._rows.send()
            self._graphs.capture(shapes)
            log.info("steps of %d shapes captured in %.1f s", len(shapes), time.monotonic() - start)

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


class SampledPart(NamedTuple):
    """Requests that one forward sampled for."""

    requests: Sequence[Request]
    rows: Sequence[int]
    """Each one's row of the logits."""
    logits: Tensor
    begin: int
    """Column of the first row's token and logprob among the sampled ones."""
    model: Any

    def output(self, sampled: Tensor, masks: Masks | None) -> StepOutput:
        """Return the tokens in `sampled`; torch samples for requests that truncate or change the distribution."""
        requests = self.requests
        columns = sampled.numpy()[:, [self.begin + row for row in self.rows]]
        tokens, logprobs = columns[0].astype(np.int64).tolist(), columns[1].tolist()
        if all(request.is_plain for request in requests):
            return StepOutput(requests, tokens, logprobs, None, {})
        logits = process_logits(self.logits[list(self.rows)], requests, masks)
        log_masses = None
        drawing = [row for row, each in enumerate(requests) if each.params.truncates or each.processes_logits]
        if drawing:
            own = [requests[row] for row in drawing]
            drawn = sample(logits[drawing], [each.params for each in own], [each.uniform() for each in own])
            log_masses = [0.0] * len(requests)
            drawn_columns = torch.stack([column.double() for column in drawn if column is not None], 1)
            for row, (token, logprob, *log_mass) in zip(drawing, drawn_columns.tolist(), strict=True):
                tokens[row], logprobs[row], log_masses[row] = int(token), logprob, sum(log_mass)
        latents = next_latents(self.model, requests, logits)
        return StepOutput(requests, tokens, logprobs, log_masses, top_alternatives(requests, logits), latents)


class StepTimes(NamedTuple):
    """When the GPU began and ended a step."""

    begun: torch.cuda.Event
    ended: torch.cuda.Event

    @classmethod
    def make(cls) -> StepTimes:
        return cls(*(torch.cuda.Event(enable_timing=True) for _ in range(2)))  # type: ignore[no-untyped-call]


class CudaStep(NamedTuple):
    """A step in the GPU's queue."""

    parts: list[SampledPart]
    host: Tensor
    """Gets the sampled tokens and logprobs."""
    times: StepTimes | None
    allows_next: bool
    masks: Masks | None

    @property
    def sampling(self) -> Sequence[Request]:
        return [request for part in self.parts for request in part.requests]

    def output(self) -> StepOutput:
        if self.times is not None:
            self.times.ended.synchronize()
        outputs = [part.output(self.host, self.masks) for part in self.parts]
        if len(outputs) == 1:
            return outputs[0]
        log_masses = None
        if any(output.log_masses is not None for output in outputs):
            log_masses = [mass for each in outputs for mass in each.log_masses or [0.0] * len(each.requests)]
        return StepOutput(
            [request for each in outputs for request in each.requests],
            [token for each in outputs for token in each.tokens],
            [logprob for each in outputs for logprob in each.logprobs],
            log_masses,
            {request: top for each in outputs for request, top in each.alternatives.items()},
            {request: latent for each in outputs for request, latent in each.latents.items()},
        )

    def device_seconds(self) -> float:
        return 0.0 if self.times is None else self.times.begun.elapsed_time(self.times.ended) / 1e3
