"""The result of a replay: metrics and tokens that differ from the record, and where loss and gradient come from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.transport.platform import Platform

if TYPE_CHECKING:
    from headrace.trainer.replay import TracedStep
    from headrace.trainer.tokens import MicroBatchTrace

MAX_NAMED = 8
"""Tokens that are not finite in a report."""
SHOWN_PARAMETERS = 5
"""Parameters with the largest gradients in a report."""
INPUTS = (
    *("advantages", "inference_logprobs", "rl_weights", "ce_weights", "ref_kl_weights", "ref_logprobs", "kl_logprobs"),
)
OUTPUTS = ("trainer_logprobs", "entropy", "gradient")

ReplayVerdict = Literal["bit-equal", "within tolerance", "differs", "not compared"]


class Component(msgspec.Struct):
    """A loss component in the step."""

    name: str
    tokens: int
    masked: int
    loss: float
    share: float
    """Of the sum of |dL/dt| over tokens that this component trains; a token of two components counts in both."""


class RolloutShare(msgspec.Struct):
    """A rollout with its part in the step's gradient."""

    rollout: int
    env: str
    tokens: int
    """Trained tokens."""
    advantage: float
    entropy: float
    drift: float
    """Mean |t - i| of the logprobs of trainer and engine."""
    share: float
    """Of the sum of |dL/dt| over the rollouts where it is finite; NaN where it is not."""


class BadToken(msgspec.Struct):
    """A token with a value that is not finite."""

    sample: int
    position: int
    rollout: int
    env: str
    text: str
    columns: list[str]


class Anatomy(msgspec.Struct):
    """Where the loss and the gradient of a step come from."""

    components: list[Component]
    micro_batches: list[MicroBatchTrace]
    rollouts: list[RolloutShare]
    """Those with the largest shares of the gradient."""
    bad_tokens: list[BadToken]
    """The first of them."""
    num_bad_tokens: int
    bad_parameters: list[str]
    """Parameters whose gradient is not finite."""
    gradient_norms: dict[str, float]
    """Of the parameters with the largest."""
    zero: str
    """Why the gradient is 0; empty if it is not."""


class ReplayReport(msgspec.Struct):
    """A replayed step beside its record."""

    run: str
    step: int
    start: str
    first: int
    """The first step that was trained again."""
    tolerance: float
    platform: Platform
    recorded_platform: Platform | None
    replayed: dict[str, float]
    """All metrics of the step."""
    metrics: list[MetricPair]
    """Those that were recorded."""
    tokens: list[ColumnDifference]
    tokens_from: str
    """What recorded the tokens: the `run`, or the `replay` that wrote a bundle; empty if they were not recorded."""
    first_differing_step: int | None
    """The first step with a metric that differs."""
    other_batches: list[int]
    """Steps whose batch has another digest than in the journal."""
    anatomy: Anatomy

    @property
    def errors(self) -> dict[str, float]:
        return {each.name: each.error for each in self.metrics} | {
            f"{each.name} of a token": each.error for each in self.tokens
        }

    @property
    def verdict(self) -> ReplayVerdict:
        if not self.errors:
            return "not compared"
        if max(self.errors.values()) > self.tolerance:
            return "differs"
        exact = self.first_differing_step is None and not any(column.differing for column in self.tokens)
        return "bit-equal" if exact else "within tolerance"


def dissect(traced: TracedStep, top: int, text_of: Callable[[int], str]) -> Anatomy:
    """Return the anatomy of a step with its `top` rollouts; `text_of` decodes a token."""
    tokens, norms = traced.tokens, traced.gradient_norms
    parts = components(tokens, traced.counts, [each.losses for each in traced.micro_batches])
    bad: dict[str, np.ndarray] = {
        name: pc.fill_null(pc.invert(pc.is_finite(tokens[name])), False).to_numpy() for name in (*INPUTS, *OUTPUTS)
    }
    bad_rows = np.flatnonzero(np.logical_or.reduce(list(bad.values())))
    named, bad_tokens = bad_rows[:MAX_NAMED], []
    for index, row in zip(named, tokens.take(named).to_pylist(), strict=True):
        place = {name: row[name] for name in ("sample", "position", "rollout", "env")}
        columns = [name for name, flags in bad.items() if flags[index]]
        bad_tokens.append(BadToken(**place, text=text_of(row["token_id"]), columns=columns))
    largest = sorted(norms, key=lambda name: -math.inf if math.isnan(norms[name]) else -norms[name])
    return Anatomy(
        parts,
        traced.micro_batches,
        rollout_shares(tokens, top),
        bad_tokens,
        len(bad_rows),
        [name for name in norms if not math.isfinite(norms[name])],
        {name: norms[name] for name in largest[:SHOWN_PARAMETERS]},
        why_zero(tokens, parts, traced.metrics["optim/grad_norm"]),
    )


def components(tokens: pa.Table, counts: dict[str, int], losses: list[dict[str, float]]) -> list[Component]:
    """Return the components that have tokens."""
    sizes = np.abs(_numbers(tokens, "gradient"))
    total = np.nansum(sizes)
    parts = []
    for name, count in counts.items():
        if count:
            members = tokens[f"in_{name}"].to_numpy().astype(bool)
            masked = pc.sum(tokens[f"{name}_masked"]).as_py() or 0
            share = float(np.nansum(sizes[members]) / total) if total else 0.0
            parts.append(Component(name, count, masked, sum(each.get(name, 0.0) for each in losses), share))
    return parts


def rollout_shares(tokens: pa.Table, limit: int) -> list[RolloutShare]:
    """Return the rollouts with the largest shares of the gradient, those that are not finite first."""
    trained = tokens.filter(pc.is_valid(tokens["gradient"]))
    if not trained.num_rows:
        return []
    numbers, rollouts = _numbers(trained, "gradient"), trained["rollout"].to_numpy()
    sums = np.bincount(rollouts, np.nan_to_num(np.abs(numbers), nan=math.inf))
    total = sums[np.isfinite(sums)].sum()
    shares = []
    for rollout in np.argsort(-sums, kind="stable")[:limit].tolist():
        own = trained.filter(pc.equal(trained["rollout"], rollout))
        if own.num_rows:
            means = [_mean(_numbers(own, name)) for name in ("advantages", "entropy")]
            drift = _mean(np.abs(_numbers(own, "log_ratio")))
            share = float(sums[rollout] / (total or 1.0)) if math.isfinite(sums[rollout]) else math.nan
            shares.append(RolloutShare(rollout, own["env"][0].as_py(), own.num_rows, means[0], means[1], drift, share))
    return shares


def why_zero(tokens: pa.Table, parts: list[Component], grad_norm: float) -> str:
    """Return why a step has no gradient; empty if it has one."""
    if grad_norm != 0:
        return ""
    if not parts:
        return "no loss trains any token of the batch"
    trained = tokens.filter(tokens["in_rl"])
    if [each.name for each in parts] == ["rl"] and not np.nan_to_num(_numbers(trained, "advantages")).any():
        return f"the advantages of all {trained.num_rows:,} trained tokens are 0"
    if all(each.masked == each.tokens for each in parts):
        return "the loss masks every token"
    return "the loss does not depend on the logprobs of the trained tokens, or their terms cancel"


def _mean(values: np.ndarray) -> float:
    """Return the mean of the values that are there, NaN if none is."""
    there = values[~np.isnan(values)]
    return float(there.mean()) if len(there) else math.nan


def _numbers(tokens: pa.Table, name: str) -> np.ndarray:
    """Return a column as float64; NaN for null."""
    numbers: np.ndarray = tokens[name].to_numpy().astype(np.float64)
    return numbers


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
    columns = ((name, _numbers(recorded, name)[order], _numbers(replayed, name)[rows]) for name in names)
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
