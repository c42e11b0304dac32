"""Comparison of runs: differences of their configurations and results, with significance tests.

Runs that differ only in their seeds are one variant, and every variant is compared with the first. The final value of
a training metric is the mean of its last steps, that of an evaluation its last value, both at a step that all runs have
reached. Runs without the metric are left out with a note.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec

from headrace.config.files import read_toml
from headrace.errors import BadInput
from headrace.observe.metrics import Curve, History, Record, Tail
from headrace.observe.summary import END_STEPS
from headrace.tools.common import short_names
from headrace.tools.compare.inputs import (
    SEEDS,
    Scores,
    Settings,
    differences,
    group_by_variant,
    read_own_scores,
    read_scores,
    settings_of,
)
from headrace.tools.compare.significance import Difference, VariantValues, compute_difference
from headrace.transport.run_dir import RolloutKind, RunDir

HELD_OUT = "held-out"
"""The mean over the evaluation environments, as in `headrace summary`."""
ACCURACY = "accuracy"
"""Accuracy of a run's final model in `headrace eval`."""
PREFERRED = ("reward/all/mean", "loss")
"""Default metrics: the first that all runs have is compared."""
SMALLER_IS_BETTER = ("loss", "error", "kl")
"""Substrings of the names of metrics."""


class Ends(msgspec.Struct):
    """First, best and last value of a metric in one run."""

    first: float
    best: float
    last: float


class RunReport(msgspec.Struct):
    """One run in the output of `headrace compare --json`."""

    name: str
    path: str
    variant: str
    seed: int | None
    steps: int
    max_steps: int | None
    metric: Ends
    seconds: float
    tokens_sampled: int
    tokens_trained: int
    evaluations: dict[str, Ends]
    """avg@k by environment."""


class SeedRange(msgspec.Struct):
    """Mean and range over the seeds of a variant."""

    mean: float
    lowest: float
    highest: float


class Variant(msgspec.Struct):
    """Runs that differ only in their seeds."""

    name: str
    runs: list[str]
    settings: dict[str, Any]
    """Settings in which variants differ; None: unset."""
    ends: dict[str, SeedRange]
    """Final values by metric."""


class RunComparison(msgspec.Struct):
    """The output of `headrace compare --json`."""

    metric: str
    at: dict[str, int]
    """By metric: the step at which runs are compared, the last that all of them have reached."""
    runs: list[RunReport]
    variants: list[Variant]
    differences: list[Difference]
    notes: list[str]
    """Runs that were left out or are not finished."""


class ComparisonWithCurves(NamedTuple):
    comparison: RunComparison
    curves: dict[str, dict[str, list[Curve]]]
    """By metric and variant, one per seed."""


class _Run(NamedTuple):
    name: str
    root: Path
    settings: Settings
    history: History
    records: list[Record]

    def curve(self, metric: str) -> Curve:
        return curve_of(self.records, self.history, metric)


class _Measure(NamedTuple):
    """A metric with an entry per run."""

    name: str
    at: int | None
    ends: list[float]
    curves: list[Curve]
    steps: list[list[float]]
    examples: list[Scores]

    def values(self, variant: str, group: Sequence[int]) -> VariantValues:
        return VariantValues(
            variant,
            [self.ends[n] for n in group],
            [self.steps[n] for n in group] if self.steps else [],
            [self.examples[n] for n in group] if self.examples else [],
        )


def compare_runs(
    paths: Sequence[Path],
    metric: str | None = None,
    evaluation: Path | None = None,
    variants: Mapping[Path, str] | None = None,
) -> ComparisonWithCurves:
    """Read and compare the runs; raises `BadInput` unless at least two have reported the metric.

    `evaluation` is the output directory of `headrace eval`; unset, the evaluations that the runs saved are used.
    `variants` has the names of variants by path; unset, they follow from the configurations.
    """
    notes: list[str] = []
    runs = _read(paths, notes)
    default = next((name for name in PREFERRED if runs and all(run.curve(name) for run in runs)), PREFERRED[0])
    chosen = metric or default
    runs = [run for run in runs if _has(run, chosen, notes)]
    if len(runs) < 2:
        few = f"a comparison needs at least two runs that have reported {chosen}; there are {len(runs)}"
        raise BadInput("\n".join([*notes, few]))
    for run in runs:
        steps, max_steps = run.history.step, run.settings.get("max_steps")
        if max_steps is not None and steps < max_steps:
            notes.append(f"{run.name} has done {steps} of {max_steps} steps; these are compared.")
    if variants is None:
        groups = _group_runs(runs)
    else:
        names, groups = {path.resolve(): name for path, name in variants.items()}, {}
        for index, run in enumerate(runs):
            groups.setdefault(names[run.root], []).append(index)
    measures = _measures(runs, chosen, evaluation, notes)
    variant_of = {n: name for name, group in groups.items() for n in group}
    first, *others = groups
    comparison = RunComparison(
        metric=chosen,
        at={measure.name: measure.at for measure in measures if measure.at is not None},
        runs=[_report(run, variant_of[n], chosen) for n, run in enumerate(runs)],
        variants=_variants(runs, groups, measures),
        differences=[
            compute_difference(measure.name, measure.values(first, groups[first]), measure.values(other, groups[other]))
            for measure in measures
            for other in others
        ],
        notes=notes,
    )
    curves = {
        measure.name: {name: [measure.curves[n] for n in group] for name, group in groups.items()}
        for measure in measures
        if measure.curves
    }
    return ComparisonWithCurves(comparison, curves)


def curve_of(records: Iterable[Record], history: History, metric: str) -> Curve:
    """Return a metric by step; of steps that a resume repeated, the last value counts."""
    if metric == HELD_OUT:
        return history.held_out()
    for series in (history.steps, history.trained):
        if points := [(step, float(r[metric])) for step, r in series.items() if _is_number(r.get(metric))]:
            return points
    last = max([history.step, *history.steps])
    points = [(int(record["step"]), record[metric]) for record in records if _is_number(record.get(metric))]
    return sorted({step: float(value) for step, value in points if step <= last}.items())


def final_value(curve: Curve, at: int, *, single: bool) -> float:
    """Return the value of a curve at step `at`: the last value if `single`, else the mean of the last few."""
    values = [value for step, value in curve if step <= at] or [curve[0][1]]
    ends = values[-1:] if single else values[-END_STEPS:]
    return fmean(ends)


def smaller_is_better(metric: str) -> bool:
    return any(word in metric for word in SMALLER_IS_BETTER)


def format_setting(value: Any) -> str:
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _read(paths: Sequence[Path], notes: list[str]) -> list[_Run]:
    """Return the runs of these directories; add a note for each that cannot be compared."""
    roots = list(dict.fromkeys((path.parent if path.is_file() else path).resolve() for path in paths))
    runs = []
    for root, name in zip(roots, short_names([*map(str, roots)]), strict=True):
        run = RunDir(root)
        missing = [file.name for file in (run.config, run.metrics) if not file.is_file()]
        if not missing:
            records = Tail(run.metrics).read()
            runs.append(_Run(name, root, settings_of(read_toml(run.config)), History(records), records))
        elif root.is_dir():
            notes.append(f"{root} is left out: not a run directory, or the run has not started; no {missing[0]}.")
        else:
            notes.append(f"{root} is left out: no such directory.")
    return runs


def _has(run: _Run, metric: str, notes: list[str]) -> bool:
    if run.curve(metric):
        return True
    metrics = sorted(key for key in run.history.latest if key.endswith("/all/mean") or "@" in key or key == "loss")
    some = f"it has {', '.join(metrics[:6])}" if metrics else "it has not finished a step"
    notes.append(f"{run.name} is left out: it has not reported {metric}; {some}.")
    return False


def _group_runs(runs: Sequence[_Run]) -> dict[str, list[int]]:
    """Return the indices of runs by variant, named by its run if each has one, else by its settings."""
    groups = group_by_variant([run.settings for run in runs])
    names = [runs[group[0]].name for group in groups]
    if len(groups) < len(runs):
        differing = _differing(runs, groups)
        by_settings = [
            ", ".join(f"{key.rpartition('.')[2]} {format_setting(values[n])}" for key, values in differing.items())
            for n in range(len(groups))
        ]
        if 1 <= len(differing) <= 2 and len(set(by_settings)) == len(groups):
            names = by_settings
        else:  # too many settings for a name
            more = [f" and {len(group) - 1} more" if len(group) > 1 else "" for group in groups]
            names = [name + rest for name, rest in zip(names, more, strict=True)]
    return dict(zip(names, groups, strict=True))


def _differing(runs: Sequence[_Run], groups: Iterable[Sequence[int]]) -> dict[str, list[Any]]:
    """Return the keys in which variants differ, with the value of each variant."""
    by_key = differences([runs[group[0]].settings for group in groups])
    return {key: values for key, values in by_key.items() if key not in SEEDS}


def _variants(runs: Sequence[_Run], groups: dict[str, list[int]], measures: Sequence[_Measure]) -> list[Variant]:
    differing = _differing(runs, groups.values())
    variants = []
    for number, (name, group) in enumerate(groups.items()):
        settings = {key: values[number] for key, values in differing.items()}
        spreads = {}
        for measure in measures:
            ends = [measure.ends[n] for n in group]
            spreads[measure.name] = SeedRange(fmean(ends), min(ends), max(ends))
        variants.append(Variant(name, [runs[n].name for n in group], settings, spreads))
    return variants


def _measures(runs: Sequence[_Run], chosen: str, evaluation: Path | None, notes: list[str]) -> list[_Measure]:
    """Return the chosen metric, held-out scores if all runs have them, and accuracies of `evaluation`."""
    held_out = not is_evaluation(chosen) and all(run.curve(HELD_OUT) for run in runs)
    if held_out and any(run.history.evals.keys() != runs[0].history.evals.keys() for run in runs):
        notes.append("The runs have different evaluation environments: held-out scores are not compared.")
        held_out = False
    metrics = [chosen, HELD_OUT] if held_out else [chosen]
    measures = [
        _measure_evaluations(runs) if metric == HELD_OUT and evaluation is None else _measure_curve(runs, metric)
        for metric in metrics
    ]
    if evaluation is not None:
        scores = read_scores(evaluation, [run.root for run in runs])
        without = [run.name for run, of_run in zip(runs, scores, strict=True) if not of_run]
        if without:
            notes.append(f"{evaluation} has no episodes of {' and '.join(without)}: accuracies are left out.")
        else:
            accuracy = [fmean(of_run.values()) for of_run in scores]
            measures.append(_Measure(ACCURACY, None, accuracy, [], [], scores))
    return measures


def _measure_evaluations(runs: Sequence[_Run]) -> _Measure:
    """Return held-out scores, with scores by example, at the last step whose evaluation every run has saved."""
    saved = [RolloutKind.EVAL.files(RunDir(run.root).rollouts).keys() & dict(run.curve(HELD_OUT)) for run in runs]
    for step in sorted(set.intersection(*saved), reverse=True):
        scores = [read_own_scores(run.root, step, run.history.evals) for run in runs]
        if all(scores):
            return _measure_curve(runs, HELD_OUT, step)._replace(examples=scores)
    return _measure_curve(runs, HELD_OUT)


def _measure_curve(runs: Sequence[_Run], metric: str, at: int | None = None) -> _Measure:
    """Return a metric at step `at`; unset, at the last step that all runs have reached."""
    curves = [run.curve(metric) for run in runs]
    at = min(curve[-1][0] for curve in curves) if at is None else at
    single = is_evaluation(metric)
    steps = [] if single else [[value for step, value in curve if step <= at] for curve in curves]
    return _Measure(metric, at, [final_value(curve, at, single=single) for curve in curves], curves, steps, [])


def _report(run: _Run, variant: str, metric: str) -> RunReport:
    latest, history = run.history.latest, run.history
    return RunReport(
        name=run.name,
        path=str(run.root),
        variant=variant,
        seed=run.settings.get("seed"),
        steps=history.step,
        max_steps=run.settings.get("max_steps"),
        metric=_ends(run.curve(metric), smaller_is_better(metric)),
        seconds=float(latest.get("progress/seconds", history.elapsed)),
        tokens_sampled=int(latest.get("progress/tokens_sampled", 0)),
        tokens_trained=int(latest.get("progress/tokens_trained", 0)),
        evaluations={name: _ends(sorted(scores.items()), False) for name, scores in history.evals.items() if scores},
    )


def _ends(curve: Curve, smaller: bool) -> Ends:
    values = [value for _, value in curve]
    return Ends(values[0], min(values) if smaller else max(values), values[-1])


def is_evaluation(metric: str) -> bool:
    return metric == HELD_OUT or metric.startswith("eval/")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
