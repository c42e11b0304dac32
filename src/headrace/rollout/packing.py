"""Sequence packing: samples into bins of at most `seq_len` tokens, and bins over workers (the trainer's ranks).

    truncate -> first-fit-decreasing -> split the costliest bins until their number is a multiple of the workers
             -> add dummy bins if none can be split -> pad -> balance by cost

The assignment depends on lengths alone, and every worker computes the same one: ties are broken by position, and the
order of every sum is fixed.

Bins are balanced by Karmarkar-Karp for equal cardinality: sorted by cost, they are cut into rounds of one bin per
worker; the two partial assignments with the largest differences are merged, heaviest share with lightest, until one is
left. Then the heaviest worker swaps bins with others until its load is near the mean. Workers that synchronize after
every bin take, per step, the sum over rounds of the costliest bin. This is smallest while no bin leaves its round, so a
swap that moves one into a cheaper round is penalized.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from headrace.rollout.types import KNOWN_STREAMS, LATENTS, NOT_SAMPLED, ROUTES, TOKEN_ARRAYS, Sample, no_route

LOAD_TOLERANCE = 0.005
"""Swapping stops when the heaviest load is above the mean by at most this fraction."""
MAX_ROUNDS_APART = 16
"""Rounds by which a swap may move an item: keeps the search linear in the rounds."""
MAX_SWAPS_PER_WORKER = 16


class _Partial(NamedTuple):
    """An assignment of some of the rounds; shares are sorted by their sum, heaviest first."""

    sums: np.ndarray
    """[workers]"""
    rounds: list[int]
    columns: np.ndarray
    """[rounds, workers]: for each share, the number of its item within the round."""

    @property
    def difference(self) -> float:
        return float(self.sums[0] - self.sums[-1])


def spread(costs: Sequence[float], workers: int) -> list[list[int]]:
    """Return for each worker the indices of its items, costliest first; every worker gets the same number."""
    if len(costs) % workers:
        raise ValueError(f"{len(costs)} items cannot be spread evenly over {workers} workers")
    if not costs:
        return [[] for _ in range(workers)]
    values = np.asarray(costs, np.float64)
    order = np.argsort(-values, kind="stable").reshape(-1, workers)
    assigned = _karmarkar_karp(values[order])
    shares = np.take_along_axis(order, assigned.columns[np.argsort(assigned.rounds)], axis=1)
    target = (1 + LOAD_TOLERANCE) * math.fsum(assigned.sums) / workers
    _swap_items(shares, values[shares], assigned.sums.copy(), target)
    return [sorted(share, key=lambda item: (-values[item], item)) for share in shares.T.tolist()]


def _karmarkar_karp(rounds: np.ndarray) -> _Partial:
    """Assign one item of each round to each worker, from the costs [rounds, workers], rows sorted costliest first."""
    one_each = np.arange(rounds.shape[1])[None]
    partials = [_Partial(sums, [number], one_each) for number, sums in enumerate(rounds)]
    heap = [(-partial.difference, number, partial) for number, partial in enumerate(partials)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, left = heapq.heappop(heap)
        _, _, right = heapq.heappop(heap)
        sums = left.sums + right.sums[::-1]  # the heaviest share of one with the lightest of the other
        columns = np.concatenate([left.columns, right.columns[:, ::-1]])
        by_weight = np.argsort(-sums, kind="stable")
        merged = _Partial(sums[by_weight], left.rounds + right.rounds, columns[:, by_weight])
        heapq.heappush(heap, (-merged.difference, number, merged))
    return heap[0][2]


def _swap_items(shares: np.ndarray, costs: np.ndarray, loads: np.ndarray, target: float) -> None:
    """Swap items in place between the heaviest worker and others until its load is at `target` or no swap helps.

    `shares` and `costs` [rounds, workers] are the items and their costs, `loads` [workers] the column sums of `costs`.
    """
    own = np.repeat(np.arange(len(costs)), 2 * MAX_ROUNDS_APART + 1)
    others = own + np.tile(np.arange(-MAX_ROUNDS_APART, MAX_ROUNDS_APART + 1), len(costs))
    inside = (others >= 0) & (others < len(costs))
    own, others = own[inside], others[inside]
    for _ in range(MAX_SWAPS_PER_WORKER * len(loads)):
        heaviest = int(np.argmax(loads))
        if loads[heaviest] <= target:
            return
        offered = costs[own, heaviest][:, None]
        moved = offered - costs[others]
        heavier_after = np.maximum(loads[heaviest] - moved, loads + moved)
        longer_round = np.maximum(0, offered - costs.max(axis=1)[others][:, None])
        price = np.where(heavier_after < loads[heaviest], np.maximum(heavier_after, target) + longer_round, np.inf)
        pair, other = np.unravel_index(np.argmin(price), price.shape)
        if price[pair, other] == np.inf:
            return
        loads[heaviest] -= moved[pair, other]
        loads[other] += moved[pair, other]
        mine, theirs = (own[pair], heaviest), (others[pair], other)
        for table in (shares, costs):
            table[mine], table[theirs] = table[theirs], table[mine]


STREAM_DEFAULTS = {**dict.fromkeys(KNOWN_STREAMS, 0.0), "rl_weights": 1.0, "kl_logprobs": math.nan}
"""The value of a token whose sample lacks a stream that another sample of the bin has. Where `kl_logprobs` is NaN,
the trainer computes it with its own reference."""

MISSING_REFERENCE = (
    "tokens have ref_kl_weights but no ref_logprobs. Use an algorithm that scores with a reference model (opd, opsd), "
    "or leave ref_kl_weights out"
)

NO_SAMPLE = -1
"""The entry of `Bin.sources` for padding."""


class Cost(msgspec.Struct, frozen=True):
    """The cost of a sequence: `a` per token and `b` per pair of tokens that attend, operations of one forward pass.

    Integers, so that every worker computes the same sums in any order. Left out on purpose: prefixes that sequences
    share, which the trainer computes once, and tokens that need no logits.
    """

    a: int
    b: int

    def __post_init__(self) -> None:
        if self.a <= 0 or self.b < 0:
            raise ValueError(f"the cost per token must be above 0 and the cost per pair at least 0, not {self}")

    def of(self, lengths: Iterable[int]) -> int:
        """Return the cost of packed sequences, each with attention to itself only."""
        return sum(self.a * n + self.b * n * n for n in lengths)


def cost_of_model(
    *,
    hidden_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    num_key_value_heads: int,
    head_dim: int,
    intermediate_size: int,
    vocab_size: int,
) -> Cost:
    """Return the cost from the fields of a model's config; `intermediate_size` is the width that a token uses.

    a = layers * (2*h*heads*hd [q] + 4*h*kv*hd [k, v] + 2*heads*hd*h [o] + 6*h*ffn [gate, up, down]) + 2*h*V [lm-head],
    b = 2 * layers * heads * hd [scores and values, halved by causality].
    """
    queries = num_attention_heads * head_dim
    projections = 4 * hidden_size * queries + 4 * hidden_size * num_key_value_heads * head_dim
    feed_forward = 6 * hidden_size * intermediate_size
    per_token = num_hidden_layers * (projections + feed_forward) + 2 * hidden_size * vocab_size
    return Cost(per_token, 2 * num_hidden_layers * queries)


class Bin(msgspec.Struct):
    """Packed samples: `lengths` delimit positions and attention; `streams` are those that any sample has.

    Padding is one more sequence at the end without a source: mask False, and 0 in every stream. A bin with padding
    always has `rl_weights`, since an absent stream would mean weight 1. A dummy bin is padding alone.
    """

    token_ids: np.ndarray
    lengths: list[int]
    mask: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    temperatures: np.ndarray
    sources: list[int]
    """For each sequence, the index of its sample in the list that was packed, or NO_SAMPLE."""
    streams: dict[str, np.ndarray]
    latents: np.ndarray | None = None
    """[tokens, hidden size], zeros where a sample has none; None if no sample has any."""
    routes: np.ndarray | None = None
    """[tokens, layers * experts per token], `no_route` where a sample has none; None if no sample has any."""

    @property
    def position_ids(self) -> np.ndarray:
        return np.concatenate([np.arange(length, dtype=np.int64) for length in self.lengths])


def pack(samples: list[Sample], seq_len: int, unit_size: int = 1) -> list[Bin]:
    """Return bins of all samples, for one worker, without padding. `unit_size`: as in `pack_for_worker`."""
    prepared = _prepare(samples, seq_len)
    bins = _first_fit_decreasing(_unit_lengths(prepared, unit_size), unit_size * seq_len)
    return [_make_bin(_unit_samples(bin_, unit_size), prepared) for bin_ in bins]


def pack_for_worker(
    worker: int,
    samples: list[Sample],
    seq_len: int,
    workers: int,
    cost: Cost,
    pad_to_multiple_of: int = 1,
    unit_size: int = 1,
) -> list[Bin]:
    """Return the bins of one worker, in the order of `assign_bins`; every worker has the same number.

    A bin's length is a multiple of `pad_to_multiple_of`, and at most `seq_len` before padding. `unit_size`:
    consecutive samples that must be in the same bin; bins may then have `unit_size` times as many tokens.
    """
    prepared = _prepare(samples, seq_len)  # checks all samples, so that every worker refuses a bad batch
    lengths = _unit_lengths(prepared, unit_size)
    shares = assign_bins(lengths, unit_size * seq_len, workers, cost, pad_to_multiple_of)
    return [_make_bin(_unit_samples(bin_, unit_size), prepared, pad_to_multiple_of) for bin_ in shares[worker]]


def _unit_lengths(samples: list[Sample], unit_size: int) -> list[int]:
    return [sum(map(len, samples[start : start + unit_size])) for start in range(0, len(samples), unit_size)]


def _unit_samples(units: list[int], unit_size: int) -> list[int]:
    return [unit * unit_size + number for unit in units for number in range(unit_size)]


def assign_bins(
    lengths: Sequence[int], seq_len: int, workers: int, cost: Cost, pad_to_multiple_of: int = 1
) -> list[list[list[int]]]:
    """Return for each worker its bins as lists of sample indices; an empty list is a dummy bin.

    Each worker's costliest bin comes first: workers in lockstep wait least, and an out-of-memory error shows early.
    """
    if pad_to_multiple_of < 1:
        raise ValueError(f"pad_to_multiple_of = {pad_to_multiple_of}: it must be at least 1")
    bins = cut_into_bins(lengths, seq_len, workers, cost)
    contents = [[lengths[i] for i in bin_] for bin_ in bins]
    costs = [cost.of([*content, _padding_length(sum(content), pad_to_multiple_of)]) for content in contents]
    return [[bins[number] for number in share] for share in spread(costs, workers)]


def cut_into_bins(lengths: Sequence[int], seq_len: int, workers: int, cost: Cost) -> list[list[int]]:
    """Return bins of at most `seq_len` tokens; their number is a multiple of `workers`."""
    if workers < 1:
        raise ValueError(f"workers = {workers}: there must be at least 1")
    if max(lengths, default=0) > seq_len:
        raise ValueError(f"a sample of {max(lengths)} tokens does not fit bins of {seq_len}: truncate it first")
    bins = _first_fit_decreasing(lengths, seq_len)
    bins = _split_costliest(bins, -len(bins) % workers, [cost.of([length]) for length in lengths])
    return bins + [[] for _ in range(-len(bins) % workers)]


def _first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put each sample, longest first, into the first bin where it fits.

    `room` is a binary tree: leaves are bins, a node is the maximum of its children, which are at 2n and 2n + 1.
    """
    leaves = 1 << max(0, len(lengths) - 1).bit_length()
    room = [capacity] * (2 * leaves)
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        node = 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= lengths[index] else 2 * node + 1
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(index)
        room[node] -= lengths[index]
        while node > 1 and room[node // 2] != (most := max(room[node], room[node ^ 1])):
            node //= 2
            room[node] = most
    return bins


def _split_costliest(bins: list[list[int]], times: int, costs: list[int]) -> list[list[int]]:
    """Split the costliest bin in two, `times` times or until every bin has one sample."""
    bins = list(bins)
    heap = [(-sum(costs[i] for i in bin_), number) for number, bin_ in enumerate(bins) if len(bin_) > 1]
    heapq.heapify(heap)
    for _ in range(times):
        if not heap:
            break
        _, number = heapq.heappop(heap)
        halves: tuple[list[int], list[int]] = [], []
        balance = 0  # cost of the first half minus cost of the second: each sample goes to the cheaper half
        for index in sorted(bins[number], key=lambda i: (-costs[i], i)):
            halves[balance > 0].append(index)
            balance += costs[index] if balance <= 0 else -costs[index]
        bins[number] = halves[0]
        bins.append(halves[1])
        for half in (number, len(bins) - 1):
            if len(bins[half]) > 1:
                heapq.heappush(heap, (-sum(costs[i] for i in bins[half]), half))
    return bins


def _prepare(samples: list[Sample], seq_len: int) -> list[Sample]:
    """Truncate the samples; raise if a token lacks a stream that its loss reads: a bin would fill in a default."""
    for index, sample in enumerate(samples):
        sample.check()
        if len(sample) == 0:
            raise ValueError(f"sample {index} has no tokens")
        if sample.rl_members.any() and "advantages" not in sample.streams:
            fact = f"sample {index} has {int(sample.rl_members.sum())} tokens in the rl loss but no advantages"
            raise ValueError(f"{fact}: its algorithm must assign credit, or set rl_weights to 0")
        if np.any(sample.streams.get("ref_kl_weights", 0.0)) and "ref_logprobs" not in sample.streams:
            raise ValueError(f"sample {index}: {MISSING_REFERENCE}")
    return [sample.truncated(seq_len) for sample in samples]


def _make_bin(bin_: list[int], samples: list[Sample], pad_to_multiple_of: int = 1) -> Bin:
    chosen, sources = [samples[i] for i in bin_], list(bin_)
    if padding := _padding_length(sum(map(len, chosen)), pad_to_multiple_of):
        zeros, versions = np.zeros(padding, np.float32), np.full(padding, NOT_SAMPLED)
        chosen.append(Sample(zeros, zeros, zeros, versions, padding, streams={"rl_weights": zeros}))
        sources.append(NO_SAMPLE)
    lengths = [len(sample) for sample in chosen]
    names = {name for sample in chosen for name in sample.streams if name in STREAM_DEFAULTS}
    streams = {}
    for name in sorted(names):
        default = STREAM_DEFAULTS[name]
        parts = [s.streams.get(name, np.full(len(s), default, np.float32)) for s in chosen]
        streams[name] = np.concatenate(parts)
    return Bin(
        **{name: np.concatenate([getattr(s, name) for s in chosen]) for name in TOKEN_ARRAYS},
        lengths=lengths,
        temperatures=np.repeat(np.array([s.temperature for s in chosen], np.float32), lengths),
        sources=sources,
        streams=streams,
        latents=join_rows([(len(sample), sample.streams.get(LATENTS)) for sample in chosen], LATENTS),
        routes=join_rows([(len(sample), sample.streams.get(ROUTES)) for sample in chosen], ROUTES),
    )


def join_rows(parts: Sequence[tuple[int, np.ndarray | None]], stream: str) -> np.ndarray | None:
    """Concatenate parts of a stream with a row of numbers per token, given their lengths; None if all are missing.

    Missing parts are filled with zeros, those of `ROUTES` with `no_route`.
    """
    present = [rows for _, rows in parts if rows is not None]
    kinds = {(rows.shape[1], rows.dtype) for rows in present}
    if not kinds:
        return None
    if len(kinds) > 1:
        raise ValueError(f"samples have {stream} of different sizes: {sorted({width for width, _ in kinds})}")
    ((width, dtype),) = kinds
    fill = no_route(present[0]) if stream == ROUTES else 0
    return np.concatenate([np.full((n, width), fill, dtype) if rows is None else rows for n, rows in parts])


def _padding_length(tokens: int, multiple: int) -> int:
    """Return the padding tokens of a bin; a dummy bin has one multiple."""
    return -tokens % multiple if tokens else multiple
