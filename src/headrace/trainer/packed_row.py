"""Packed rows: sequences as one row of tokens in which every distinct prefix exists once.

Under causal attention a token's hidden state depends on its prefix alone, so the prompt of a group's rollouts is
computed once; autograd sums the gradients of the sequences that share it. On a group of eight short completions this
saves two thirds of the work, and it costs nothing if nothing is shared. Tokens with latents or routes are shared only
where these are equal, too.

Only attention needs whole sequences (the document mask). `VarlenSequences` describe them for variable-length kernels,
`PaddedBlocks` for kernels on padded batches. Either is made once per row and shared by all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from headrace.rollout.packing import join_rows
from headrace.rollout.types import LATENTS, ROUTES, no_route

Kernel = Literal["sdpa", "cudnn", "flash"]
"""The attention kernel: `sdpa` on padded blocks, the others on varlen sequences; cuDNN for a single sequence only."""
CUDNN_LENGTH_MULTIPLE = 512
"""Rows for cuDNN are padded to a multiple of this: it takes about 0.1 s to plan for a new length."""


@dataclass(frozen=True)
class VarlenSequences:
    """Sequences back to back. The queries of a sequence are its unshared tokens, so the row itself has all queries."""

    keys: torch.Tensor
    """Row indices of the tokens of all sequences, concatenated."""
    query_starts: torch.Tensor
    """Offsets of each sequence's queries (cu_seqlens): [sequences + 1]."""
    key_starts: torch.Tensor
    longest_query: int
    longest_key: int


@dataclass(frozen=True)
class PaddedBlock:
    """Sequences of similar length, padded on the right."""

    queries: torch.Tensor
    """[sequences, queries]: indices in the row."""
    keys: torch.Tensor
    """[sequences, keys]: indices in the row."""
    starts: torch.Tensor | None
    """[sequences]: the position of each sequence's first query; None if 0 for all."""

    @property
    def query_positions(self) -> torch.Tensor:
        """[sequences or 1, queries]: the position of each query in its sequence; padding has the last one."""
        device = self.keys.device
        starts = torch.zeros(1, dtype=torch.int64, device=device) if self.starts is None else self.starts
        # A padding query without any key would make gradients NaN.
        return (starts[:, None] + torch.arange(self.queries.shape[1], device=device)).clamp(max=self.keys.shape[1] - 1)

    def visible(self, window: int | None) -> torch.Tensor | None:
        """Return the attention mask [sequences or 1, 1, queries, keys]; None for the plain causal mask."""
        if self.starts is None and window is None:
            return None
        distance = self.query_positions[:, None, :, None] - torch.arange(self.keys.shape[1], device=self.keys.device)
        return distance >= 0 if window is None else (distance >= 0) & (distance < window)


class PaddedBlocks:
    """Padded blocks of whole sequences, or of the unshared ends of sequences that share more than half."""

    def __init__(self, blocks: list[PaddedBlock], outputs: torch.Tensor) -> None:
        self.blocks = blocks
        self.outputs = outputs
        """For each token of the row, the index of its query over all blocks."""
        self._visible: dict[int | None, list[torch.Tensor | None]] = {}

    def visible(self, window: int | None) -> list[torch.Tensor | None]:
        """Return the attention mask of each block."""
        if window not in self._visible:
            self._visible[window] = [block.visible(window) for block in self.blocks]
        return self._visible[window]


@dataclass(frozen=True)
class RowLayout:
    """The sequences of a row, for attention."""

    kernel: Kernel
    longest: int
    """Tokens of the longest sequence."""
    sequences: VarlenSequences | PaddedBlocks


@dataclass(frozen=True)
class PackedRow:
    """Tokens and positions [1, tokens] of packed sequences, on the device."""

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    layout: RowLayout
    places: list[np.ndarray]
    """For each sequence, the row indices of its tokens. Tokens in no sequence are padding."""
    latents: torch.Tensor | None = None
    """[tokens, hidden size] in float16: what input embeddings are blended with; None if none is."""
    routes: torch.Tensor | None = None
    """[tokens, layers * experts per token]: the recorded experts, -1 where none are; None if none are recorded."""


@dataclass(frozen=True)
class _Span:
    """A sequence of the row whose first `shared` tokens are queries of an earlier one."""

    places: np.ndarray
    shared: int

    @property
    def length(self) -> int:
        return len(self.places)

    @property
    def own(self) -> int:
        return len(self.places) - self.shared


def make_row(
    sequences: list[np.ndarray],
    device: torch.device,
    kernel: Kernel = "sdpa",
    *,
    keys: list[np.ndarray] | None = None,
    latents: list[np.ndarray] | None = None,
    routes: list[np.ndarray] | None = None,
) -> PackedRow:
    """Pack sequences in lexicographic order, so that each shares its longest prefix with the one before.

    `latents` and `routes`: rows of each sequence's tokens. With these, `keys` are the `prefix_keys` of each sequence.
    """
    keys = sequences if keys is None else keys
    places = [np.zeros(0, np.int64)] * len(sequences)
    spans: list[_Span] = []
    tokens: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    starts: dict[int, int] = {}
    size, previous, indices = 0, np.zeros(0, np.int64), np.zeros(0, np.int64)
    for index in sorted(range(len(sequences)), key=lambda index: sort_key(keys[index])):
        sequence = sequences[index]
        shared = common_prefix(previous, keys[index])
        own = len(sequence) - shared
        indices = np.concatenate([indices[:shared], np.arange(size, size + own)])
        # A sequence that extends the whole one before has the queries of both.
        spans.append(_Span(indices, spans.pop().shared if spans and shared == len(previous) else shared))
        places[index] = indices
        tokens.append(sequence[shared:])
        positions.append(np.arange(shared, len(sequence)))
        starts[index] = shared
        size, previous = size + own, keys[index]
    padding = -size % CUDNN_LENGTH_MULTIPLE if kernel == "cudnn" and len(spans) == 1 else 0
    if padding:  # extends the one sequence, whose tokens do not attend to it
        spans = [_Span(np.arange(size + padding), 0)]
        tokens.append(np.zeros(padding, np.int64))
        positions.append(np.full(padding, size - 1))
    runs = _padded_blocks(spans, size, device) if kernel == "sdpa" else _varlen_sequences(spans, device)
    token_ids = to_device(np.concatenate(tokens).astype(np.int64), device)[None]
    position_ids = to_device(np.concatenate(positions), device)[None]

    def rows(stream: list[np.ndarray] | None, name: str) -> torch.Tensor | None:
        own = [] if stream is None else [(len(places[i]) - start, stream[i][start:]) for i, start in starts.items()]
        joined = join_rows([*own, (padding, None)], name)
        if joined is not None and name == ROUTES:
            is_free = (joined == no_route(joined)).all(1)
            joined = joined.astype(np.int16)
            joined[is_free] = -1
        return None if joined is None else to_device(joined, device)

    layout = RowLayout(kernel, max(map(len, places)), runs)
    return PackedRow(token_ids, position_ids, layout, places, rows(latents, LATENTS), rows(routes, ROUTES))


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to a device; to a GPU asynchronously."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def prefix_keys(token_ids: np.ndarray, *streams: np.ndarray | None) -> np.ndarray:
    """Return a number per token by which two prefixes are compared: equal where token and rows of streams are.

    The token ids themselves without streams, else hashes of 64 bits: sorting the rows would take seconds.
    """
    present = [rows for rows in streams if rows is not None]
    if not present:
        return token_ids
    random = np.random.default_rng(0)
    keys = np.zeros(len(token_ids), np.uint64)
    for rows in (token_ids.astype(np.int64)[:, None], *present):
        rows = np.ascontiguousarray(rows).view(np.uint8)
        words = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 8))).view(np.uint64)
        for word in words.T:
            # The low bits of a product depend on the low bits of its factors alone, so high bits are mixed in.
            keys = (keys ^ word) * (random.integers(1 << 63, dtype=np.uint64) | np.uint64(1))
            keys ^= keys >> np.uint64(29)
    return keys


def sort_key(keys: np.ndarray) -> bytes:
    """Return bytes whose order is the lexicographic order of the numbers."""
    return keys.astype(">u8").tobytes()


def common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """Return the length of the common prefix of two sequences."""
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length


def _varlen_sequences(spans: list[_Span], device: torch.device) -> VarlenSequences:
    def starts(lengths: list[int]) -> torch.Tensor:
        return to_device(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), device)

    # The same tensors whether or not anything is shared: the compiler would specialize on one tensor used twice.
    own, lengths = [span.own for span in spans], [span.length for span in spans]
    keys = to_device(np.concatenate([span.places for span in spans]), device)
    return VarlenSequences(keys, starts(own), starts(lengths), max(own), max(lengths))


def _padded_blocks(spans: list[_Span], size: int, device: torch.device) -> PaddedBlocks:
    """Return blocks of spans of similar length; of a span that shares more than half, its unshared end."""
    whole = [span for span in spans if 2 * span.own > span.length]
    tails = [span for span in spans if 2 * span.own <= span.length]
    similar_tails = [b for a in _buckets(tails, lambda span: span.length) for b in _buckets(a, lambda span: span.own)]
    outputs = np.zeros(size, np.int64)
    blocks: list[PaddedBlock] = []
    counted = 0
    for group, is_whole in (
        *((group, True) for group in _buckets(whole, lambda span: span.length)),
        *((group, False) for group in similar_tails),
    ):
        keys = _pad_indices([span.places for span in group])
        queries = keys if is_whole else _pad_indices([span.places[span.shared :] for span in group])
        for number, span in enumerate(group):
            first = counted + number * queries.shape[1] + (span.shared if is_whole else 0)
            outputs[span.places[span.shared :]] = np.arange(first, first + span.own)
        counted += queries.size
        index = to_device(keys, device)
        starts = None if is_whole else to_device(np.array([span.shared for span in group]), device)
        blocks.append(PaddedBlock(index if is_whole else to_device(queries, device), index, starts))
    return PaddedBlocks(blocks, to_device(outputs, device))


def _buckets(spans: list[_Span], size: Callable[[_Span], int]) -> Iterator[list[_Span]]:
    """Yield groups of spans, largest first; sizes within a group differ by at most a quarter, to limit padding."""
    bucket: list[_Span] = []
    for span in sorted(spans, key=size, reverse=True):
        if bucket and 4 * size(span) < 3 * size(bucket[0]):
            yield bucket
            bucket = []
        bucket.append(span)
    if bucket:
        yield bucket


def _pad_indices(places: list[np.ndarray]) -> np.ndarray:
    """Stack arrays of indices; padding is index 0, which the causal mask hides and whose output is not used."""
    padded = np.zeros((len(places), max(map(len, places))), np.int64)
    for number, indices in enumerate(places):
        padded[number, : len(indices)] = indices
    return padded
