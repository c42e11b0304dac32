"""The attention function of models on a GPU: one operator that stores what is new and attends, whatever the step is.

It is opaque to the compiler, and what it reads beside its arguments is the step that the thread is in: so a layer is
one program for prompts and newest tokens alike. The storage is among its arguments although it is changed: the compiler
is not told, since it would protect the cache by a copy.
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

ATTENTION = "headrace_paged_cuda"
"""The name under which the attention function is registered with transformers."""


class Step(Protocol):
    """What the tokens of a forward attend to."""

    slots: Tensor
    """Where in the storage the new keys and values go, by token; negative: nowhere."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        storage: tuple[Tensor, Tensor],
        *,
        scaling: float,
        window: int,
        softcap: float,
    ) -> Tensor:
        """[token, head, dimension] of all tokens, once the new keys and values are stored."""


class _Current(threading.local):
    step: Step | None = None


_current = _Current()


@contextmanager
def attending(step: Step) -> Iterator[None]:
    """Forwards in this block are of that step."""
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
    """[1, head, token, dimension] gives [1, token, head, dimension]."""
    step = _current.step
    assert step is not None
    rows = [states[0].transpose(0, 1) for states in (query, key, value)]
    q, k, v = (states if states.stride(-1) == 1 else states.contiguous() for states in rows)
    if k.shape[1:] != key_cache.shape[1:] or v.shape[1:] != value_cache.shape[1:]:
        raise ValueError(f"keys are {list(k.shape[1:])} a token, where the cache has {list(key_cache.shape[1:])}")
    q, k = q.to(v.dtype), k.to(v.dtype)  # norms and rotation may have widened them
    store(k, v, key_cache, value_cache, step.slots)
    attended = step.attend(q, k, v, (key_cache, value_cache), scaling=scaling, window=window, softcap=softcap)
    return attended.contiguous()[None]  # as the compiler was told


@_paged_attention.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    scaling: float,
    window: int,
    softcap: float,
) -> Tensor:
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
    """Attention of a whole step; the model's own mask is not used."""
    if s_aux is not None:
        raise NotImplementedError("attention sinks")
    output = torch.ops.headrace.paged_attention(
        query,
        key,
        value,
        module.paged_keys,
        module.paged_values,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window or 0,
        softcap or 0.0,
    )
    return output, None


AttentionInterface.register(ATTENTION, paged_attention)
