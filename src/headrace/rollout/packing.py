"""Samples into bins of at most `seq_len` tokens, and bins over workers: pure functions that the trainer calls for the
ranks it has.

    truncate -> first-fit-decreasing -> split the costliest bins until their number divides by the workers
             -> dummies where nothing can be split -> pad -> spread by cost

Which sample goes where depends on lengths alone, and every worker computes it alike.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import msgspec
import numpy as np

from headrace.rollout.balance import spread
from headrace.rollout.cost import Cost
from headrace.rollout.types import NOT_SAMPLED, Sample

STREAM_DEFAULTS: dict[str, float] = {
    "advantages": 0.0,
    "rl_weights": 1.0,
    "ce_weights": 0.0,
    "ref_kl_weights": 0.0,
    "ref_logprobs": 0.0,
}
"""What a token carries in a bin where its own sample lacks the stream but another sample has it."""

MISSING_REFERENCE = (
    "tokens have ref_kl weights but no ref_logprobs: these come from the algorithms that score with a reference model "
    "(opd, opsd); use one of them, or leave ref_kl_weights out"
)

NO_SAMPLE = -1
"""The entry of `Bin.sources` for padding."""


class Bin(msgspec.Struct):
    """Several samples end to end. `lengths` restarts positions and attention; `streams` holds what any sample has.

    Padding is one more sequence, the last, which no sample is the source of: mask False, and 0 in every stream. A bin
    with padding always has `rl_weights`, since an absent stream would mean weight 1. A dummy is a bin of padding alone.
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

    @property
    def position_ids(self) -> np.ndarray:
        return np.concatenate([np.arange(length, dtype=np.int64) for length in self.lengths])


def pack(samples: list[Sample], seq_len: int) -> list[Bin]:
    """For one worker that pads nothing: first-fit-decreasing alone."""
    prepared = _prepare(samples, seq_len)
    return [_fill(bin_, prepared) for bin_ in _first_fit_decreasing([len(sample) for sample in prepared], seq_len)]


def pack_for_workers(
    samples: list[Sample], seq_len: int, workers: int, cost: Cost, pad_to_multiple_of: int = 1
) -> list[list[Bin]]:
    """For each worker its bins, as many as every other has, in the order of `assign_bins`.

    A bin's length is a multiple of `pad_to_multiple_of`, and at most `seq_len` before padding.
    """
    prepared = _prepare(samples, seq_len)
    shares = assign_bins([len(sample) for sample in prepared], seq_len, workers, cost, pad_to_multiple_of)
    return [[_fill(bin_, prepared, pad_to_multiple_of) for bin_ in share] for share in shares]


def pack_for_worker(
    worker: int, samples: list[Sample], seq_len: int, workers: int, cost: Cost, pad_to_multiple_of: int = 1
) -> list[Bin]:
    """What `pack_for_workers` has for one of them, without filling the bins of the others."""
    prepared = _prepare(samples, seq_len)  # All of them, so that all workers refuse a bad batch and none waits.
    shares = assign_bins([len(sample) for sample in prepared], seq_len, workers, cost, pad_to_multiple_of)
    return [_fill(bin_, prepared, pad_to_multiple_of) for bin_ in shares[worker]]


def assign_bins(
    lengths: Sequence[int], seq_len: int, workers: int, cost: Cost, pad_to_multiple_of: int = 1
) -> list[list[list[int]]]:
    """For each worker its bins, for each bin the samples in it; a bin without any is a dummy.

    Each worker's costliest bin comes first: workers that run in lockstep wait least when equals meet, and memory that
    does not suffice shows at once.
    """
    if pad_to_multiple_of < 1:
        raise ValueError(f"bins cannot be padded to a multiple of {pad_to_multiple_of}: it must be 1 or more")
    bins = cut_into_bins(lengths, seq_len, workers, cost)
    contents = [[lengths[i] for i in bin_] for bin_ in bins]
    costs = [cost.of([*content, _tail(sum(content), pad_to_multiple_of)]) for content in contents]
    return [[bins[number] for number in share] for share in spread(costs, workers)]


def cut_into_bins(lengths: Sequence[int], seq_len: int, workers: int, cost: Cost) -> list[list[int]]:
    """Bins of at most `seq_len` tokens, whose number divides by the workers."""
    if workers < 1:
        raise ValueError(f"bins cannot be cut for {workers} workers: there must be 1 or more")
    if max(lengths, default=0) > seq_len:
        raise ValueError(f"a sample of {max(lengths)} tokens does not fit bins of {seq_len}: truncate it first")
    bins = _first_fit_decreasing(lengths, seq_len)
    bins = _split_costliest(bins, -len(bins) % workers, [cost.of([length]) for length in lengths])
    return bins + [[] for _ in range(-len(bins) % workers)]


def _first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """The longest first, each into the first bin with room for it.

    `room` is a binary tree: leaves are bins, a node has the most room below it, and its children are at 2n and 2n + 1.
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
    """Cut the costliest bin in two, so many times, or until every bin has one sample."""
    bins = list(bins)
    heap = [(-sum(costs[i] for i in bin_), number) for number, bin_ in enumerate(bins) if len(bin_) > 1]
    heapq.heapify(heap)
    for _ in range(times):
        if not heap:
            break
        _, number = heapq.heappop(heap)
        bins[number], other = _halves(bins[number], costs)
        bins.append(other)
        for half in (number, len(bins) - 1):
            if len(bins[half]) > 1:
                heapq.heappush(heap, (-sum(costs[i] for i in bins[half]), half))
    return bins


def _halves(bin_: list[int], costs: list[int]) -> tuple[list[int], list[int]]:
    """The costliest sample first, each to the side that is cheaper so far."""
    left: list[int] = []
    right: list[int] = []
    balance = 0
    for index in sorted(bin_, key=lambda i: (-costs[i], i)):
        (left if balance <= 0 else right).append(index)
        balance += costs[index] if balance <= 0 else -costs[index]
    return left, right


def _prepare(samples: list[Sample], seq_len: int) -> list[Sample]:
    """Truncated, every stream alike, and fit to train on."""
    for index, sample in enumerate(samples):
        _check_trainable(sample, index)
    return [sample.truncated(seq_len) for sample in samples]


def _check_trainable(sample: Sample, index: int) -> None:
    """A token without what its loss reads is one that the producer forgot; in a bin it would have another's default."""
    sample.check()
    if len(sample) == 0:
        raise ValueError(f"sample {index} has no tokens")
    weights = sample.streams.get("rl_weights")
    members = sample.mask if weights is None else sample.mask & (weights != 0)
    if members.any() and "advantages" not in sample.streams:
        raise ValueError(
            f"sample {index} has {int(members.sum())} tokens in the rl loss but no advantages: its algorithm must "
            "assign credit, or set rl_weights to 0"
        )
    if np.any(sample.streams.get("ref_kl_weights", 0.0)) and "ref_logprobs" not in sample.streams:
        raise ValueError(f"sample {index}: {MISSING_REFERENCE}")


def _fill(bin_: list[int], samples: list[Sample], pad_to_multiple_of: int = 1) -> Bin:
    chosen, sources = [samples[i] for i in bin_], list(bin_)
    if tail := _tail(sum(map(len, chosen)), pad_to_multiple_of):
        chosen.append(_padding(tail))
        sources.append(NO_SAMPLE)
    lengths = [len(sample) for sample in chosen]
    names = {name for sample in chosen for name in sample.streams if name in STREAM_DEFAULTS}
    return Bin(
        token_ids=np.concatenate([s.token_ids for s in chosen]),
        lengths=lengths,
        mask=np.concatenate([s.mask for s in chosen]),
        logprobs=np.concatenate([s.logprobs for s in chosen]),
        versions=np.concatenate([s.versions for s in chosen]),
        temperatures=np.repeat(np.array([s.temperature for s in chosen], np.float32), lengths),
        sources=sources,
        streams={
            name: np.concatenate(
                [s.streams.get(name, np.full(len(s), STREAM_DEFAULTS[name], np.float32)) for s in chosen]
            )
            for name in sorted(names)
        },
    )


def _tail(tokens: int, multiple: int) -> int:
    """How much padding a bin needs. A dummy has the least that a bin can have."""
    return -tokens % multiple if tokens else multiple


def _padding(length: int) -> Sample:
    """Nothing to learn from. Its other streams are the defaults, which are 0 but for rl_weights."""
    nothing = np.zeros(length, np.float32)
    versions = np.full(length, NOT_SAMPLED)
    return Sample(nothing, nothing, nothing, versions, length, streams={"rl_weights": nothing})
