"""What a training step keeps in memory, and what it computes again, so that it fits a GPU and is as fast as can be.

Arithmetic alone, from sizes that the model's configuration has: the same sizes give the same plan. What pays most for
the memory it takes is kept first: attention (28 us of a layer's time for each MiB, measured on an H200 with 16k tokens
of Qwen3-0.6B), then matrix products (1.7), the logits of all tokens (1.5), and last what is cheap to compute (.7). At
most two kinds of layers come of it, since each kind is compiled by itself; those that keep more are the last ones: they
are done with when the first are computed again. Left out on purpose: the sizes of layers with experts, which are taken
for dense ones of their own width, and offload.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from headrace.trainer.memory import Checkpointing

Mode = Checkpointing | Literal[False]

LADDER: tuple[Mode, ...] = ("full", "attention", "selective", False)
"""From what keeps the least to what keeps everything."""
MOST_TOKENS = 16384
"""Of a row: with more a GPU gets no faster."""
GIB = 1 << 30
RESERVE = GIB // 2
"""For what the libraries take for themselves."""

_WORDS = {
    "full": "recompute everything",
    "attention": "recompute all but attention",
    "selective": "recompute all but attention and matrix products",
    False: "recompute nothing",
}


@dataclass(frozen=True)
class Sizes:
    """Of a decoder, under the names of its configuration, and of what it computes in."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    compute_bytes: int = 2
    residual_bytes: int = 4
    """The stream between the layers is float32, as the parameters are."""
    is_compiled: bool = True
    """What is not fused keeps twice as much."""

    def kept(self) -> dict[Mode, int]:
        """Bytes that a layer keeps of each token until the backward pass."""
        wide, narrow = self.residual_bytes, self.compute_bytes
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        projections, feed_forward = queries + 2 * keys, 2 * self.intermediate_size
        full = wide * self.hidden_size
        attention = full + narrow * queries + 4 * self.num_attention_heads
        selective = attention + narrow * (projections + self.hidden_size + feed_forward)
        fused = narrow * (self.hidden_size + queries + keys + self.intermediate_size)  # norms, rotation, activation
        everything = selective + fused + wide * self.hidden_size
        return {
            "full": full,
            "attention": attention,
            "selective": selective,
            False: everything if self.is_compiled else 2 * everything,
        }


@dataclass(frozen=True)
class Plan:
    """How much of each layer is computed again, first layer first."""

    modes: tuple[Mode, ...]
    keeps_logits: bool
    row_tokens: int
    """What it was made for: the most tokens of a row."""
    bytes: int
    """About what the step takes at its peak, parameters and all."""

    def __str__(self) -> str:
        parts = [f"{self.modes.count(mode)} {_WORDS[mode]}" for mode in LADDER if mode in self.modes]
        logits = ", logits are kept" if self.keeps_logits else ""
        size = f"about {self.bytes / GIB:.1f} GiB for rows of {self.row_tokens} tokens"
        return f"{len(self.modes)} layers: {' and '.join(parts)}{logits}; {size}"


def make_plan(
    sizes: Sizes,
    limit: int,
    *,
    state: int,
    chunk: int,
    longest: int,
    most: int = MOST_TOKENS,
    mode: Mode | Literal["auto"] = "auto",
    head_learns: bool = True,
) -> Plan:
    """The fastest plan within `limit` bytes; one for rows of `longest` tokens, as small as it gets, where none fits.

    `state` is what stays from step to step, with gradients: bytes. `chunk` is the head's, which needs its logits again
    only if it learns. Rows hold `most` tokens if they can, and at least one sequence of `longest`.
    """
    tokens = max(longest, most)
    while True:
        fixed = state + _passing(sizes, tokens, chunk)
        kept = {each: tokens * size for each, size in sizes.kept().items()}
        logits = sizes.compute_bytes * sizes.vocab_size * max(tokens - chunk, 0) if head_learns else None
        plan = _fastest(sizes.num_hidden_layers, limit - fixed, kept, tokens, logits, mode)
        if plan.bytes + fixed <= limit or tokens == longest:
            return Plan(plan.modes, plan.keeps_logits, tokens, plan.bytes + fixed)
        tokens = max(longest, tokens // 2)


def _passing(sizes: Sizes, tokens: int, chunk: int) -> int:
    """What exists besides at the worst moment: at the end of the forward pass, or in a layer that is computed again."""
    table = sizes.compute_bytes * sizes.vocab_size
    head = table * (sizes.hidden_size + min(chunk, tokens))
    layer = tokens * sizes.kept()[False]
    between = 4 * tokens * sizes.residual_bytes * sizes.hidden_size
    return max(head, layer) + between + RESERVE


def _fastest(
    layers: int, room: int, kept: Mapping[Mode, int], tokens: int, logits: int | None, mode: Mode | Literal["auto"]
) -> Plan:
    """For what the layers and the logits may keep; None: there is no use in keeping logits."""
    base: Mode = "selective" if mode == "auto" else mode
    keeps_logits = logits is not None and layers * kept[base] + logits <= room
    extra = logits if keeps_logits and logits is not None else 0
    modes = _mixed(layers, kept, room - extra) if mode == "auto" else (mode,) * layers
    return Plan(modes, keeps_logits, tokens, sum(kept[each] for each in modes) + extra)


def _mixed(layers: int, kept: Mapping[Mode, int], room: int) -> tuple[Mode, ...]:
    """Two neighbours of the ladder, the lighter one for as many of the last layers as fit."""
    for more, less in pairwise(reversed(LADDER)):
        lighter = min(layers, (room - layers * kept[less]) // (kept[more] - kept[less]))
        if lighter > 0:
            return (less,) * (layers - lighter) + (more,) * lighter
    return (LADDER[0],) * layers
