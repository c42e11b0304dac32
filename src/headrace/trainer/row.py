"""Sequences as one row of tokens in which every distinct prefix exists once.

Under causal attention a token's hidden state depends on its prefix alone, so the rollouts of a group need their prompt
computed only once; gradients of those who share it add up by themselves. On a group of eight short answers this saves
two thirds of the work, and it costs nothing where nothing is shared.

Attention alone needs whole sequences. A `Block` says which places of the row to gather for it. Most blocks are whole
sequences under a plain causal mask; a sequence that shares more than half of its tokens asks with the rest only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Block:
    """Sequences of similar size, padded on the right to one. `visible` is None for a plain causal mask."""

    queries: torch.Tensor
    """[sequences, queries]: places in the row."""
    keys: torch.Tensor
    """[sequences, keys]: places in the row."""
    visible: torch.Tensor | None
    """[sequences, 1, queries, keys]: which keys a query sees."""


@dataclass(frozen=True)
class Layout:
    """How attention reads the row and writes back to it."""

    blocks: list[Block]
    outputs: torch.Tensor
    """For each place of the row, which of the blocks' queries, counted through, answers for it."""
    longest: int


@dataclass(frozen=True)
class Row:
    token_ids: torch.Tensor
    position_ids: torch.Tensor
    layout: Layout
    places: list[np.ndarray]
    """For each sequence, where its tokens are in the row."""


@dataclass(frozen=True)
class _Span:
    """A sequence in the row; its first `shared` tokens belong to an earlier one."""

    places: np.ndarray
    shared: int

    @property
    def length(self) -> int:
        return len(self.places)

    @property
    def own(self) -> int:
        return len(self.places) - self.shared


def make_row(sequences: list[np.ndarray], device: torch.device) -> Row:
    """Lay sequences out in lexicographic order, so that each shares what it can with the one before."""
    order = sorted(range(len(sequences)), key=lambda index: sequences[index].astype(">u4").tobytes())
    spans: list[_Span] = []
    tokens: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    size, previous, above = 0, np.zeros(0, np.int64), np.zeros(0, np.int64)
    for index in order:
        sequence = sequences[index]
        shared = _common_prefix(previous, sequence)
        own = len(sequence) - shared
        above = np.concatenate([above[:shared], np.arange(size, size + own)])
        spans.append(_Span(above, shared))
        tokens.append(sequence[shared:])
        positions.append(np.arange(shared, len(sequence)))
        size, previous = size + own, sequence
    places = [span.places for _, span in sorted(zip(order, spans, strict=True), key=lambda pair: pair[0])]
    return Row(
        torch.from_numpy(np.concatenate(tokens).astype(np.int64))[None].to(device),
        torch.from_numpy(np.concatenate(positions))[None].to(device),
        _layout(spans, size, device),
        places,
    )


def _common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length


def _layout(spans: list[_Span], size: int, device: torch.device) -> Layout:
    def on_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    asking = [span for span in spans if span.own]
    whole = [span for span in asking if 2 * span.own > span.length]
    tails = [span for span in asking if 2 * span.own <= span.length]
    outputs = np.zeros(size, np.int64)
    blocks: list[Block] = []
    counted = 0
    for similar in _similar(whole, lambda span: span.length):
        keys = _padded([span.places for span in similar])
        _answer(outputs, similar, counted, keys.shape[1], [span.shared for span in similar])
        counted += keys.size
        index = on_device(keys)
        blocks.append(Block(index, index, None))
    for similar in (b for a in _similar(tails, lambda span: span.length) for b in _similar(a, lambda span: span.own)):
        keys = _padded([span.places for span in similar])
        queries = _padded([span.places[span.shared :] for span in similar])
        _answer(outputs, similar, counted, queries.shape[1], [0] * len(similar))
        counted += queries.size
        position = np.array([span.shared for span in similar])[:, None] + np.arange(queries.shape[1])
        visible = np.arange(keys.shape[1]) <= position[:, None, :, None]
        blocks.append(Block(on_device(queries), on_device(keys), on_device(visible)))
    return Layout(blocks, on_device(outputs), max((span.length for span in spans), default=0))


def _answer(outputs: np.ndarray, spans: list[_Span], start: int, width: int, skipped: list[int]) -> None:
    """Note for each span's own places which query, of those from `start` on, gives their output."""
    for line, (span, skip) in enumerate(zip(spans, skipped, strict=True)):
        first = start + line * width + skip
        outputs[span.places[span.shared :]] = np.arange(first, first + span.own)


def _similar(spans: list[_Span], size: Callable[[_Span], int]) -> Iterator[list[_Span]]:
    """Runs of spans, largest first, in which none is smaller than half of the first: padding stays bounded."""
    bucket: list[_Span] = []
    for span in sorted(spans, key=size, reverse=True):
        if bucket and 2 * size(span) < size(bucket[0]):
            yield bucket
            bucket = []
        bucket.append(span)
    if bucket:
        yield bucket


def _padded(places: list[np.ndarray]) -> np.ndarray:
    """One line each; the padding points at place 0, which causality hides and nobody reads."""
    lines = np.zeros((len(places), max(len(line) for line in places)), np.int64)
    for index, line in enumerate(places):
        lines[index, : len(line)] = line
    return lines
