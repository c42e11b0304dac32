"""Variable-length attention over the sequences of a packed row, as one custom operator.

Whether a row has one sequence, several, or several with a shared prefix is decided when the operator runs: a compiler
would otherwise make a program for each case. A single sequence is computed by cuDNN, which is the fastest, everything
else by flash attention. Keys and values of shared prefixes are gathered for each sequence, again in the backward pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from headrace.trainer.packed_row import VarlenSequences

_aten = torch.ops.aten

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


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    runs: VarlenSequences,
    *,
    cudnn: bool,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Attend: [tokens, heads, dim] in and out. `cudnn`: use it for a single sequence."""
    output, _ = _attend(
        query,
        key,
        value,
        runs.keys,
        runs.query_starts,
        runs.key_starts,
        runs.longest_query,
        runs.longest_key,
        cudnn,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        window,
    )
    return output  # type: ignore[no-any-return]


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


def _gather(states: Tensor, indices: Tensor) -> Tensor:
    # As rows of all heads: moves whole rows.
    return states.reshape(len(states), -1).index_select(0, indices).view(-1, *states.shape[1:])


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
