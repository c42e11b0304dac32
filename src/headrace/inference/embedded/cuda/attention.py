"""The attention function of models on a GPU: one operator that stores new keys and values, and attends.

It is opaque to the compiler, and reads the thread's current step besides its arguments, so that prefill and decode
share one compiled program per layer. The operator changes its storage arguments without declaring it: the compiler
would copy the cache.
"""
# No `from __future__ import annotations`: torch reads the operator's types from its annotations.

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

from headrace.inference.embedded.cuda.attention_kernels import store

KVPair = tuple[Tensor, Tensor]
"""Keys and values of one layer, [slot, head, dimension] each."""
ATTENTION = "headrace_paged_cuda"
"""Name of the attention function in transformers' registry."""


class Step(Protocol):
    """The attention of a forward's tokens."""

    slots: Tensor
    """Slot of each token's new keys and values; negative: not stored."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, cache: KVPair, *, scaling: float, window: int, softcap: float
    ) -> Tensor:
        """Return [token, head, dimension] of all tokens; their keys and values are stored already."""


class _Current(threading.local):
    step: Step | None = None


_current = _Current()


@contextmanager
def current_step(step: Step) -> Iterator[None]:
    """Set the thread's step for the forwards in the block."""
    _current.step = step
    try:
        yield
    finally:
        _current.step = None


@torch.library.custom_op("headrace::paged_attention", mutates_args=())
def _paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    scaling: float,
    window: int,
    softcap: float,
) -> Tensor:
    """Attend from [1, head, token, dimension] to [1, token, head, dimension]."""
    step = _current.step
    assert step is not None
    rows = [states[0].transpose(0, 1) for states in (query, key, value)]
    q, k, v = (states if states.stride(-1) == 1 else states.contiguous() for states in rows)
    if k.shape[1:] != key_cache.shape[1:] or v.shape[1:] != value_cache.shape[1:]:
        raise ValueError(f"keys are {list(k.shape[1:])} per token, but the cache has {list(key_cache.shape[1:])}")
    q, k = q.to(v.dtype), k.to(v.dtype)  # norms and rotary embeddings may have widened them
    store(k, v, key_cache, value_cache, step.slots)
    attended = step.attend(q, k, v, (key_cache, value_cache), scaling=scaling, window=window, softcap=softcap)
    return attended.contiguous()[None]  # as declared by register_fake


@_paged_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    batch, heads, tokens, dim = query.shape
    return value.new_empty(batch, tokens, heads, dim)


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of the current step; the model's own mask is not used."""
    if s_aux is not None:
        raise NotImplementedError("attention sinks")
    states = (query, key, value, module.paged_keys, module.paged_values)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return torch.ops.headrace.paged_attention(*states, scale, sliding_window or 0, softcap or 0.0), None


AttentionInterface.register(ATTENTION, paged_attention)
