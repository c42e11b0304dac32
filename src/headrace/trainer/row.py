"""Sequences as one row of tokens in which every distinct prefix exists once.

Under causal attention a token's hidden state depends on its prefix alone, so the rollouts of a group need their prompt
computed only once; gradients of those who share it add up by themselves. On a group of eight short answers this saves
two thirds of the work, and it costs nothing where nothing is shared.

Attention alone needs whole sequences. `Runs` names them for kernels that read sequences back to back, `Blocks` for
kernels that read padded batches. Either is made once for a row and shared by all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

Kernel = Literal["sdpa", "cudnn", "flash"]
"""What computes attention: `sdpa` reads blocks, the others read runs, cuDNN those of one sequence alone."""
CUDNN_STEP = 512
"""A row that cuDNN reads is padded to a multiple: it takes about 0.1 s to plan for a length it has not seen."""


@dataclass(frozen=True)
class Runs:
    """Sequences back to back. Each asks with the tokens that are its own, so the queries are the row as it is."""

    keys: torch.Tensor
    """The places of all sequences, one after the other; where nothing is shared, those of the row as it is."""
    query_starts: torch.Tensor
    """Where each sequence's queries start, and where the last ends: [sequences + 1]."""
    key_starts: torch.Tensor
    longest_query: int
    longest_key: int


@dataclass(frozen=True)
class Block:
    """Sequences of similar size, padded on the right to one."""

    queries: torch.Tensor
    """[sequences, queries]: places in the row."""
    keys: torch.Tensor
    """[sequences, keys]: places in the row."""
    starts: torch.Tensor | None
    """[sequences]: the position of each sequence's first query; None: 0 for all."""

    def visible(self, window: int | None) -> torch.Tensor | None:
        """[sequences or 1, 1, queries, keys]: which keys a query sees; None is the plain causal mask."""
        if self.starts is None and window is None:
            return None
        device, last = self.keys.device, self.keys.shape[1] - 1
        starts = torch.zeros(1, dtype=torch.int64, device=device) if self.starts is None else self.starts
        # Padding asks as if from the last position: a query that sees nothing at all would turn gradients into NaN.
        positions = (starts[:, None] + torch.arange(self.queries.shape[1], device=device)).clamp(max=last)
        distance = positions[:, None, :, None] - torch.arange(last + 1, device=device)
        return distance >= 0 if window is None else (distance >= 0) & (distance < window)


class Blocks:
    """Padded batches of sequences. Most are whole sequences; one that shares more than half asks with the rest only."""

    def __init__(self, blocks: list[Block], outputs: torch.Tensor) -> None:
        self.blocks = blocks
        self.outputs = outputs
        """For each place of the row, which of the blocks' queries, counted through, answers for it."""
        self._visible: dict[int | None, list[torch.Tensor | None]] = {}

    def visible(self, window: int | None) -> list[torch.Tensor | None]:
        """The mask of each block."""
        if window not in self._visible:
            self._visible[window] = [block.visible(window) for block in self.blocks]
        return self._visible[window]


@dataclass(frozen=True)
class Layout:
    """How attention reads the row."""

    kernel: Kernel
    longest: int
    """Tokens of the longest sequence."""
    sequences: Runs | Blocks


@dataclass(frozen=True)
class Row:
    token_ids: torch.Tensor
    position_ids: torch.Tensor
    layout: Layout
    places: list[np.ndarray]
    """For each sequence, where its tokens are in the row. What is in no sequence is padding."""


@dataclass(frozen=True)
class _Span:
    """A sequence in the row that asks with all but its first `shared` tokens: an earlier one asks with those."""

    places: np.ndarray
    shared: int

    @property
    def length(self) -> int:
        return len(self.places)

    @property
    def own(self) -> int:
        return len(self.places) - self.shared


def make_row(sequences: list[np.ndarray], device: torch.device, kernel: Kernel = "sdpa") -> Row:
    """Lay sequences out in lexicographic order, so that each shares what it can with the one before."""
    places = [np.zeros(0, np.int64)] * len(sequences)
    asking: list[_Span] = []
    tokens: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    size, previous, above = 0, np.zeros(0, np.int64), np.zeros(0, np.int64)
    for index in sorted(range(len(sequences)), key=lambda index: sequences[index].astype(">u4").tobytes()):
        sequence = sequences[index]
        shared = common_prefix(previous, sequence)
        own = len(sequence) - shared
        above = np.concatenate([above[:shared], np.arange(size, size + own)])
        # A sequence that goes on where the one before ends asks for both.
        asking.append(_Span(above, asking.pop().shared if asking and shared == len(previous) else shared))
        places[index] = above
        tokens.append(sequence[shared:])
        positions.append(np.arange(shared, len(sequence)))
        size, previous = size + own, sequence
    padding = -size % CUDNN_STEP if kernel == "cudnn" and len(asking) == 1 else 0
    if padding:  # more of the one sequence, which none of it sees
        asking = [_Span(np.arange(size + padding), 0)]
        tokens.append(np.zeros(padding, np.int64))
        positions.append(np.full(padding, size - 1))
    return Row(
        on_device(np.concatenate(tokens).astype(np.int64), device)[None],
        on_device(np.concatenate(positions), device)[None],
        Layout(
            kernel,
            max(map(len, places)),
            _blocks(asking, size, device) if kernel == "sdpa" else _runs(asking, device),
        ),
        places,
    )


def on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on a GPU is queued there behind what it is doing, and not waited for."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """How many tokens two sequences begin with alike."""
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length


def _runs(spans: list[_Span], device: torch.device) -> Runs:
    def starts(lengths: list[int]) -> torch.Tensor:
        return on_device(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), device)

    # Made in the same way whether or not something is shared: a compiler takes what is one tensor for another program.
    own, lengths = [span.own for span in spans], [span.length for span in spans]
    keys = on_device(np.concatenate([span.places for span in spans]), device)
    return Runs(keys, starts(own), starts(lengths), max(own), max(lengths))


def _blocks(spans: list[_Span], size: int, device: torch.device) -> Blocks:
    whole = [span for span in spans if 2 * span.own > span.length]
    tails = [span for span in spans if 2 * span.own <= span.length]
    outputs = np.zeros(size, np.int64)
    blocks: list[Block] = []
    counted = 0
    for similar in _similar(whole, lambda span: span.length):
        keys = _padded([span.places for span in similar])
        _answer(outputs, similar, counted, keys.shape[1], [span.shared for span in similar])
        counted += keys.size
        index = on_device(keys, device)
        blocks.append(Block(index, index, None))
    for similar in (b for a in _similar(tails, lambda span: span.length) for b in _similar(a, lambda span: span.own)):
        keys = _padded([span.places for span in similar])
        queries = _padded([span.places[span.shared :] for span in similar])
        _answer(outputs, similar, counted, queries.shape[1], [0] * len(similar))
        counted += queries.size
        starts = np.array([span.shared for span in similar])
        blocks.append(Block(on_device(queries, device), on_device(keys, device), on_device(starts, device)))
    return Blocks(blocks, on_device(outputs, device))


def _answer(outputs: np.ndarray, spans: list[_Span], start: int, width: int, skipped: list[int]) -> None:
    """Note for each span's own places which query, of those from `start` on, gives their output."""
    for line, (span, skip) in enumerate(zip(spans, skipped, strict=True)):
        first = start + line * width + skip
        outputs[span.places[span.shared :]] = np.arange(first, first + span.own)


def _similar(spans: list[_Span], size: Callable[[_Span], int]) -> Iterator[list[_Span]]:
    """Runs of spans, largest first, in which none is below three quarters of the first: padding stays small."""
    bucket: list[_Span] = []
    for span in sorted(spans, key=size, reverse=True):
        if bucket and 4 * size(span) < 3 * size(bucket[0]):
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
