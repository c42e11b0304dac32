"""Attention over a row of packed sequences, registered as an attention function of transformers.

The row's layout names the kernel. `sdpa` runs everywhere and gathers sequences into padded blocks. GPU kernels read
sequences back to back through one custom operator, which decides when it runs whether a row has one sequence, several,
or several with a shared prefix: a compiler would otherwise make a program for each case. cuDNN, which is the fastest,
computes a single sequence, flash attention everything else. Neither supports capped scores, sinks, or values of another
size than keys: such models use `sdpa`. Keys and values of shared prefixes are gathered for each sequence, and gathered
again in the backward pass. Left out on purpose: dropout, and attention that is not causal.
"""

from __future__ import annotations

from functools import partial
from types import EllipsisType
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from headrace.errors import BadInput
from headrace.trainer.packed_row import Kernel, PaddedBlocks, RowLayout, VarlenSequences

_aten = torch.ops.aten
PACKED_ATTENTION = "headrace_packed"
KernelSetting = Kernel | Literal["auto"]
SINKS = ".sinks"
"""The name that transformers gives the attention sinks of a layer."""
LINEAR = "linear_attn"
"""The name that transformers gives layers with linear attention."""


class UnsupportedModel(BadInput):
    """The model computes something that packed training does not support."""


class UnavailableAttention(BadInput):
    """The configured attention kernel does not run on this device."""


def available_kernel(
    choice: KernelSetting, device: torch.device, dtype: torch.dtype, head_dim: int, special: str | None = None
) -> Kernel:
    """Return the configured kernel, for `auto` the fastest that runs on this device; raise if it does not run there.

    `special` is the result of `special_attention`.
    """
    if choice == "sdpa":
        return choice
    choices: list[Kernel] = ["cudnn", "flash"] if choice == "auto" else [choice]
    obstacles = [special or _obstacle(kernel, device, dtype, head_dim) for kernel in choices]
    if None in obstacles:
        return choices[obstacles.index(None)]
    if choice == "auto":
        return "sdpa"
    fact = f"needs a GPU of compute capability 8.0 or newer and bfloat16, but {obstacles[0]}"
    raise UnavailableAttention(fact, key="trainer.attention", value=choice, fix='Set it to "auto".')


def special_attention(model: Any) -> str | None:
    """Describe what only `sdpa` can compute of a model's attention; None if every kernel can compute it."""
    config = model.config
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "this model caps its attention scores"
    if any(name.endswith(SINKS) for name, _ in model.named_parameters()):
        return "this model has attention sinks"
    if getattr(config, "v_head_dim", None) not in (None, head_size(config)):
        return "this model's keys and values have different sizes"
    return None


def _obstacle(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Describe why a kernel does not run on a device; None if it does."""
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


def head_size(config: Any) -> int:
    """Return the number of dimensions of a query head; the largest, if layers differ."""
    names = ("qk_head_dim", "head_dim", "global_head_dim")
    sizes = [size for name in names if (size := getattr(config, name, None))]
    return int(max(sizes) if sizes else config.hidden_size // config.num_attention_heads)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | EllipsisType | None = ...,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    layout: RowLayout | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend within packed sequences: [1, heads, tokens, dim] in, [1, tokens, heads, dim] out."""
    name = type(module).__name__
    if layout is None:
        raise UnsupportedModel(
            "does not pass `layout` on to its attention, so it cannot be packed", key="model", value=name
        )
    if not getattr(module, "is_causal", True):
        raise UnsupportedModel("its attention is not causal, which packed attention needs", key="model", value=name)
    if options.get("position_bias") is not None:
        fact = "uses 'position_bias' in its attention, which packed attention does not compute"
        raise UnsupportedModel(fact, key="model", value=name)
    window: int | None = getattr(module, "sliding_window", None) if sliding_window is ... else sliding_window
    # Norms and rotary embeddings may return float32; values come directly from a matrix product.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if isinstance(layout.sequences, PaddedBlocks):
        if window is not None and window >= layout.longest:
            window = None
        return _attend_in_blocks(query, key, value, layout.sequences, scaling, window, softcap, s_aux), None
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    varlen, scaling = layout.sequences, q.shape[-1] ** -0.5 if scaling is None else scaling
    starts_and_lengths = (varlen.query_starts, varlen.key_starts, varlen.longest_query, varlen.longest_key)
    output, _ = _attend(q, k, v, varlen.keys, *starts_and_lengths, layout.kernel == "cudnn", scaling, window)
    return output[None], None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_in_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: PaddedBlocks,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend in padded blocks. Not compiled: every number of blocks would be compiled separately."""
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    plain = softcap is None and sinks is None
    if q.is_cuda or not plain:  # of CUDA's kernels only flash has grouped-query attention, without masks and float32
        k, v = (states.repeat_interleave(q.shape[1] // states.shape[1], 1) for states in (k, v))
    outputs: list[Tensor] = []
    for block, visible in zip(blocks.blocks, blocks.visible(window), strict=True):
        queries, keys, values = (
            _gather(each, places).transpose(1, 2)
            for each, places in ((q, block.queries), (k, block.keys), (v, block.keys))
        )
        if plain:
            options: dict[str, Any] = {"scale": scaling, "enable_gqa": q.shape[1] != k.shape[1]}
            causal = visible is None
            output = F.scaled_dot_product_attention(queries, keys, values, visible, is_causal=causal, **options)
        else:
            output = _softmax_attention(queries, keys, values, visible, scaling, softcap, sinks)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined.index_select(0, blocks.outputs)[None]


def _softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend with capped scores, or with a sink per head: a further score in the softmax that has no value."""
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if visible is None:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = torch.softmax(scores, -1, dtype=torch.float32)[..., : key.shape[2]]
    return weights.to(value.dtype) @ value


def _gather(states: Tensor, indices: Tensor) -> Tensor:
    """Select [tokens, heads, dim] by indices of any shape: [*shape, heads, dim]."""
    heads, dim = states.shape[1:]
    # As rows of heads * dim: selecting and its gradient then move whole rows.
    rows = states.reshape(-1, heads * dim).index_select(0, indices.flatten())
    return rows.view(*indices.shape, heads, dim)


_ARGUMENTS_SCHEMA = (
    "Tensor keys, Tensor query_starts, Tensor key_starts, SymInt longest_query, SymInt longest_key, "
    "bool cudnn, float scaling, SymInt? window"
)


class _Arguments(NamedTuple):
    """The last arguments of the operators, in order."""

    keys: Tensor
    query_starts: Tensor
    key_starts: Tensor
    longest_query: int
    longest_key: int
    cudnn: bool
    scaling: float
    window: int | None

    @property
    def starts_and_lengths(self) -> tuple[Tensor, Tensor, int, int]:
        return self.query_starts, self.key_starts, self.longest_query, self.longest_key

    @property
    def effective_window(self) -> int | None:
        """The sliding window if any sequence is longer."""
        return None if self.window is not None and self.window >= self.longest_key else self.window

    @property
    def uses_cudnn(self) -> bool:
        return self.cudnn and len(self.query_starts) == 2 and self.effective_window is None

    def is_shared(self, query: Tensor) -> bool:
        """Whether sequences share tokens; otherwise keys are the tokens of the row in order."""
        return len(self.keys) > len(query)


@torch.library.custom_op(
    "headrace::attend",
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, {_ARGUMENTS_SCHEMA}) -> (Tensor, Tensor)",
)
def _attend(query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the output and the logsumexp of the scores, [heads, tokens]."""
    row = _Arguments(*arguments)
    if row.uses_cudnn:
        return _cudnn_forward(query, key, value, row.scaling)
    if row.is_shared(query):
        key, value = _gather(key, row.keys), _gather(value, row.keys)
    return _flash_forward(query, key, value, row)


@_attend.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    places, heads, _dim = query.shape
    return torch.empty_like(query, memory_format=torch.contiguous_format), query.new_empty(
        (heads, places), dtype=torch.float32
    )


@torch.library.custom_op(
    "headrace::attend_backward",
    mutates_args=(),
    schema="(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor output, Tensor logsumexp, "
    f"{_ARGUMENTS_SCHEMA}) -> (Tensor, Tensor, Tensor)",
)
def _attend_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    row, places = _Arguments(*arguments), len(key)
    if row.uses_cudnn:
        return _cudnn_backward(gradient, query, key, value, output, logsumexp, row.scaling)
    if row.is_shared(query):
        key, value = _gather(key, row.keys), _gather(value, row.keys)
    of_query, of_key, of_value = _flash_backward(gradient, query, key, value, output, logsumexp, row)
    if row.is_shared(query):
        of_key, of_value = _scatter_add(of_key, row.keys, places), _scatter_add(of_value, row.keys, places)
    return of_query, of_key, of_value


@_attend_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(states, memory_format=torch.contiguous_format) for states in (query, key, value))


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, longest_query, longest_key, cudnn, scaling, window = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.rest = longest_query, longest_key, cudnn, scaling, window


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, *layout, output, logsumexp = ctx.saved_tensors
    gradients = _attend_backward(gradient, query, key, value, output, logsumexp, *layout, *ctx.rest)
    return *gradients, *([None] * (len(layout) + len(ctx.rest)))


_attend.register_autograd(_backward, setup_context=_save_for_backward)


def _scatter_add(gradient: Tensor, indices: Tensor, size: int) -> Tensor:
    """Sum the gradients of gathered tokens: [size, heads, dim]."""
    total = gradient.new_zeros(size, gradient.shape[1] * gradient.shape[2])
    return total.index_add_(0, indices, gradient.reshape(len(gradient), -1)).view(size, *gradient.shape[1:])


def _flash_forward(query: Tensor, key: Tensor, value: Tensor, row: _Arguments) -> tuple[Tensor, Tensor]:
    output, logsumexp, *_ = _aten._flash_attention_forward(
        *(query, key, value, *row.starts_and_lengths, 0.0, row.effective_window is None, False),
        **_scale_and_window(row),
    )
    return output, logsumexp


def _flash_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor, row: _Arguments
) -> tuple[Tensor, Tensor, Tensor]:
    return _aten._flash_attention_backward(  # type: ignore[no-any-return]
        *(gradient, query, key, value, output, logsumexp, *row.starts_and_lengths),
        *(0.0, row.effective_window is None, *_no_rng_state(query, torch.uint64)),
        **_scale_and_window(row),
    )


def _scale_and_window(row: _Arguments) -> dict[str, float]:
    """Return scale and window. Queries are the last tokens of each sequence: the kernel aligns the ends."""
    back = -1 if row.effective_window is None else row.effective_window - 1
    return {"scale": row.scaling, "window_size_left": back, "window_size_right": 0}


def _cudnn_forward(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    output, logsumexp, *_ = _aten._scaled_dot_product_cudnn_attention(
        *map(_as_batch, (query, key, value)), None, True, 0.0, True, False, scale=scaling
    )
    return _from_batch(output), logsumexp.view(logsumexp.shape[1:3])


def _cudnn_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = _aten._scaled_dot_product_cudnn_attention_backward(
        *map(_as_batch, (gradient, query, key, value, output)),
        logsumexp[None, :, :, None],
        *_no_rng_state(query, torch.int64),
        *(None, None, None, len(query), len(key), 0.0, True),
        scale=scaling,
    )
    of_query, of_key, of_value = map(_from_batch, gradients)
    return of_query, of_key, of_value


def _as_batch(states: Tensor) -> Tensor:
    """Return [tokens, heads, dim] as [1, heads, tokens, dim], cuDNN's layout."""
    return states.transpose(0, 1)[None]


def _from_batch(states: Tensor) -> Tensor:
    return states[0].transpose(0, 1).contiguous()


def _no_rng_state(states: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return empty RNG state arguments: there is no dropout."""
    return states.new_zeros(2, dtype=dtype), states.new_zeros(0, dtype=dtype)


def separate_sequences(model: Any) -> None:
    """Make the linear attention of a model read packed rows sequence by sequence; other inputs work as before.

    Such a layer has a state that runs over its input, so it gets one sequence per batch row, and computes a shared
    prefix once for each sequence. Padding is on the right, where a causal layer does not see it.
    """
    for name, layer in model.named_modules():
        if name.endswith(f".{LINEAR}"):
            layer.forward = partial(_linear_attention, layer.forward)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _linear_attention(plain: Any, hidden_states: Tensor, layout: RowLayout | None = None, **options: Any) -> Tensor:
    """Call the layer's `plain` forward with one sequence of the row per batch row; return the row's outputs."""
    if layout is None:
        return plain(hidden_states=hidden_states, **options)  # type: ignore[no-any-return]
    tokens, sequences = hidden_states[0], layout.sequences
    if isinstance(sequences, PaddedBlocks):
        outputs = []
        for block in sequences.blocks:
            rows = torch.arange(len(block.keys), device=tokens.device)[:, None]
            outputs.append(plain(hidden_states=tokens[block.keys])[rows, block.query_positions])
        return torch.cat([output.flatten(0, 1) for output in outputs]).index_select(0, sequences.outputs)[None]
    places, queries = _padded_sequences(sequences)
    return plain(hidden_states=tokens[places]).flatten(0, 1).index_select(0, queries)[None]  # type: ignore[no-any-return]


def _padded_sequences(runs: VarlenSequences) -> tuple[Tensor, Tensor]:
    """Return the row indices of each sequence's tokens, [sequences, longest], and the row's queries in them."""
    starts, ends = runs.key_starts[:-1, None].long(), runs.key_starts[1:, None].long()
    places = (starts + torch.arange(runs.longest_key, device=starts.device)).clamp(max=ends - 1)
    query = torch.arange(int(runs.query_starts[-1]), device=starts.device)
    sequence = torch.searchsorted(runs.query_starts[1:].long(), query, right=True)
    left = runs.query_starts[1:].long()[sequence] - query  # tokens up to the end of the sequence
    return runs.keys[places], sequence * runs.longest_key + (ends - starts)[sequence, 0] - left
