"""Samples into bins of at most `seq_len` tokens: a pure function that the trainer calls for the ranks it has.

Left for many ranks: balancing the bins over workers by cost. With one worker every bin is its own.
"""

from __future__ import annotations

import msgspec
import numpy as np

from headrace.rollout.types import Sample

STREAM_DEFAULTS: dict[str, float] = {
    "advantages": 0.0,
    "rl_weights": 1.0,
    "ce_weights": 0.0,
    "ref_kl_weights": 0.0,
    "ref_logprobs": 0.0,
}
"""What a token carries in a bin where its own sample lacks the stream but another sample has it."""


class Bin(msgspec.Struct):
    """Several samples end to end. `lengths` restarts positions and attention; `streams` holds what any sample has."""

    token_ids: np.ndarray
    lengths: list[int]
    mask: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    temperatures: np.ndarray
    sources: list[int]
    """For each sequence, the index of its sample in the list that was packed."""
    streams: dict[str, np.ndarray]

    @property
    def position_ids(self) -> np.ndarray:
        return np.concatenate([np.arange(length, dtype=np.int64) for length in self.lengths])


def pack(samples: list[Sample], seq_len: int) -> list[Bin]:
    """First-fit-decreasing into bins of `seq_len` tokens; longer samples are truncated, every stream alike."""
    trimmed = [sample.truncated(seq_len) for sample in samples]
    for index, sample in enumerate(trimmed):
        _check_trainable(sample, index)
    order = sorted(range(len(trimmed)), key=lambda i: (-len(trimmed[i]), i))
    bins: list[list[int]] = []
    room: list[int] = []
    for index in order:
        length = len(trimmed[index])
        target = next((b for b, free in enumerate(room) if free >= length), None)
        if target is None:
            bins.append([])
            room.append(seq_len)
            target = len(bins) - 1
        bins[target].append(index)
        room[target] -= length
    return [_fill(indices, trimmed) for indices in bins]


def _check_trainable(sample: Sample, index: int) -> None:
    """An rl token without an advantage has no loss: the producer forgot it."""
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


def _fill(indices: list[int], samples: list[Sample]) -> Bin:
    chosen = [samples[i] for i in indices]
    names = {name for sample in chosen for name in sample.streams if name in STREAM_DEFAULTS}
    return Bin(
        token_ids=np.concatenate([s.token_ids for s in chosen]),
        lengths=[len(s) for s in chosen],
        mask=np.concatenate([s.mask for s in chosen]),
        logprobs=np.concatenate([s.logprobs for s in chosen]),
        versions=np.concatenate([s.versions for s in chosen]),
        temperatures=np.concatenate([np.full(len(s), s.temperature, np.float32) for s in chosen]),
        sources=list(indices),
        streams={
            name: np.concatenate(
                [s.streams.get(name, np.full(len(s), STREAM_DEFAULTS[name], np.float32)) for s in chosen]
            )
            for name in sorted(names)
        },
    )
