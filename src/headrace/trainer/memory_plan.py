"""Memory plan of a training step: which activations are kept and which are recomputed, so that it fits the GPU.

Computed from the sizes in the model's config alone: the same sizes give the same plan. Activations that save most time
per byte are kept first: attention (28 us of a layer's time per MiB, measured on an H200 with 16k tokens of Qwen3-0.6B),
then matrix products (1.7), the logits of all tokens (1.5), and last cheap operations (.7). A plan has at most two kinds
of layers, since each kind is compiled separately; the last layers keep more: their activations are freed before those
of the first layers are recomputed. Layers keep a token's outputs once for each expert that it takes, for the gradient
of the router's gates, and its inputs if the experts learn. Left out on purpose: offload.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from headrace.inference.model_shape import LayerSizes

Checkpointing = Literal["full", "attention", "selective"]
"""What is recomputed: all of a layer, all but attention, or all but attention and matrix products."""
RecomputeMode = Checkpointing | Literal[False]

MODES: tuple[RecomputeMode, ...] = ("full", "attention", "selective", False)
"""From recomputing everything to recomputing nothing."""
MAX_ROW_TOKENS = 16384
"""Tokens of a row beyond which a GPU does not get faster."""
USED_SHARE_OF_FREE = 0.95
"""Share of a GPU's free memory that a plan may use; the rest is for fragmentation."""
GIB = 1 << 30
RESERVED_BYTES = GIB // 2
"""Memory of libraries."""

_DESCRIPTIONS = {
    "full": "recompute everything",
    "attention": "recompute all but attention",
    "selective": "recompute all but attention and matrix products",
    False: "recompute nothing",
}


@dataclass(frozen=True)
class ModelSizes(LayerSizes):
    """Sizes of a decoder, and of its number formats."""

    compute_bytes: int = 2
    residual_bytes: int = 4
    """The residual stream is float32, like the parameters."""
    is_compiled: bool = True
    """Without fusion, about twice as much is kept."""
    experts_learn: bool = True
    """False: experts are frozen, and so is everything after the attention of a layer."""

    def kept_bytes(self) -> dict[RecomputeMode, int]:
        """Return by mode the bytes per token that a layer keeps for the backward pass."""
        wide, narrow = self.residual_bytes, self.compute_bytes
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        projections, feed_forward = queries + 2 * keys, 2 * self.intermediate_size
        full = wide * self.hidden_size
        attention = full + narrow * queries + 4 * self.num_attention_heads
        selective = attention + narrow * (projections + self.hidden_size + feed_forward)
        fused = narrow * (self.hidden_size + queries + keys)  # norms, rotation
        if self.experts_learn:  # the gradients of frozen ones need neither their inputs nor the stream, which is a sum
            fused += narrow * self.intermediate_size + wide * self.hidden_size
        everything = (selective + fused) * (1 if self.is_compiled else 2)
        outputs = narrow * self.hidden_size * self.experts_per_token  # of all experts of a token
        # In the order of tokens; and if experts learn, in the order of experts, and inputs in that order.
        everything += outputs * (3 if self.experts_learn else 1)
        return {"full": full, "attention": attention, "selective": selective + outputs, False: everything}


@dataclass(frozen=True)
class MemoryPlan:
    """The recompute mode of each layer, first layer first."""

    modes: tuple[RecomputeMode, ...]
    keeps_logits: bool
    row_tokens: int
    """The maximum tokens of a row."""
    bytes: int
    """Estimated peak memory of a step, parameters included."""

    def __str__(self) -> str:
        parts = [f"{self.modes.count(mode)} {_DESCRIPTIONS[mode]}" for mode in MODES if mode in self.modes]
        logits = ", logits are kept" if self.keeps_logits else ""
        size = f"about {self.bytes / GIB:.1f} GiB for rows of {self.row_tokens} tokens"
        return f"{len(self.modes)} layers: {' and '.join(parts)}{logits}; {size}"


def make_memory_plan(
    sizes: ModelSizes,
    limit: int,
    *,
    state: int,
    chunk: int,
    longest: int,
    mode: RecomputeMode | Literal["auto"] = "auto",
    head_learns: bool = True,
) -> MemoryPlan:
    """Return the fastest plan within `limit` bytes; if none fits, the smallest one, for rows of `longest` tokens.

    `state`: bytes of parameters, gradients and optimizer state. `chunk`: tokens per chunk of the lm-head, which needs
    its logits again only if `head_learns`. Rows have `MAX_ROW_TOKENS` if possible, at least `longest`.
    """
    tokens = max(longest, MAX_ROW_TOKENS)
    while True:
        # Temporary memory peaks at the end of the forward pass (lm-head) or while a layer is recomputed.
        head = sizes.compute_bytes * sizes.vocab_size * (sizes.hidden_size + min(chunk, tokens))
        layer = tokens * sizes.kept_bytes()[False]
        residual = 4 * tokens * sizes.residual_bytes * sizes.hidden_size
        fixed = state + max(head, layer) + residual + RESERVED_BYTES
        plan = _keep_most(sizes, limit - fixed, tokens, chunk if head_learns else None, mode)
        if plan.bytes + fixed <= limit or tokens == longest:
            return MemoryPlan(plan.modes, plan.keeps_logits, tokens, plan.bytes + fixed)
        tokens = max(longest, tokens // 2)


def _keep_most(
    sizes: ModelSizes, available: int, tokens: int, chunk: int | None, mode: RecomputeMode | Literal["auto"]
) -> MemoryPlan:
    """Return the plan that keeps the most in `available` bytes, without fixed costs; `chunk` None: no logits."""
    layers = sizes.num_hidden_layers
    kept = {each: tokens * size for each, size in sizes.kept_bytes().items()}
    logits = 0 if chunk is None else sizes.compute_bytes * sizes.vocab_size * max(tokens - chunk, 0)
    base: RecomputeMode = "selective" if mode == "auto" else mode
    keeps_logits = chunk is not None and layers * kept[base] + logits <= available
    if not keeps_logits:
        logits = 0
    modes = (MODES[0] if mode == "auto" else mode,) * layers
    if mode == "auto":  # two neighbouring modes, the one that keeps more for as many of the last layers as fit
        for more, less in pairwise(reversed(MODES)):
            count = min(layers, (available - logits - layers * kept[less]) // (kept[more] - kept[less]))
            if count > 0:
                modes = (less,) * (layers - count) + (more,) * count
                break
    return MemoryPlan(modes, keeps_logits, tokens, sum(kept[each] for each in modes) + logits)
