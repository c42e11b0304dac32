"""Attention over the sequences of a row that lie back to back, as one operator.

What a row is, a single sequence, several, or several that share what they begin with, is found out when the operator
runs: a compiler that saw it would make a program of each. A single sequence is read by cuDNN, which is the fastest, and
everything else by flash attention. What sequences share is gathered for each of them, in the backward pass once more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from headrace.trainer.row import Runs

_aten = torch.ops.aten

_READING = (
    "Tensor keys, Tensor query_starts, Tensor key_starts, SymInt longest_query, SymInt longest_key, "
    "bool cudnn, float scaling, SymInt? window"
)


class _Reading(NamedTuple):
    """How a row is read: the operators' last arguments, in their order."""

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
    def felt_window(self) -> int | None:
        """The window, if any sequence is longer."""
        return None if self.window is not None and self.window >= self.longest_key else self.window

    @property
    def is_for_cudnn(self) -> bool:
        return self.cudnn and len(self.query_starts) == 2 and self.felt_window is None

    def is_shared(self, query: Tensor) -> bool:
        """Whether sequences share places: else each place is one sequence's, and all are in order."""
        return len(self.keys) > len(query)


def attention_in_runs(
    query: Tensor, key: Tensor, value: Tensor, runs: Runs, *, cudnn: bool, scaling: float | None, window: int | None
) -> Tensor:
    """[places, heads, dim] in and out. `cudnn`: whether a single sequence is for it."""
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
    schema=f"(Tensor query, Tensor key, Tensor value, {_READING}) -> (Tensor, Tensor)",
)
def _attend(query: Tensor, key: Tensor, value: Tensor, *reading: Any) -> tuple[Tensor, Tensor]:
    """The output, and for each of its places the logarithm of what its softmax divides by: [heads, places]."""
    row = _Reading(*reading)
    if row.is_for_cudnn:
        return _cudnn_forward(query, key, value, row.scaling)
    if row.is_shared(query):
        key, value = _gathered(key, row.keys), _gathered(value, row.keys)
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
    f"{_READING}) -> (Tensor, Tensor, Tensor)",
)
def _attend_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor, *reading: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    row, places = _Reading(*reading), len(key)
    if row.is_for_cudnn:
        return _cudnn_backward(gradient, query, key, value, output, logsumexp, row.scaling)
    if row.is_shared(query):
        key, value = _gathered(key, row.keys), _gathered(value, row.keys)
    of_query, of_key, of_value = _flash_backward(gradient, query, key, value, output, logsumexp, row)
    if row.is_shared(query):
        of_key, of_value = _added_up(of_key, row.keys, places), _added_up(of_value, row.keys, places)
    return of_query, of_key, of_value


@_attend_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(states, memory_format=torch.contiguous_format) for states in (query, key, value))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, longest_query, longest_key, cudnn, scaling, window = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.rest = longest_query, longest_key, cudnn, scaling, window


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, *layout, output, logsumexp = ctx.saved_tensors
    gradients = _attend_backward(gradient, query, key, value, output, logsumexp, *layout, *ctx.rest)
    return *gradients, *([None] * (len(layout) + len(ctx.rest)))


_attend.register_autograd(_differentiate, setup_context=_keep)


def _gathered(states: Tensor, places: Tensor) -> Tensor:
    # As rows of all heads: whole rows are moved.
    return states.reshape(len(states), -1).index_select(0, places).view(-1, *states.shape[1:])


def _added_up(gradient: Tensor, places: Tensor, size: int) -> Tensor:
    """For each of `size` places what all who gathered it say."""
    total = gradient.new_zeros(size, gradient.shape[1] * gradient.shape[2])
    return total.index_add_(0, places, gradient.reshape(len(gradient), -1)).view(size, *gradient.shape[1:])


def _flash_forward(query: Tensor, key: Tensor, value: Tensor, row: _Reading) -> tuple[Tensor, Tensor]:
    output, logsumexp, *_ = _aten._flash_attention_forward(
        *(query, key, value, *row.starts_and_lengths, 0.0, row.felt_window is None, False), **_scale_and_window(row)
    )
    return output, logsumexp


def _flash_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor, row: _Reading
) -> tuple[Tensor, Tensor, Tensor]:
    return _aten._flash_attention_backward(  # type: ignore[no-any-return]
        *(gradient, query, key, value, output, logsumexp, *row.starts_and_lengths),
        *(0.0, row.felt_window is None, *_no_random_numbers(query, torch.uint64)),
        **_scale_and_window(row),
    )


def _scale_and_window(row: _Reading) -> dict[str, float]:
    """Each sequence asks with its last tokens: the kernel aligns the ends."""
    back = -1 if row.felt_window is None else row.felt_window - 1
    return {"scale": row.scaling, "window_size_left": back, "window_size_right": 0}


def _cudnn_forward(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    output, logsumexp, *_ = _aten._scaled_dot_product_cudnn_attention(
        *map(_as_batch, (query, key, value)), None, True, 0.0, True, False, scale=scaling
    )
    return _as_places(output), logsumexp.view(logsumexp.shape[1:3])


def _cudnn_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = _aten._scaled_dot_product_cudnn_attention_backward(
        *map(_as_batch, (gradient, query, key, value, output)),
        logsumexp[None, :, :, None],
        *_no_random_numbers(query, torch.int64),
        *(None, None, None, len(query), len(key), 0.0, True),
        scale=scaling,
    )
    of_query, of_key, of_value = map(_as_places, gradients)
    return of_query, of_key, of_value


def _as_batch(states: Tensor) -> Tensor:
    """[places, heads, dim] as cuDNN reads it: [1, heads, places, dim]."""
    return states.transpose(0, 1)[None]


def _as_places(states: Tensor) -> Tensor:
    return states[0].transpose(0, 1).contiguous()


def _no_random_numbers(states: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What a kernel with dropout would start from."""
    return states.new_zeros(2, dtype=dtype), states.new_zeros(0, dtype=dtype)
