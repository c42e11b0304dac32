"""The pictures of a sweep: curves with their bands over seeds, accuracy by variant, and accuracy against length."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from headrace.observe.chart import comparison_chart
from headrace.observe.metrics import Curve
from headrace.tools.compare.comparison import smaller_is_better
from headrace.tools.evaluate.charts import accuracy_chart, length_chart
from headrace.tools.evaluate.report import LENGTHS
from headrace.tools.evaluate.results import Estimate, choose_score
from headrace.tools.sweep.results import Results, RunResult

MOST_LINES = 12
"""Variants in a chart of curves, the best ones; more cannot be told from each other."""
BAND = "mean over seeds; bar: from the lowest to the highest"


class Chart(NamedTuple):
    file: str
    title: str
    svg: str


def curve_charts(results: Results) -> list[Chart]:
    """One for each metric."""
    shown = best(results)
    return [_curves(metric, curves, shown) for metric, curves in results.curves.items()]


def _curves(metric: str, curves: Mapping[str, Sequence[Curve]], shown: Sequence[str]) -> Chart:
    chosen = {name: list(seeds) for name, seeds in curves.items() if name in shown}
    title = f"{metric} over optimizer steps"
    title += f" ({len(chosen)} of {len(curves)})" if len(chosen) < len(curves) else ""
    return Chart(f"{re.sub(r'[^A-Za-z0-9.-]+', '-', metric)}.svg", title, comparison_chart(title, chosen, what=metric))


def best(results: Results) -> list[str]:
    """The variants that have curves: those whose runs came to the most, or the least, by the first metric."""
    if not results.curves:
        return []
    metric, curves = next(iter(results.curves.items()))
    known = [run for run in results.runs if metric in run.ends]
    ends = {name: [run.ends[metric] for run in known if run.variant == name] for name in curves}
    sign = 1 if smaller_is_better(metric) else -1
    return sorted(curves, key=lambda name: sign * sum(ends[name]) / len(ends[name]))[:MOST_LINES]


def evaluation_charts(results: Results) -> list[Chart]:
    """Of the variants whose models were evaluated."""
    known = [run for run in results.runs if run.evaluation]
    score = choose_score([run.evaluation for run in known], results.samples)
    scores = by_variant(known, lambda run: run.evaluation.get(score.measure))
    if not scores:
        return []
    what, file = score.name.capitalize(), score.name.split()[-1]
    title = f"{what} by variant"
    several = any(count > 1 for count in _counts(results.runs).values())
    format_spread = f"{score.name}, {BAND}" if several else f"{score.name}, with its 95% interval"
    charts = [Chart(f"{file}.svg", title, accuracy_chart(title, list(scores.items()), format_spread))]
    measure = next((name for name in LENGTHS if all(name in run.evaluation for run in known)), None)
    if measure is not None:
        lengths = by_variant(known, lambda run: run.evaluation.get(measure))
        points = [(name, lengths[name], found) for name, found in scores.items()]
        title = f"{what} against length, and the frontier"
        bars = "from the lowest to the highest seed" if several else "95% intervals"
        picture = length_chart(title, f"{LENGTHS[measure]}, mean", points, bars, score.name)
        charts.append(Chart(f"{file}-length.svg", title, picture))
    return charts


def by_variant(runs: Sequence[RunResult], read: Callable[[RunResult], Estimate | None]) -> dict[str, Estimate]:
    """The mean over the runs of a variant that have it, with the lowest and the highest; of a single run as it is."""
    found: dict[str, list[Estimate]] = {}
    for run in runs:
        if (estimate := read(run)) is not None:
            found.setdefault(run.variant, []).append(estimate)
    return {name: _pooled(several) for name, several in found.items()}


def _pooled(several: Sequence[Estimate]) -> Estimate:
    if len(several) == 1:
        return several[0]
    values = [each.value for each in several]
    return Estimate(sum(values) / len(values), min(values), max(values))


def _counts(runs: Sequence[RunResult]) -> dict[str, int]:
    """By variant, its runs that were evaluated."""
    found: dict[str, int] = {}
    for run in runs:
        if run.evaluation:
            found[run.variant] = found.get(run.variant, 0) + 1
    return found
