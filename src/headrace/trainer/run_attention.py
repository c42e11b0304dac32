"""Attention over the sequences of a row that lie back to back, as one operator.

What a row is, a single sequence, several, or several that share what they begin with, is found out when the operator
runs: a compiler that saw it would make a program of each. A single sequence is read by cuDNN, which is the fastest, and
everything else by flash attention. What sequences share is gathered for each of them, in the backward pass once more.
"""

from typing import Any

import torch
from torch import Tensor

from headrace.trainer.row import Runs

_aten = torch.ops.aten


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


@torch.library.custom_op("headrace::attend", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    longest_query: int,
    longest_key: int,
    cudnn: bool,
    scaling: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """The output, and for each of its places the logarithm of what its softmax divides by: [heads, places]."""
    window = _felt(window, longest_key)
    if _is_for_cudnn(cudnn, query_starts, window):
        return _cudnn_forward(query, key, value, scaling)
    if _is_shared(keys, query):
        key, value = _gathered(key, keys), _gathered(value, keys)
    return _flash_forward(query, key, value, query_starts, key_starts, longest_query, longest_key, scaling, window)


@_attend.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    places, heads, _dim = query.shape
    return torch.empty_like(query, memory_format=torch.contiguous_format), query.new_empty(
        (heads, places), dtype=torch.float32
    )


@torch.library.custom_op("headrace::attend_backward", mutates_args=())
def _attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    keys: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    longest_query: int,
    longest_key: int,
    cudnn: bool,
    scaling: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    window = _felt(window, longest_key)
    if _is_for_cudnn(cudnn, query_starts, window):
        return _cudnn_backward(gradient, query, key, value, output, logsumexp, scaling)
    is_shared, places = _is_shared(keys, query), len(key)
    if is_shared:
        key, value = _gathered(key, keys), _gathered(value, keys)
    of_query, of_key, of_value = _flash_backward(
        *(gradient, query, key, value, output, logsumexp),
        *(query_starts, key_starts, longest_query, longest_key, scaling, window),
    )
    if is_shared:
        of_key, of_value = _added_up(of_key, keys, places), _added_up(of_value, keys, places)
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


def _felt(window: int | None, longest: int) -> int | None:
    """The window, if any sequence is longer."""
    return None if window is not None and window >= longest else window


def _is_for_cudnn(cudnn: bool, query_starts: Tensor, window: int | None) -> bool:
    return cudnn and len(query_starts) == 2 and window is None


def _is_shared(keys: Tensor, query: Tensor) -> bool:
    """Whether sequences share places: else each place is one sequence's, and all are in order."""
    return len(keys) > len(query)


def _gathered(states: Tensor, places: Tensor) -> Tensor:
    # As rows of all heads: whole rows are moved.
    return states.reshape(len(states), -1).index_select(0, places).view(-1, *states.shape[1:])


def _added_up(gradient: Tensor, places: Tensor, size: int) -> Tensor:
    """For each of `size` places what all who gathered it say."""
    total = gradient.new_zeros(size, gradient.shape[1] * gradient.shape[2])
    return total.index_add_(0, places, gradient.reshape(len(gradient), -1)).view(size, *gradient.shape[1:])


def _flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    longest_query: int,
    longest_key: int,
    scaling: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Each sequence asks with its last tokens: the kernel aligns the ends."""
    output, logsumexp, *_ = _aten._flash_attention_forward(
        *(query, key, value, query_starts, key_starts, longest_query, longest_key, 0.0, window is None, False),
        scale=scaling,
        window_size_left=-1 if window is None else window - 1,
        window_size_right=0,
    )
    return output, logsumexp


def _flash_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    longest_query: int,
    longest_key: int,
    scaling: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _aten._flash_attention_backward(  # type: ignore[no-any-return]
        *(gradient, query, key, value, output, logsumexp, query_starts, key_starts, longest_query, longest_key),
        *(0.0, window is None, *_no_random_numbers(query, torch.uint64)),
        scale=scaling,
        window_size_left=-1 if window is None else window - 1,
        window_size_right=0,
    )


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
