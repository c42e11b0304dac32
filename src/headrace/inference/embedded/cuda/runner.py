"""The runner for GPUs: decode as one CUDA graph, from embedding to sampled token, and prefill in a second forward.

A decode step is one copy to the device, one graph and one copy back. Prefill comes after it, when all shared keys and
values are stored. Requests that truncate the distribution or want top logprobs are sampled from the same logits by
torch; those with an adapter, whose hooks change layers, are computed without graph and compiled layers.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from headrace.inference.embedded.adapters import Adapters
from headrace.inference.embedded.block_manager import blocks_for
from headrace.inference.embedded.cuda.attention import ATTENTION, Step, current_step
from headrace.inference.embedded.cuda.attention_kernels import PartialResults
from headrace.inference.embedded.cuda.compilation import CompiledLayers, DecodeGraphs, batch_sizes
from headrace.inference.embedded.cuda.kv_storage import KVStorage
from headrace.inference.embedded.cuda.rows import DecodeRows
from headrace.inference.embedded.cuda.sampling_kernels import TileStats, sample_tokens
from headrace.inference.embedded.cuda.steps import DecodeStep, PrefillStep, can_flash
from headrace.inference.embedded.request import Request
from headrace.inference.embedded.runner import (
    NO_OUTPUT,
    PADDED_PREFILL_TOKENS,
    StepOutput,
    find_logit_rows,
    finish_prefill,
    key_shapes,
    top_alternatives,
)
from headrace.inference.embedded.sampling import sample
from headrace.inference.embedded.scheduler import Chunk, StepPlan

log = logging.getLogger(__name__)

FLASH_PREFILL_TOKENS = 16384
"""Prefill budget of a step: fewer tokens do not keep a GPU busy."""
MAX_WAIT_STEPS = 8
"""Batching delay: prefill launches its kernels one by one, which takes as long as several graphs."""


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
        self._storage = KVStorage(config.num_hidden_layers, blocks, key_heads, dim, model.dtype, self._device)
        self._storage.attach(model)
        self._flash = can_flash(model.dtype, dim, self._device, getattr(config, "attn_logit_softcapping", None))
        self._sizes = batch_sizes(max_running)
        largest = self._sizes[-1]
        self._rows = DecodeRows(largest, blocks_for(max_model_len), key_heads, self._device)
        self._partial = PartialResults.allocate(self._rows.max_items(largest), heads, dim, self._device)
        self._tiles = TileStats.allocate(largest, vocab, self._device)
        self._largest = largest
        self._sampled = torch.zeros(2, 2 * largest, dtype=torch.float64, device=self._device)
        """Tokens and logprobs: of decode in the first half, of prefill in the second."""
        self._sampled_on_host = torch.zeros(2, 2 * largest, dtype=torch.float64, pin_memory=self._device.type == "cuda")
        self._layers = CompiledLayers(model) if compile else None
        self._graphs = DecodeGraphs(self._decode) if graphs else None
        with torch.inference_mode():
            self._warm_up()

    def run(self, plan: StepPlan, unverified_blocks: list[int]) -> StepOutput:
        self._storage.clear_blocks(unverified_blocks)
        unverified_blocks.clear()
        decodes = [chunk.request for chunk in plan.chunks if chunk.is_decode and chunk.request.adapter is None]
        others = []
        if len(decodes) < len(plan.chunks):
            others = [chunk for chunk in plan.chunks if not chunk.is_decode or chunk.request.adapter is not None]
        logits = self._run_decode(decodes) if decodes else None
        prefilled, prefill_logits = self._prefill(plan, others) if others else ([], None)
        if logits is None and prefill_logits is None:
            return NO_OUTPUT
        self._sampled_on_host.copy_(self._sampled, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        output = NO_OUTPUT if logits is None else self._output(self._rows.requests, logits, 0)
        if prefill_logits is None:
            return output
        return _concatenate(output, self._output(prefilled, prefill_logits, self._largest))

    def _run_decode(self, requests: list[Request]) -> Tensor:
        """Return [request, vocabulary] logits in the order of rows."""
        size = next(size for size in self._sizes if size >= len(requests))
        self._rows.arrange(requests, size)
        self._rows.send()
        return self._decode(size) if self._graphs is None else self._graphs.run(size)

    def _decode(self, size: int) -> Tensor:
        """Compute what a graph captures: from the rows' inputs to tokens; returns logits by row."""
        step = DecodeStep(self._rows, size, self._partial)
        self._adapters.prepare([], step.ids)  # these tokens have no adapter
        logits = self._forward(step, step.ids, step.positions, plain=False)
        sample_tokens(logits, step.temperatures, step.uniforms, self._sampled[:, :size], self._tiles)
        return logits

    def _prefill(self, plan: StepPlan, chunks: Sequence[Chunk]) -> tuple[list[Request], Tensor | None]:
        """Return the requests whose prompts are complete, and their logits."""
        step = PrefillStep(chunks, self._device, self._model.dtype, flash=self._flash)
        rows, scored, last = find_logit_rows(step.chunks)
        self._adapters.prepare(step.chunks, step.ids)
        plain = any(chunk.request.adapter is not None for chunk in chunks)
        logits = self._forward(step, step.ids, step.positions, rows, plain=plain)
        requests, logits = finish_prefill(plan, scored, last, logits, self._storage.copy_blocks)
        if not requests:
            return [], None
        settings = torch.tensor(
            [[request.params.temperature, request.uniform()] for request in requests], dtype=torch.float64
        ).to(self._device)
        temperatures, uniforms = settings[:, 0].float(), settings[:, 1].contiguous()
        sample_tokens(logits, temperatures, uniforms, self._sampled[:, self._largest :], self._tiles)
        return requests, logits

    def _forward(
        self, step: Step, ids: Tensor, positions: Tensor, rows: list[int] | None = None, *, plain: bool
    ) -> Tensor:
        """Return the logits of `rows`, or of all; `plain` runs layers uncompiled."""
        kept: int | Tensor = 0 if rows is None else torch.tensor(rows, dtype=torch.long, device=self._device)
        inputs = {"input_ids": ids[None], "position_ids": positions[None], "logits_to_keep": kept, "use_cache": False}
        layers = None if plain or len(ids) == 1 else self._layers  # one token would need a program of its own
        with current_step(step), nullcontext() if layers is None else layers.compiled():
            logits: Tensor = self._model(**inputs).logits[0]
        return logits

    def _output(self, requests: Sequence[Request], logits: Tensor, begin: int) -> StepOutput:
        """Return the tokens sampled to column `begin` and after; torch samples for requests that truncate."""
        tokens, logprobs = self._sampled_on_host[:, begin : begin + len(requests)].tolist()
        log_masses = None
        truncating = [row for row, request in enumerate(requests) if request.truncated_logprobs is not None]
        if truncating:
            own = [requests[row] for row in truncating]
            sampled = sample(logits[truncating], [each.params for each in own], [each.uniform() for each in own])
            log_masses = [0.0] * len(requests)
            columns = torch.stack([column.double() for column in sampled if column is not None], 1)
            for row, values in zip(truncating, columns.tolist(), strict=True):
                tokens[row], logprobs[row], log_masses[row] = values
        return StepOutput(requests, tokens, logprobs, log_masses, top_alternatives(requests, logits))

    def _warm_up(self) -> None:
        """Run decode without requests: compile layers and capture graphs, or fall back with a warning."""
        # About the usual size, since kernels are tuned for it, but not a size of the model, which the compiler would
        # take for the same dimension.
        size = max(self._sizes[0], self._largest - 1)
        self._rows.arrange([], size)
        self._rows.send()
        obstacle = None
        if self._layers is not None:
            start = time.monotonic()
            try:
                self._decode(size)
            except (torch.AcceleratorError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                obstacle = str(error)
                self._layers = None
            else:
                log.info("layers compiled in %.1f s", time.monotonic() - start)
        self._decode(size)  # raises if the compiler was not the problem
        if obstacle is not None:
            log.warning("layers run uncompiled, which is slower: they cannot be compiled: %s", obstacle)
        if self._graphs is not None:
            self._check_capturable(size)
        if self._graphs is not None:
            start = time.monotonic()
            self._rows.arrange([], self._largest)
            self._rows.send()
            self._graphs.capture(self._sizes)
            log.info("decode steps of %d sizes captured in %.1f s", len(self._sizes), time.monotonic() - start)

    def _check_capturable(self, size: int) -> None:
        """Disable graphs if a step synchronizes with the GPU: a failed capture cannot be undone."""
        before = torch.cuda.get_sync_debug_mode()
        try:
            with warnings.catch_warnings():  # of the prototype feature itself
                warnings.simplefilter("ignore")
                torch.cuda.set_sync_debug_mode("error")
            self._decode(size)
        except (torch.AcceleratorError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            log.warning("decode runs without CUDA graphs, which is slower: steps cannot be captured: %s", error)
            self._graphs = None
        finally:
            torch.cuda.set_sync_debug_mode(before)

    @property
    def max_prefill_tokens(self) -> int:
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


def _concatenate(first: StepOutput, second: StepOutput) -> StepOutput:
    log_masses = None
    if first.log_masses is not None or second.log_masses is not None:
        log_masses = [mass for each in (first, second) for mass in each.log_masses or [0.0] * len(each.requests)]
    return StepOutput(
        [*first.requests, *second.requests],
        [*first.tokens, *second.tokens],
        [*first.logprobs, *second.logprobs],
        log_masses,
        {**first.alternatives, **second.alternatives},
    )
