"""What a GPU's kernels compute for attention over runs, sequence by sequence, where there is no GPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.trainer import attention
from headrace.trainer.attention import _Arguments


def use_plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_flash_forward", flash_forward)
    monkeypatch.setattr(attention, "_flash_backward", flash_backward)
    monkeypatch.setattr(attention, "_cudnn_forward", cudnn_forward)
    monkeypatch.setattr(attention, "_cudnn_backward", cudnn_backward)


def flash_forward(query: Tensor, key: Tensor, value: Tensor, row: _Arguments) -> tuple[Tensor, Tensor]:
    outputs, sums = [], []
    for own, seen in _runs(query, key, row):
        scores = _scores(query[own], key[seen], row)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), _for_all(value[seen], query)))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outputs), torch.cat(sums, 1)


def flash_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor, row: _Arguments
) -> tuple[Tensor, Tensor, Tensor]:
    of_query, of_key, of_value = (torch.zeros_like(states) for states in (query, key, value))
    for own, seen in _runs(query, key, row):
        chances = (_scores(query[own], key[seen], row) - logsumexp[:, own, None]).exp()
        of_chances = torch.einsum("qhd,khd->hqk", gradient[own], _for_all(value[seen], query))
        inner = (gradient[own] * output[own]).sum(-1).t()[..., None]
        of_scores = row.scaling * chances * (of_chances - inner)
        of_query[own] = torch.einsum("hqk,khd->qhd", of_scores, _for_all(key[seen], query))
        of_key[seen] = _of_all(torch.einsum("hqk,qhd->khd", of_scores, query[own]), key)
        of_value[seen] = _of_all(torch.einsum("hqk,qhd->khd", chances, gradient[own]), value)
    return of_query, of_key, of_value


def cudnn_forward(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    return flash_forward(query, key, value, _whole(query, scaling))


def cudnn_backward(*tensors_and_scaling: Any) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, scaling = tensors_and_scaling
    return flash_backward(*tensors, _whole(tensors[0], scaling))


def _whole(states: Tensor, scaling: float) -> _Arguments:
    """One sequence."""
    places = len(states)
    starts = torch.tensor([0, places], dtype=torch.int32)
    return _Arguments(torch.arange(places), starts, starts, places, places, True, scaling, None)


def _runs(query: Tensor, key: Tensor, row: _Arguments) -> Iterator[tuple[slice, slice]]:
    assert row.longest_query == row.query_starts.diff().max()
    assert row.longest_key == row.key_starts.diff().max()
    assert (len(query), len(key)) == (row.query_starts[-1], row.key_starts[-1])
    for run in range(len(row.query_starts) - 1):
        own, seen = (slice(int(starts[run]), int(starts[run + 1])) for starts in (row.query_starts, row.key_starts))
        yield own, seen


def _scores(query: Tensor, key: Tensor, row: _Arguments) -> Tensor:
    """[heads, queries, keys] of one sequence, which asks with its last tokens."""
    distance = torch.arange(len(key) - len(query), len(key))[:, None] - torch.arange(len(key))
    hidden = (distance < 0) | (distance >= (row.effective_window or len(key)))
    return (row.scaling * torch.einsum("qhd,khd->hqk", query, _for_all(key, query))).masked_fill(hidden, -torch.inf)


def _for_all(states: Tensor, query: Tensor) -> Tensor:
    """Each head as often as queries ask for it."""
    return states.repeat_interleave(query.shape[1] // states.shape[1], 1)


def _of_all(gradient: Tensor, states: Tensor) -> Tensor:
    return gradient.unflatten(1, (states.shape[1], -1)).sum(2)
