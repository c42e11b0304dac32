"""What two plays have in common, and the credit that one has come to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from headrace.rollout.types import Rollout
from headrace.tools.check_algorithm.playing import Played, Streams

ROUNDING = 1e-5
"""Relative, and absolute: streams are float32."""


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def close(one: Any, other: Any) -> bool:
    return bool(np.allclose(one, other, rtol=ROUNDING, atol=ROUNDING, equal_nan=True))


def named_streams(played: Played) -> Iterator[tuple[int, str, np.ndarray]]:
    """All that was written, with the number of the rollout."""
    for number, streams in enumerate(played.written):
        for of_sample in streams:
            yield from ((number, name, values) for name, values in of_sample.items())


def unlike(first: list[Streams], second: list[Streams], *, exactly: bool = False, only: str = "") -> str:
    """The first stream that is not the same in both; empty if all are."""
    for one, other in zip(first, second, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            for name in [only] if only else sorted({*mine, *theirs}):
                if not _alike(mine.get(name), theirs.get(name), exactly):
                    return name
    return ""


def _alike(one: np.ndarray | None, other: np.ndarray | None, exactly: bool) -> bool:
    if one is None or other is None:
        return one is other
    return same_bits(one, other) or (not exactly and one.shape == other.shape and close(one, other))


def group_credit(played: Played) -> list[np.ndarray]:
    """Each rollout's credit on its sampled tokens by the end of `score_group`."""
    return [_on_sampled(*pair) for pair in zip(played.case.rollouts, played.by_group, strict=True)]


def final_credit(played: Played) -> list[np.ndarray]:
    return [_on_sampled(*pair) for pair in zip(played.case.rollouts, played.by_algorithm, strict=True)]


def credit(played: Played) -> list[np.ndarray]:
    """What the group gave; where it gave none, what the batch gave."""
    by_group = group_credit(played)
    return by_group if any(map(len, by_group)) else final_credit(played)


def _on_sampled(rollout: Rollout, streams: Streams) -> np.ndarray:
    """Its samples end to end; a stream that is not aligned with its sample counts as none."""
    pieces = [np.zeros(0)]
    for sample, of_sample in zip(rollout.samples, streams, strict=True):
        values = of_sample.get("advantages")
        if values is not None and np.shape(values) == sample.mask.shape:
            pieces.append(values[sample.mask])
    return np.concatenate(pieces)


def mean(values: np.ndarray) -> float:
    return float(values.mean(dtype=np.float64)) if len(values) else 0.0


def difference(before: Any, after: Any, path: str) -> str:
    """Where two structures first differ, streams left aside; empty if nowhere."""
    if isinstance(before, np.ndarray):
        return "" if isinstance(after, np.ndarray) and same_bits(before, after) else path
    if isinstance(before, msgspec.Struct):
        pairs = [(f"{path}.{name}", getattr(before, name), getattr(after, name)) for name in before.__struct_fields__]
        pairs = [pair for pair in pairs if not pair[0].endswith(".streams")]
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = [(f"{path}[{n}]", *pair) for n, pair in enumerate(zip(before, after, strict=True))]
    else:
        return "" if not isinstance(before, list) and before == after else path
    return next(filter(None, (difference(one, other, name) for name, one, other in pairs)), "")
