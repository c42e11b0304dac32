"""Attention over a row of packed sequences, registered as an attention function of transformers.

The row's layout names the kernel. GPU kernels read sequences back to back (`varlen_attention.py`); `sdpa` runs
everywhere and gathers them into padded blocks. Left out on purpose: dropout, and attention that is not causal.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from headrace.errors import BadInput
from headrace.trainer.packed_row import Kernel, PaddedBlocks, RowLayout
from headrace.trainer.varlen_attention import varlen_attention

NAME = "headrace_packed"
Choice = Kernel | Literal["auto"]


class UnsupportedModel(BadInput):
    """The model computes something that packed training does not support."""


class UnavailableAttention(BadInput):
    """The configured kernel does not run here."""


def available_kernel(choice: Choice, device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernel:
    """Return the configured kernel, for `auto` the fastest that runs here; raise if it does not run here."""
    if choice == "sdpa":
        return choice
    choices: list[Kernel] = ["cudnn", "flash"] if choice == "auto" else [choice]
    obstacles = [_obstacle(kernel, device, dtype, head_dim) for kernel in choices]
    if None in obstacles:
        return choices[obstacles.index(None)]
    if choice == "auto":
        return "sdpa"
    raise UnavailableAttention(
        f"needs a GPU of compute capability 8.0 or newer and bfloat16, but {obstacles[0]}",
        key="trainer.attention",
        value=choice,
        fix='Set it to "auto".',
    )


def _obstacle(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    if device.type != "cuda":
        return f"this trainer runs on {device.type}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"this trainer computes in {str(dtype).removeprefix('torch.')}"
    if head_dim % 8 or head_dim > 256:
        return f"this model's heads have {head_dim} dimensions, not a multiple of 8 up to 256"
    states = torch.empty(1, 1, 128, head_dim, dtype=dtype, device=device, requires_grad=True)
    parameters = torch.backends.cuda.SDPAParams(states, states, states, None, 0.0, True, False)
    if kernel == "cudnn" and not torch.backends.cuda.can_use_cudnn_attention(parameters):
        return f"cuDNN does not train heads of {head_dim} dimensions here"
    return None


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    layout: RowLayout | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within packed sequences: [1, heads, tokens, dim] in, [1, tokens, heads, dim] out."""
    name = type(module).__name__
    if layout is None:
        raise UnsupportedModel(
            "does not pass `layout` on to its attention, so it cannot be packed", key="model", value=name
        )
    if not getattr(module, "is_causal", True):
        raise UnsupportedModel("its attention is not causal, which packed attention needs", key="model", value=name)
    for option in ("softcap", "s_aux", "position_bias"):
        if options.get(option) is not None:
            raise UnsupportedModel(
                f"uses {option!r} in its attention, which packed attention does not compute", key="model", value=name
            )
    window = sliding_window or getattr(module, "sliding_window", None)
    # Norms and rotary embeddings may return float32; values come directly from a matrix product.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if isinstance(layout.sequences, PaddedBlocks):
        if window is not None and window >= layout.longest:
            window = None
        return _in_blocks(query, key, value, layout.sequences, scaling, window), None
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    cudnn = layout.kernel == "cudnn"
    return varlen_attention(q, k, v, layout.sequences, cudnn=cudnn, scaling=scaling, window=window)[None], None


AttentionInterface.register(NAME, packed_attention)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _in_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: PaddedBlocks,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Attend in padded blocks. Not compiled: every number of blocks would be another program."""
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    if q.is_cuda:  # of its kernels only flash has grouped-query attention, but neither masks nor float32
        k, v = (states.repeat_interleave(q.shape[1] // states.shape[1], 1) for states in (k, v))
    outputs: list[torch.Tensor] = []
    for block, visible in zip(blocks.blocks, blocks.visible(window), strict=True):
        output = F.scaled_dot_product_attention(
            _gather(q, block.queries).transpose(1, 2),
            _gather(k, block.keys).transpose(1, 2),
            _gather(v, block.keys).transpose(1, 2),
            attn_mask=visible,
            is_causal=visible is None,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined.index_select(0, blocks.outputs)[None]


def _gather(states: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Select [tokens, heads, dim] by indices of any shape: [*shape, heads, dim]."""
    heads, dim = states.shape[1:]
    # As rows of heads * dim: selecting and its gradient then move whole rows.
    rows = states.reshape(-1, heads * dim).index_select(0, indices.flatten())
    return rows.view(*indices.shape, heads, dim)
