"""What a step's plan comes to: forwards of the model, the scores of prompts, and the next token of each request.

How that is computed depends on the device and is chosen once. Here is the way that works anywhere, one forward for all
tokens, which is what CPUs use; `cuda` has the one for GPUs. What a token means for its request is the engine's matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from headrace.inference.backend import TopLogprobs
from headrace.inference.embedded.adapters import Adapters
from headrace.inference.embedded.batch import make_batch
from headrace.inference.embedded.blocks import BLOCK
from headrace.inference.embedded.cpu.layers import fuse_layers
from headrace.inference.embedded.kv_cache import ATTENTION, KVCache
from headrace.inference.embedded.request import Request
from headrace.inference.embedded.sampling import likeliest, sample, scaled_logprobs
from headrace.inference.embedded.scheduler import Chunk, Plan
from headrace.inference.embedded.window import Window


class Outcome(NamedTuple):
    """The next token of each request that has one, by place."""

    requests: Sequence[Request]
    tokens: Sequence[float]
    """Whole numbers."""
    logprobs: Sequence[float]
    """Not a number where logits were none."""
    log_masses: Sequence[float] | None
    """Of what each was chosen from; None: of everything."""
    alternatives: dict[Request, TopLogprobs]
    """Of those that asked for some."""


NOTHING = Outcome([], [], [], None, {})


class Runner(Protocol):
    """Computes plans, and has the keys and values. The model attends through it from its making on."""

    @property
    def step_tokens(self) -> int:
        """What a step should compute of prompts unless it is told."""

    @property
    def patience(self) -> int:
        """For how many steps prompts should wait for others: about as many as a step with prompts costs more."""

    def run(self, plan: Plan, unproven: list[int]) -> Outcome:
        """Carry a plan out. What `unproven` blocks hold is cleared first, and they are taken off that list."""

    @property
    def cache_bytes(self) -> int:
        """What `release` would give back."""

    def release(self) -> int:
        """Give the memory of keys and values back, and forget them; returns how many bytes that was."""

    def restore(self) -> None:
        """Take it again. Nothing can run before that."""


STEP_TOKENS = 2048
"""Of prompts, where a step's attention is padded."""


class PlainRunner:
    """One forward for all tokens of a step."""

    step_tokens = STEP_TOKENS
    patience = 0

    def __init__(self, model: Any, blocks: int, adapters: Adapters, *, fuse: bool = True) -> None:
        """`fuse`: layers run with kernels of our own where they can."""
        model.set_attn_implementation(ATTENTION)
        self._model = model
        self._device: torch.device = model.device
        self._adapters = adapters
        self.cache = KVCache(model.config.get_text_config().num_hidden_layers, blocks)
        self._one_by_one = fuse and self._device.type == "cpu" and fuse_layers(model)
        self.window = Window(2 * BLOCK * blocks) if self._device.type == "cpu" and not self._one_by_one else None

    def run(self, plan: Plan, unproven: list[int]) -> Outcome:
        chunks = plan.chunks
        seeded = any(chunk.request.params.seed is not None for chunk in chunks) and self._device.type == "cpu"
        single = len(chunks) == 1 and chunks[0].end - chunks[0].start == 1
        batch = make_batch(
            chunks,
            self._device,
            self._model.dtype,
            self.window,
            one_by_one=self._one_by_one,
            doubled=seeded and single,
        )
        rows, scored, last = rows_with_logits(batch.chunks)
        kept = rows * 2 if seeded and len(rows) == 1 else rows
        self.cache.prepare(batch, unproven)
        unproven.clear()
        self._adapters.prepare(batch.chunks, batch.ids)
        logits = self._model(
            input_ids=batch.ids[None],
            position_ids=batch.positions[None],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=torch.tensor(kept, device=self._device, dtype=torch.long),
            paged=self.cache,
        ).logits[0]
        score(scored, logits)
        copied = blocks_to_copy(plan)
        if copied:
            self.cache.copy(*zip(*copied, strict=True))
        follow(plan, last)
        return self._sample([*last], rows_of(logits, [*last.values()])) if last else NOTHING

    def _sample(self, requests: list[Request], logits: Tensor) -> Outcome:
        uniforms = [request.uniform() for request in requests]
        sampled = sample(logits, [request.params for request in requests], uniforms)
        # Token ids and float32 values are exact in float64: one copy to the host carries them all.
        columns = torch.stack([column.double() for column in sampled if column is not None]).tolist()
        log_masses = columns[2] if len(columns) > 2 else None
        return Outcome(requests, columns[0], columns[1], log_masses, alternatives(requests, logits))

    @property
    def cache_bytes(self) -> int:
        return 0  # memory that nobody writes to is not taken on a CPU, and elsewhere this one shares with nobody

    def release(self) -> int:
        return 0

    def restore(self) -> None:
        pass


def key_shapes(config: Any) -> list[tuple[int, int]]:
    """Heads of a token's keys, and their dimensions, in each layer of a model."""
    is_mixed = getattr(config, "is_heterogeneous", False)
    return [
        (
            getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads,
            getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads,
        )
        for layer in (config.per_layer_config if is_mixed else [config] * config.num_hidden_layers)
    ]


def rows_with_logits(chunks: Sequence[Chunk]) -> tuple[list[int], list[tuple[Chunk, int]], dict[Request, int]]:
    """The tokens of some chunks whose logits are needed. Among those: where each chunk begins that is scored, and where
    the last token is of each request whose tokens are all computed."""
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


def score(scored: list[tuple[Chunk, int]], logits: Tensor) -> None:
    """Give requests the logprobs of their prompts, as far as they are computed."""
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
            request.prompt_top_logprobs += likeliest(logprobs, [count] * len(targets))


def blocks_to_copy(plan: Plan) -> list[tuple[int, int]]:
    """(from, to): what is not full of a prompt that several requests have."""
    return [(first.blocks[-1], second.blocks[-1]) for first, second in plan.twins if len(second.tokens) % BLOCK]


def follow(plan: Plan, last: dict[Request, int]) -> None:
    """Requests with the same prompt as another sample from its logits."""
    for first, second in plan.twins:
        last[second] = last[first]


def rows_of(logits: Tensor, rows: list[int]) -> Tensor:
    in_order = rows == list(range(len(rows)))  # mostly, and then nothing needs to be copied
    return logits[: len(rows)] if in_order else logits[torch.tensor(rows, device=logits.device)]


def alternatives(requests: Sequence[Request], logits: Tensor) -> dict[Request, TopLogprobs]:
    """The likeliest tokens beside the chosen one, for those that asked."""
    asked = [row for row, request in enumerate(requests) if request.params.logprobs]
    if not asked:
        return {}
    counts = [requests[row].params.logprobs or 0 for row in asked]
    found = likeliest(scaled_logprobs(logits[asked], [requests[row].params.temperature for row in asked]), counts)
    return {requests[row]: pairs for row, pairs in zip(asked, found, strict=True)}
