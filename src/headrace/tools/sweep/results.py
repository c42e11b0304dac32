"""The results of a sweep, read from its run directories: numbers per run, curves per variant, and their charts."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headrace.observe.chart import comparison_chart
from headrace.observe.metrics import Curve, History, Tail
from headrace.tools.compare.comparison import (
    HELD_OUT,
    PREFERRED,
    curve_of,
    final_value,
    is_evaluation,
    smaller_is_better,
)
from headrace.tools.evaluate.report import LENGTHS, accuracy_chart, length_chart
from headrace.tools.evaluate.results import Estimate, ModelResult, choose_score
from headrace.tools.sweep.record import State, SweepRecord, state_of
from headrace.transport.run_dir import RunDir

EVALUATION = "eval"
"""The folder of the evaluation."""
LENGTH_METRICS = ("metrics/all/thinking_tokens", "metrics/all/thinking_words", "decode_len/all/mean")
"""Lengths of replies: the first that a run has reported is shown by default."""
MAX_CURVES = 12
"""Variants in a chart of curves, the best ones."""


class RunResult(msgspec.Struct):
    """The numbers of one run."""

    name: str
    variant: str
    seed: int | None
    values: dict[str, Any]
    state: State
    steps: int = 0
    max_steps: int | None = None
    seconds: float = 0.0
    tokens_sampled: int = 0
    tokens_trained: int = 0
    ends: dict[str, float] = msgspec.field(default_factory=dict)
    """By metric: the mean of its last steps, or its last evaluation."""
    evaluation: dict[str, Estimate] = msgspec.field(default_factory=dict)
    """By measure, of its final model."""
    failure: str = ""


class Results(NamedTuple):
    """The numbers and curves of a sweep's runs."""

    runs: list[RunResult]
    curves: dict[str, dict[str, list[Curve]]]
    """By metric and variant, one per run that has reported it."""
    samples: int
    """Samples per example of the evaluation; 0 without evaluation."""
    failures: list[str]
    """Models that could not be evaluated, with the reason."""

    @property
    def evaluated(self) -> list[RunResult]:
        return [run for run in self.runs if run.evaluation]

    def estimates(self, measure: str) -> dict[str, Estimate]:
        """Return a measure by variant: the mean over its runs with the lowest and highest, or that of its only run."""
        by_variant: dict[str, list[Estimate]] = {}
        for run in self.evaluated:
            if measure in run.evaluation:
                by_variant.setdefault(run.variant, []).append(run.evaluation[measure])
        estimates = {}
        for variant, several in by_variant.items():
            values = [each.value for each in several]
            pooled = Estimate(sum(values) / len(values), min(values), max(values))
            estimates[variant] = pooled if len(several) > 1 else several[0]
        return estimates


class Chart(NamedTuple):
    file: str
    title: str
    svg: str


class _Evaluation(msgspec.Struct):
    models: list[ModelResult]


def read_results(directory: Path, record: SweepRecord, metrics: Sequence[str]) -> Results:
    """Read the planned runs, in order; `metrics` are those with curves, empty: the default ones."""
    records = {run.name: Tail(RunDir(directory / run.name).metrics).read() for run in record.planned}
    histories = {name: History(lines) for name, lines in records.items()}

    def curve(name: str, metric: str) -> Curve:
        return curve_of(records[name], histories[name], metric)

    begun = [name for name, history in histories.items() if history.moves]
    shown = list(metrics) or _default_metrics(begun, curve)
    evaluated: dict[Path, ModelResult] = {}
    if (path := directory / EVALUATION / "results.json").is_file():
        models = msgspec.json.decode(path.read_bytes(), type=_Evaluation).models
        evaluated = {Path(model.source).resolve().parent: model for model in models}
    runs = []
    curves: dict[str, dict[str, list[Curve]]] = {}
    for run in record.planned:
        history = histories[run.name]
        result = RunResult(
            run.name,
            run.variant,
            run.seed,
            run.values,
            state_of(run, directory),
            history.step,
            run.max_steps,
            seconds=float(history.latest.get("progress/seconds", history.elapsed if history.moves else 0.0)),
            tokens_sampled=int(history.latest.get("progress/tokens_sampled", 0)),
            tokens_trained=int(history.latest.get("progress/tokens_trained", 0)),
            failure=run.failure,
        )
        for metric in shown:
            if points := curve(run.name, metric):
                curves.setdefault(metric, {}).setdefault(run.variant, []).append(points)
                result.ends[metric] = final_value(points, points[-1][0], single=is_evaluation(metric))
        if model := evaluated.get((directory / run.name).resolve()):
            result.evaluation = model.estimates
        runs.append(result)
    return Results(
        runs,
        {metric: curves[metric] for metric in shown if metric in curves},
        max((model.samples for model in evaluated.values()), default=0),
        [f"{model.name} was not evaluated: {model.failure}" for model in evaluated.values() if model.failure],
    )


def _default_metrics(runs: Sequence[str], curve: Callable[[str, str], Curve]) -> list[str]:
    """Return the preferred metric that all runs have, held-out scores, and a length."""
    chosen = [metric for metric in PREFERRED if runs and all(curve(run, metric) for run in runs)][:1]
    held_out = [HELD_OUT] if any(curve(run, HELD_OUT) for run in runs) else []
    return chosen + held_out + [metric for metric in LENGTH_METRICS if any(curve(run, metric) for run in runs)][:1]


def format_csv(runs: Sequence[RunResult]) -> str:
    """Return a row per run with its settings and numbers."""
    keys = list(dict.fromkeys(key for run in runs for key in run.values))
    metrics = list(dict.fromkeys(metric for run in runs for metric in run.ends))
    measures = list(dict.fromkeys(measure for run in runs for measure in run.evaluation))
    numbers = ["steps", "max_steps", "seconds", "tokens_sampled", "tokens_trained"]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    intervals = [column for name in measures for column in (f"eval/{name}", f"eval/{name}_low", f"eval/{name}_high")]
    writer.writerow(["run", "variant", "seed", *keys, "state", *numbers, *metrics, *intervals, "failure"])
    for run in runs:
        row: list[object] = [run.name, run.variant, run.seed, *(run.values.get(key) for key in keys), run.state]
        row += [getattr(run, name) for name in numbers]
        row += [run.ends.get(metric) for metric in metrics]
        for name in measures:
            row += msgspec.structs.astuple(run.evaluation[name]) if name in run.evaluation else [None] * 3
        writer.writerow([*row, run.failure])
    return file.getvalue()


def curve_charts(results: Results) -> list[Chart]:
    """Return a chart per metric with a line per variant: the mean over its seeds with a band."""
    shown = _best_variants(results)
    charts = []
    for metric, curves in results.curves.items():
        chosen = {name: seeds for name, seeds in curves.items() if name in shown}
        title = f"{metric} over optimizer steps"
        title += f" ({len(chosen)} of {len(curves)})" if len(chosen) < len(curves) else ""
        file = f"{re.sub(r'[^A-Za-z0-9.-]+', '-', metric)}.svg"
        charts.append(Chart(file, title, comparison_chart(title, chosen, what=metric)))
    return charts


def _best_variants(results: Results) -> list[str]:
    """Return at most `MAX_CURVES` variants, the best by the first metric."""
    if not results.curves:
        return []
    metric, curves = next(iter(results.curves.items()))
    ends: dict[str, list[float]] = {name: [] for name in curves}
    for run in results.runs:
        if metric in run.ends:
            ends[run.variant].append(run.ends[metric])
    sign = 1 if smaller_is_better(metric) else -1
    return sorted(curves, key=lambda name: sign * sum(ends[name]) / len(ends[name]))[:MAX_CURVES]


def evaluation_charts(results: Results) -> list[Chart]:
    """Return accuracy by variant, and accuracy against length; empty without evaluation."""
    runs = results.evaluated
    score = choose_score([run.evaluation for run in runs], results.samples)
    scores = results.estimates(score.measure)
    if not scores:
        return []
    name, file = score.name.capitalize(), score.name.split()[-1]
    has_seeds = len({run.variant for run in runs}) < len(runs)
    title = f"{name} by variant"
    spread = "mean over seeds; bar: from the lowest to the highest" if has_seeds else "with its 95% interval"
    charts = [Chart(f"{file}.svg", title, accuracy_chart(title, list(scores.items()), f"{score.name}, {spread}"))]
    measure = next((name for name in LENGTHS if all(name in run.evaluation for run in runs)), None)
    if measure is not None:
        lengths = results.estimates(measure)
        points = [(variant, lengths[variant], estimate) for variant, estimate in scores.items()]
        title = f"{name} against length, and the frontier"
        bars = "from the lowest to the highest seed" if has_seeds else "95% intervals"
        svg = length_chart(title, f"{LENGTHS[measure]}, mean", points, bars, score.name)
        charts.append(Chart(f"{file}-length.svg", title, svg))
    return charts
