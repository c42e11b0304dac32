"""The report of a sweep: `report.md`, `report.html`, `results.csv`, `results.json`, and a picture per metric.

It is made from what is there, at any time: runs that have not begun are told as such.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from headrace.errors import BadInput
from headrace.tools.compare.comparison import RunComparison, compare_runs
from headrace.tools.compare.view import align
from headrace.tools.sweep import tables
from headrace.tools.sweep.charts import MOST_LINES, curve_charts, evaluation_charts
from headrace.tools.sweep.page import Section, as_html, as_markdown
from headrace.tools.sweep.record import SweepRecord
from headrace.tools.sweep.results import EVALUATION, Results, RunResult, as_csv, read_results
from headrace.transport.files import write_atomically

SCHEMA = 1


class Report(NamedTuple):
    text: str
    """For the terminal."""
    files: list[Path]


class _Results(msgspec.Struct):
    """`results.json`."""

    schema: int
    files: list[str]
    runs: list[RunResult]
    comparison: RunComparison | None
    failures: list[str]


def write_report(directory: Path, record: SweepRecord, metrics: Sequence[str]) -> Report:
    """`metrics` are those with curves, the first of which decides; none: those that matter."""
    results = read_results(directory, record, metrics)
    comparison, why_none = _compare(directory, results)
    sections = _sections(results, comparison, why_none)
    title, introduction = directory.resolve().name, _introduction(record, results)
    whole = _Results(SCHEMA, record.files, results.runs, comparison, results.failures)
    files = {
        "report.md": as_markdown(title, introduction, sections),
        "report.html": as_html(title, introduction, sections),
        "results.csv": as_csv(results.runs),
        "results.json": msgspec.json.format(msgspec.json.encode(whole)).decode() + "\n",
        **{chart.file: chart.svg for section in sections for chart in section.charts},
    }
    for name, content in files.items():
        write_atomically(directory / name, content.encode())
    return Report(_text(results, comparison, why_none), [directory / name for name in files])


def _compare(directory: Path, results: Results) -> tuple[RunComparison | None, str]:
    """By every metric that has a curve; or why that cannot be."""
    runs = _compared(results)
    variants = {directory / run.name: run.variant for run in runs}
    evaluation = directory / EVALUATION
    metrics = [metric for metric in results.curves if all(metric in run.ends for run in runs)]
    first = next(iter(metrics), None)
    try:
        found = compare_runs([*variants], first, evaluation if evaluation.is_dir() else None, variants).comparison
    except BadInput as error:  # there are less than two runs to compare, as the page then says
        return None, str(error)
    for metric in metrics:
        if metric not in found.at:
            _add(found, compare_runs([*variants], metric, None, variants).comparison, metric)
    left_out = [run for run in results.runs if run not in runs]
    found.notes += [f"{run.name} is {run.state} after {run.steps} steps, and not compared." for run in left_out]
    return found, ""


def _compared(results: Results) -> list[RunResult]:
    """Those that are finished, or before two are, all that have begun: the slowest of these would hold all back."""
    finished = [run for run in results.runs if run.state == "finished" and run.ends]
    return finished if len(finished) > 1 else [run for run in results.runs if run.ends]


def _add(comparison: RunComparison, other: RunComparison, metric: str) -> None:
    """What the same runs came to by another metric."""
    comparison.at[metric] = other.at[metric]
    comparison.differences += [found for found in other.differences if found.metric == metric]
    for variant, same in zip(comparison.variants, other.variants, strict=True):
        variant.ends[metric] = same.ends[metric]


def _introduction(record: SweepRecord, results: Results) -> str:
    states = Counter(run.state for run in results.runs)
    told = ", ".join(f"{count} {state}" for state, count in states.items())
    variants = len({run.variant for run in results.runs})
    return f"{len(results.runs)} runs of {variants} variants ({told}), from {', '.join(record.files)}."


def _sections(results: Results, comparison: RunComparison | None, why_none: str) -> list[Section]:
    failed = [f"{run.name}: {run.failure}" for run in results.runs if run.state == "failed"]
    notes = [*failed, *(comparison.notes if comparison is not None else [why_none])]
    found = [Section("Curves", curve_charts(results), notes=_left_out(results))]
    if comparison is not None:
        found.append(Section("Variants", cells=tables.variants(comparison, results)))
        cells, tests = tables.against_first(comparison)
        found.append(Section(f"Against {comparison.variants[0].name}", cells=cells, notes=tests))
    evaluated = Section("Accuracy and length", evaluation_charts(results), tables.evaluation(results), results.failures)
    found += [evaluated, Section("Settings", cells=tables.settings(results.runs))]
    found.append(Section("Runs", cells=tables.by_run(results), notes=notes))
    return [section for section in found if section.charts or section.cells or section.notes]


def _left_out(results: Results) -> list[str]:
    """Variants that no chart of curves shows."""
    metric, curves = next(iter(results.curves.items()), ("", {}))
    if len(curves) <= MOST_LINES:
        return []
    return [f"Of {len(curves)} variants, the charts show the {MOST_LINES} best by {metric}."]


def _text(results: Results, comparison: RunComparison | None, why_none: str) -> str:
    parts = [align(tables.by_run(results))]
    parts.append(why_none if comparison is None else align(tables.variants(comparison, results)))
    return "\n\n".join(parts)
