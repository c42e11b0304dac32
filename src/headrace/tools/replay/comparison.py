"""Recorded against replayed numbers: the metrics of a step, and the values of its tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

UNCOMPARED = ("time/", "perf/", "progress/incarnation")
"""Metrics that differ between two runs of the same step."""
TOKEN_VALUES = ("trainer_logprobs", "entropy", "kl_logprobs", "gradient")
"""Columns of a token table that the trainer computes."""


class MetricPair(msgspec.Struct):
    """A metric of the step; None: it was not finite."""

    name: str
    recorded: float | None
    replayed: float | None
    error: float
    """Their difference: relative for gradients and learning rate, else also relative where the value is above 1."""


class ColumnDifference(msgspec.Struct):
    """The values of one column for all tokens that were recorded."""

    name: str
    tokens: int
    differing: int
    """Tokens whose values are not equal to the last bit."""
    largest: float
    mean: float
    error: float
    """The largest difference relative to the largest value: of gradients always, else if that is above 1."""
    first: tuple[int, int] | None = None
    """Sample and position of the first token that differs."""


def compare_metrics(recorded: Mapping[str, Any], replayed: Mapping[str, float]) -> list[MetricPair]:
    """Return the metrics that both have, those that differ most first after the loss."""
    pairs = []
    for name, value in replayed.items():
        if name.startswith(UNCOMPARED) or name not in recorded:
            continue
        own, other = recorded[name], value if math.isfinite(value) else None  # JSON has no NaN
        if own is None or other is None:
            error = 0.0 if own is other else math.inf
        else:
            scale = abs(own) or 1.0 if name.startswith("optim/") else max(1.0, abs(own))
            error = abs(own - other) / scale
        pairs.append(MetricPair(name, own, other, error))
    return sorted(pairs, key=lambda pair: (pair.name != "loss", -pair.error))


def compare_tokens(recorded: pa.Table, replayed: pa.Table) -> list[ColumnDifference]:
    """Compare the recorded tokens, which may be some of the step's, with their replay."""
    keys, own = _keys(replayed), _keys(recorded)
    order = np.argsort(own)
    own = own[order]
    rows = np.minimum(np.searchsorted(keys, own), len(keys) - 1)
    ids = recorded["token_id"].to_numpy()[order]
    others = (keys[rows] != own) | (ids != replayed["token_id"].to_numpy()[rows])
    if others.any():
        return [
            ColumnDifference("token_id", len(own), int(others.sum()), math.inf, math.inf, math.inf, _place(own[others]))
        ]
    names = [name for name in TOKEN_VALUES if name in recorded.column_names]  # older versions had fewer
    columns = ((name, _numbers(recorded[name])[order], _numbers(replayed[name])[rows]) for name in names)
    return [_column(name, own, *pair) for name, *pair in columns if not np.isnan(pair).all()]


def _column(name: str, keys: np.ndarray, recorded: np.ndarray, replayed: np.ndarray) -> ColumnDifference:
    same = (recorded == replayed) | (np.isnan(recorded) & np.isnan(replayed))
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, np.nan_to_num(np.abs(recorded - replayed), nan=math.inf))
    largest, size = float(difference.max()), float(np.abs(recorded[np.isfinite(recorded)]).max(initial=0.0))
    scale = size or 1.0 if name == "gradient" else max(1.0, size)
    first = None if same.all() else _place(keys[~same])
    computed = ~np.isnan(recorded) | ~same
    mean = float(difference[computed].mean()) if computed.any() else 0.0
    return ColumnDifference(name, int(computed.sum()), int((~same).sum()), largest, mean, largest / scale, first)


def _keys(table: pa.Table) -> np.ndarray:
    """Return a number for each token that orders them by sample and position."""
    keys: np.ndarray = table["sample"].to_numpy().astype(np.int64) << 32 | table["position"].to_numpy()
    return keys


def _place(keys: np.ndarray) -> tuple[int, int]:
    return int(keys[0] >> 32), int(keys[0] & 0xFFFFFFFF)


def _numbers(column: pa.ChunkedArray) -> np.ndarray:
    """Return float64; NaN for null."""
    numbers: np.ndarray = column.to_numpy().astype(np.float64)
    return numbers
