"""Runners compute the step that the scheduler planned: forwards, prompt logprobs, and the next token of each request.

The runner is chosen once, by the device. `PlainRunner` works everywhere, with one forward for all tokens, and is what
CPUs use; `cuda` has the one for GPUs. The engine appends the sampled tokens to their requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from headrace.inference.backend import TopLogprobs
from headrace.inference.embedded.adapters import Adapters
from headrace.inference.embedded.batch import KVWindow, make_batch
from headrace.inference.embedded.block_manager import BLOCK_SIZE
from headrace.inference.embedded.cpu.layers import fuse_layers
from headrace.inference.embedded.grammar import start_masks
from headrace.inference.embedded.kv_cache import ATTENTION, KVCache
from headrace.inference.embedded.logits_processing import process_logits
from headrace.inference.embedded.request import Latent, Request
from headrace.inference.embedded.routes import RouteCache
from headrace.inference.embedded.sampling import sample, scaled_logprobs, top_tokens
from headrace.inference.embedded.scheduler import Chunk, StepPlan
from headrace.inference.experts import compute_lone_tokens_twice
from headrace.inference.latents import expected_embeddings, gaussian_logprobs, input_embeddings, noise_scale
from headrace.inference.schema import LatentParams
from headrace.inference.weights.buffers import copy_tensors


class StepOutput(NamedTuple):
    """The next token of each request that has one; sequences are in the order of `requests`."""

    requests: Sequence[Request]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    """NaN where logits were not finite."""
    log_masses: Sequence[float] | None
    """Log of the probability left by truncation; None if no request truncates."""
    alternatives: dict[Request, TopLogprobs]
    """Top logprobs of the requests that want them."""
    latents: Mapping[Request, Latent] = {}
    """Of the requests that think in latent space."""
    device_s: float = 0.0
    """Seconds for which a GPU computed the step; 0 on a CPU."""


NO_OUTPUT = StepOutput([], [], [], None, {})


class LaunchedStep(Protocol):
    """A step that was started."""

    @property
    def sampling(self) -> Sequence[Request]:
        """The requests that get a token."""

    @property
    def allows_next(self) -> bool:
        """Whether the next step may be launched before this one's output is read."""

    def sample(self) -> None:
        """Start what needs the tokens of the step before; called once these were appended."""

    def output(self) -> StepOutput:
        """Wait until the step is computed, and return its output."""


class FinishedStep(NamedTuple):
    """A step that was computed when it was launched."""

    result: StepOutput
    allows_next: bool = False

    @property
    def sampling(self) -> Sequence[Request]:
        return self.result.requests

    def sample(self) -> None:
        pass

    def output(self) -> StepOutput:
        return self.result


class BlockStore(Protocol):
    """Something that has a part for each block."""

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None: ...


class Runner(Protocol):
    """Computes planned steps, and owns the KV cache; the model attends through it from its construction on."""

    @property
    def max_prefill_tokens(self) -> int:
        """Default token budget for the prefill of a step."""

    @property
    def max_wait_steps(self) -> int:
        """Batching delay of waiting requests in steps: about the cost of a prefill in decode steps."""

    @property
    def max_draft_rows(self) -> int:
        """Tokens of a step with drafts; 0 if the runner cannot compute drafts."""
        return 0

    def launch(self, plan: StepPlan, unverified_blocks: list[int]) -> LaunchedStep:
        """Start a step, after clearing `unverified_blocks` and emptying that list."""

    def copy_weights(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> torch.cuda.Event | None:
        """Copy new weights into the model's, pairs of target and source; return the end of copies that are queued."""
        return copy_tensors(pairs)

    @property
    def cache_bytes(self) -> int:
        """Size of the KV cache that `release` would free."""
        return 0  # unless a runner can free it, as that for GPUs can

    def release(self) -> int:
        """Free the memory of the KV cache, and return its size."""
        return 0

    def restore(self) -> None:
        """Allocate the memory of the KV cache again; raises `OutOfDeviceMemory` if there is not enough."""
        return


PADDED_PREFILL_TOKENS = 2048
"""Prefill budget of a step whose attention is padded."""


class PlainRunner(Runner):
    """Computes all tokens of a step in one forward."""

    max_prefill_tokens = PADDED_PREFILL_TOKENS
    max_wait_steps = 0

    def __init__(
        self, model: Any, blocks: int, adapters: Adapters, *, fuse: bool = True, routes: RouteCache | None = None
    ) -> None:
        """`fuse`: run decoder layers with the CPU kernels, if they support the model."""
        self._routes = routes
        model.set_attn_implementation(ATTENTION)
        self._model = model
        self._device: torch.device = model.device
        self._adapters = adapters
        self.cache = KVCache(model.config.get_text_config().num_hidden_layers, blocks)
        if self._device.type == "cpu":
            compute_lone_tokens_twice(model)
        self._is_fused = fuse and self._device.type == "cpu" and fuse_layers(model)
        self.window = KVWindow(2 * BLOCK_SIZE * blocks) if self._device.type == "cpu" and not self._is_fused else None

    def launch(self, plan: StepPlan, unverified_blocks: list[int]) -> FinishedStep:
        chunks = plan.chunks
        masks = start_masks([*(chunk.request for chunk in chunks), *(second for _, second in plan.duplicates)])
        seeded = any(chunk.request.params.seed is not None for chunk in chunks) and self._device.type == "cpu"
        single = len(chunks) == 1 and chunks[0].end - chunks[0].start == 1
        options = {"single_tokens": self._is_fused, "doubled": seeded and single}
        batch = make_batch(chunks, self._device, self._model.dtype, self.window, **options)
        rows, scored, last = find_logit_rows(batch.chunks)
        kept = rows * 2 if seeded and len(rows) == 1 else rows
        self.cache.prepare(batch, unverified_blocks)
        unverified_blocks.clear()
        self._adapters.prepare(batch.chunks, batch.ids)
        with nullcontext() if self._routes is None else self._routes.recording(batch.slots):
            logits = self._model(
                **token_inputs(self._model, batch.chunks, batch.ids),
                position_ids=batch.positions[None],
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=torch.tensor(kept, device=self._device, dtype=torch.long),
                paged=self.cache,
            ).logits[0]
        stores = [store for store in (self.cache, self._routes) if store is not None]
        requests, logits = finish_prefill(plan, scored, last, logits, stores)
        if not requests:
            return FinishedStep(NO_OUTPUT)
        logits = process_logits(logits, requests, masks)
        uniforms = [request.uniform() for request in requests]
        sampled = sample(logits, [request.params for request in requests], uniforms)
        # Token ids and float32 values are exact in float64: one copy to the host transfers them all.
        columns = torch.stack([column.double() for column in sampled if column is not None]).tolist()
        log_masses = columns[2] if len(columns) > 2 else None
        alternatives = top_alternatives(requests, logits)
        latents = next_latents(self._model, requests, logits)
        return FinishedStep(
            StepOutput(requests, [*map(int, columns[0])], columns[1], log_masses, alternatives, latents)
        )


def key_shapes(config: Any) -> list[tuple[int, int]]:
    """Return (key heads, head dimension) of each layer of a model."""
    is_mixed = getattr(config, "is_heterogeneous", False)
    return [
        (
            getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads,
            getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads,
        )
        for layer in (config.per_layer_config if is_mixed else [config] * config.num_hidden_layers)
    ]


def find_logit_rows(chunks: Sequence[Chunk]) -> tuple[list[int], list[tuple[Chunk, int]], dict[Request, int]]:
    """Return the tokens of a batch whose logits are needed, and where two kinds of them are among these logits:
    the first row of each chunk with prompt logprobs, and the last token of each request that is wholly computed."""
    rows: list[int] = []
    scored: list[tuple[Chunk, int]] = []
    last: dict[Request, int] = {}
    row = 0
    for chunk in chunks:
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


def finish_prefill(
    plan: StepPlan,
    scored: list[tuple[Chunk, int]],
    last: dict[Request, int],
    logits: Tensor,
    stores: Sequence[BlockStore],
) -> tuple[list[Request], Tensor]:
    """Store prompt logprobs, complete duplicate prompts, and return the requests to sample for with their logits.

    `scored`, `last` and `logits` are those of `find_logit_rows`. `stores` have the blocks.
    """
    store_prompt_logprobs(scored, logits)
    incomplete = [
        (first.blocks[-1], second.blocks[-1]) for first, second in plan.duplicates if len(second.tokens) % BLOCK_SIZE
    ]
    if incomplete:
        for store in stores:
            store.copy_blocks(*zip(*incomplete, strict=True))
    for first, second in plan.duplicates:
        last[second] = last[first]
    rows = [*last.values()]
    is_prefix = rows == list(range(len(rows)))  # the common case, without a copy
    return [*last], logits[: len(rows)] if is_prefix else logits[torch.tensor(rows, device=logits.device)]


def store_prompt_logprobs(scored: list[tuple[Chunk, int]], logits: Tensor) -> None:
    """Append the logprobs of the computed prompt tokens to their requests."""
    for (request, start, end, _), first in sorted(scored, key=lambda entry: entry[0].start):
        assert request.prompt_logprobs is not None
        targets = request.tokens[start + 1 : min(end + 1, request.prompt_length)]
        if not targets:
            continue
        rows = logits[first : first + len(targets)]
        logprobs = scaled_logprobs(rows, [request.params.temperature] * len(targets))
        column = torch.tensor(targets, device=logits.device)[:, None]
        request.prompt_logprobs += logprobs.gather(-1, column)[:, 0].tolist()
        if request.prompt_top_logprobs is not None:
            count = request.params.prompt_logprobs or 0
            request.prompt_top_logprobs += top_tokens(logprobs, [count] * len(targets))


def token_inputs(model: Any, chunks: Sequence[Chunk], ids: Tensor) -> dict[str, Tensor]:
    """Return the argument of a model's forward for the tokens of chunks: ids, or embeddings if any has a latent."""
    if not any(chunk.request.latents for chunk in chunks):
        return {"input_ids": ids[None]}
    latents = torch.zeros(len(ids), model.get_input_embeddings().embedding_dim, dtype=torch.float16)
    row = 0
    for request, start, end, _ in chunks:
        row += end - start
        if own := request.latents_of(start, end):
            latents[row - len(own) : row] = torch.from_numpy(np.stack(own))
    if len(ids) > row:  # a doubled token
        latents[row:] = latents[:row]
    embeddings = by_row(lambda *rows: input_embeddings(model, *rows)[0], ids, latents.to(ids.device))
    return {"inputs_embeds": embeddings[None]}


def by_row(function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """Return the function of the rows; on a CPU of each row alone.

    How a CPU rounds a product depends on the number of rows, and a seed must give the same latents in any batch.
    """
    if rows[0].is_cuda:
        return function(*rows)
    return torch.cat([function(*row) for row in zip(*(torch.split(each, 1) for each in rows), strict=True)])


def next_latents(model: Any, requests: Sequence[Request], logits: Tensor) -> dict[Request, Latent]:
    """Return the latents of the tokens that are sampled from these logits, for requests that are thinking."""
    by_params: dict[LatentParams, list[int]] = {}
    for row, request in enumerate(requests):
        if request.is_thinking and request.params.latents is not None:
            by_params.setdefault(request.params.latents, []).append(row)
    latents: dict[Request, Latent] = {}
    for params, rows in by_params.items():
        own, embeddings = [requests[row] for row in rows], model.get_input_embeddings().weight
        h = by_row(partial(expected_embeddings, embeddings=embeddings, params=params), logits[rows])
        values, logprobs = h.half(), [None] * len(own)
        if params.kind == "soft":
            sigma = noise_scale(embeddings, params)
            noise = torch.from_numpy(np.stack([request.noise() for request in own])).to(h.device)
            values = (h + sigma * noise).half()
            logprobs = gaussian_logprobs(values, h, sigma).tolist()
        pairs = zip(values.cpu().numpy(), logprobs, strict=True)
        latents |= {request: Latent(*pair) for request, pair in zip(own, pairs, strict=True)}
    return latents


def top_alternatives(requests: Sequence[Request], logits: Tensor) -> dict[Request, TopLogprobs]:
    """Return the most likely tokens for each request with `logprobs`."""
    rows = [row for row, request in enumerate(requests) if request.params.logprobs]
    if not rows:
        return {}
    counts = [requests[row].params.logprobs or 0 for row in rows]
    logprobs = scaled_logprobs(logits[rows], [requests[row].params.temperature for row in rows])
    return {requests[row]: pairs for row, pairs in zip(rows, top_tokens(logprobs, counts), strict=True)}
