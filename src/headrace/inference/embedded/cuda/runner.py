"""Steps on a GPU: the newest tokens of all requests as one graph, from embedding to sampled token, prompts beside it.

A step of newest tokens alone is one copy to the device, one graph and one copy back. Prompts are computed after it, in
a forward of their own: whatever they share with others is stored by then. Requests that truncate the distribution or
ask for alternatives are sampled from the same logits by torch, and those with an adapter, which changes what a layer
does, are computed uncaptured and uncompiled.
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
from headrace.inference.embedded.blocks import blocks_for
from headrace.inference.embedded.cuda.attention import ATTENTION, Step, attending
from headrace.inference.embedded.cuda.attention_kernels import make_partial
from headrace.inference.embedded.cuda.choosing import choose, make_tiles
from headrace.inference.embedded.cuda.compiling import CompiledLayers
from headrace.inference.embedded.cuda.graphs import Graphs, batch_sizes
from headrace.inference.embedded.cuda.rows import Rows
from headrace.inference.embedded.cuda.steps import Decoding, Prefill, can_flash
from headrace.inference.embedded.cuda.storage import Storage
from headrace.inference.embedded.request import Request
from headrace.inference.embedded.runner import (
    NOTHING,
    STEP_TOKENS,
    Outcome,
    alternatives,
    blocks_to_copy,
    follow,
    key_shapes,
    rows_of,
    rows_with_logits,
    score,
)
from headrace.inference.embedded.sampling import sample
from headrace.inference.embedded.scheduler import Chunk, Plan

log = logging.getLogger(__name__)

FLASH_STEP_TOKENS = 16384
"""Of prompts: a GPU is not filled by less."""
PATIENCE = 8
"""Steps: the prompts' forward has its kernels launched one by one, which takes as long as several graphs."""


class CudaRunner:
    """A model on a GPU with its storage, graphs and compiled layers."""

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
        self._storage = Storage(config.num_hidden_layers, blocks, key_heads, dim, model.dtype, self._device)
        self._storage.attach(model)
        self._flash = can_flash(model.dtype, dim, self._device, getattr(config, "attn_logit_softcapping", None))
        self._sizes = batch_sizes(max_running)
        most = self._sizes[-1]
        self._rows = Rows(most, blocks_for(max_model_len), key_heads, self._device)
        self._partial = make_partial(self._rows.room(most), heads, dim, self._device)
        self._tiles = make_tiles(most, vocab, self._device)
        self._most = most
        self._chosen = torch.zeros(2, 2 * most, dtype=torch.float64, device=self._device)
        """Token and logprob: of newest tokens in the first half, of prompts in the second."""
        self._read = torch.zeros(2, 2 * most, dtype=torch.float64, pin_memory=self._device.type == "cuda")
        self._layers = CompiledLayers(model) if compile else None
        self._graphs = Graphs(self._decode) if graphs else None
        with torch.inference_mode():
            self._set_up()

    def run(self, plan: Plan, unproven: list[int]) -> Outcome:
        self._storage.clear(unproven)
        unproven.clear()
        newest = [chunk.request for chunk in plan.chunks if chunk.is_newest and chunk.request.adapter is None]
        others = []
        if len(newest) < len(plan.chunks):
            others = [chunk for chunk in plan.chunks if not chunk.is_newest or chunk.request.adapter is not None]
        logits = self._run_newest(newest) if newest else None
        prompts, prompt_logits = self._run_prompts(plan, others) if others else ([], None)
        if logits is None and prompt_logits is None:
            return NOTHING
        self._read.copy_(self._chosen, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        outcome = NOTHING if logits is None else self._outcome(self._rows.requests, logits, 0)
        if prompt_logits is None:
            return outcome
        return _both(outcome, self._outcome(prompts, prompt_logits, self._most))

    def _run_newest(self, requests: list[Request]) -> Tensor:
        """[request, vocabulary] logits in the order of rows; what is chosen goes to the first half."""
        size = next(size for size in self._sizes if size >= len(requests))
        self._rows.arrange(requests, size)
        self._rows.send()
        return self._decode(size) if self._graphs is None else self._graphs.run(size)

    def _decode(self, size: int) -> Tensor:
        """What is captured: from the rows' inputs to tokens."""
        step = Decoding(self._rows, size, self._partial)
        self._adapters.prepare([], step.ids)  # what the last prompts had is not for these
        logits = self._forward(step, step.ids, step.positions, plain=False)
        choose(logits, step.temperatures, step.uniforms, self._chosen[:, :size], self._tiles)
        return logits

    def _run_prompts(self, plan: Plan, chunks: Sequence[Chunk]) -> tuple[list[Request], Tensor | None]:
        """Those whose prompts are complete, and their logits; what is chosen goes to the second half."""
        step = Prefill(chunks, self._device, self._model.dtype, flash=self._flash)
        rows, scored, last = rows_with_logits(step.chunks)
        self._adapters.prepare(step.chunks, step.ids)
        plain = any(chunk.request.adapter is not None for chunk in chunks)
        logits = self._forward(step, step.ids, step.positions, rows, plain=plain)
        score(scored, logits)
        copied = blocks_to_copy(plan)
        if copied:
            self._storage.copy(*zip(*copied, strict=True))
        follow(plan, last)
        if not last:
            return [], None
        requests = [*last]
        logits = rows_of(logits, [*last.values()])
        settings = torch.tensor(
            [[request.params.temperature, request.uniform()] for request in requests], dtype=torch.float64
        ).to(self._device)
        choose(logits, settings[:, 0].float(), settings[:, 1].contiguous(), self._chosen[:, self._most :], self._tiles)
        return requests, logits

    def _forward(
        self, step: Step, ids: Tensor, positions: Tensor, rows: list[int] | None = None, *, plain: bool
    ) -> Tensor:
        """Logits of those rows, or of all."""
        kept: int | Tensor = 0 if rows is None else torch.tensor(rows, dtype=torch.long, device=self._device)
        inputs = {"input_ids": ids[None], "position_ids": positions[None], "logits_to_keep": kept, "use_cache": False}
        layers = None if plain or len(ids) == 1 else self._layers  # one token would be a program of its own
        with attending(step), nullcontext() if layers is None else layers.compiled():
            logits: Tensor = self._model(**inputs).logits[0]
        return logits

    def _outcome(self, requests: Sequence[Request], logits: Tensor, begin: int) -> Outcome:
        """What was chosen for these, from that place on; torch chooses for those that truncate."""
        tokens, logprobs = self._read[:, begin : begin + len(requests)].tolist()
        masses = None
        cut = [row for row, request in enumerate(requests) if request.truncated_logprobs is not None]
        if cut:
            own = [requests[row] for row in cut]
            sampled = sample(logits[cut], [each.params for each in own], [each.uniform() for each in own])
            masses = [0.0] * len(requests)
            columns = torch.stack([column.double() for column in sampled if column is not None], 1)
            for row, values in zip(cut, columns.tolist(), strict=True):
                tokens[row], logprobs[row], masses[row] = values
        return Outcome(requests, tokens, logprobs, masses, alternatives(requests, logits))

    def _set_up(self) -> None:
        """Run once for nobody: what can be compiled is compiled here, or given up."""
        # Of the usual size, since kernels are chosen for it, but unlike any size of the model: equal ones would be
        # taken for the same.
        size = max(self._sizes[0], self._most - 1)
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
        self._decode(size)  # what fails here, too, has nothing to do with the compiler
        if obstacle is not None:
            log.warning("this model's layers cannot be compiled, which costs speed: %s", obstacle)
        if self._graphs is not None:
            self._look_for_waits(size)
        if self._graphs is not None:
            start = time.monotonic()
            self._rows.arrange([], self._most)
            self._rows.send()
            self._graphs.capture(self._sizes)
            log.info("steps of %d sizes captured in %.1f s", len(self._sizes), time.monotonic() - start)

    def _look_for_waits(self, size: int) -> None:
        """Give graphs up where a step waits for the GPU on its way: a capture that fails cannot be taken back."""
        before = torch.cuda.get_sync_debug_mode()
        try:
            with warnings.catch_warnings():  # it says of itself that it does not see everything
                warnings.simplefilter("ignore")
                torch.cuda.set_sync_debug_mode("error")
            self._decode(size)
        except (torch.AcceleratorError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            log.warning("this model's steps cannot be captured as graphs, which costs speed: %s", error)
            self._graphs = None
        finally:
            torch.cuda.set_sync_debug_mode(before)

    @property
    def step_tokens(self) -> int:
        return FLASH_STEP_TOKENS if self._flash else STEP_TOKENS

    @property
    def patience(self) -> int:
        return 0 if self._graphs is None else PATIENCE

    @property
    def cache_bytes(self) -> int:
        return self._storage.bytes

    def release(self) -> int:
        return self._storage.release()

    def restore(self) -> None:
        self._storage.restore()


def _both(first: Outcome, second: Outcome) -> Outcome:
    masses = None
    if first.log_masses is not None or second.log_masses is not None:
        masses = [mass for each in (first, second) for mass in each.log_masses or [0.0] * len(each.requests)]
    return Outcome(
        [*first.requests, *second.requests],
        [*first.tokens, *second.tokens],
        [*first.logprobs, *second.logprobs],
        masses,
        {**first.alternatives, **second.alternatives},
    )
