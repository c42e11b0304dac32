"""The report of a sweep: `report.md`, `report.html`, `results.csv`, `results.json`, and charts.

It can be written at any time; runs that have not begun are listed as waiting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from headrace.errors import BadInput
from headrace.observe.status import duration
from headrace.safe_text import escape_markdown, escape_xml, markdown_table
from headrace.tools.compare.comparison import RunComparison, compare_runs
from headrace.tools.compare.significance import Difference
from headrace.tools.compare.view import (
    Cells,
    align_table,
    describe_significance,
    format_number,
    format_signed,
    format_spread,
    significance_limit,
)
from headrace.tools.evaluate.report import SHOWN_MEASURES
from headrace.tools.sweep.plan import format_value
from headrace.tools.sweep.record import SweepRecord
from headrace.tools.sweep.results import (
    EVALUATION,
    MAX_CURVES,
    Chart,
    Results,
    RunResult,
    curve_charts,
    evaluation_charts,
    format_csv,
    read_results,
)
from headrace.transport.files import write_atomically

SCHEMA = 1
STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; max-width: 72rem;
  margin: 2rem auto; padding: 0 1rem; }
svg { max-width: 100%; height: auto; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid rgb(125 133 144 / 25%); text-align: right;
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
pre { overflow-x: auto; }
"""


class SweepReport(NamedTuple):
    text: str
    """For the terminal."""
    files: list[Path]


class Section(NamedTuple):
    """A part of the report: its charts, its table and its notes."""

    title: str
    charts: Sequence[Chart] = ()
    cells: Cells | None = None
    notes: Sequence[str] = ()


class _ResultsFile(msgspec.Struct):
    """`results.json`."""

    schema: int
    files: list[str]
    runs: list[RunResult]
    comparison: RunComparison | None
    failures: list[str]


def write_report(directory: Path, record: SweepRecord, metrics: Sequence[str]) -> SweepReport:
    """Write all files; `metrics` are those with curves, the first of which ranks variants, empty: the default ones."""
    results = read_results(directory, record, metrics)
    comparison, problem = _compare(directory, results)
    sections = _sections(results, comparison, problem)
    states = Counter(run.state for run in results.runs)
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    variants = len({run.variant for run in results.runs})
    introduction = f"{len(results.runs)} runs of {variants} variants ({counts}), from {', '.join(record.files)}."
    title = directory.resolve().name
    whole = _ResultsFile(SCHEMA, record.files, results.runs, comparison, results.failures)
    files = {
        "report.md": format_markdown(title, introduction, sections),
        "report.html": format_html(title, introduction, sections),
        "results.csv": format_csv(results.runs),
        "results.json": msgspec.json.format(msgspec.json.encode(whole)).decode() + "\n",
        **{chart.file: chart.svg for section in sections for chart in section.charts},
    }
    for name, content in files.items():
        write_atomically(directory / name, content.encode())
    summary = problem if comparison is None else align_table(variant_table(comparison, results))
    return SweepReport(f"{align_table(run_table(results))}\n\n{summary}", [directory / name for name in files])


def _compare(directory: Path, results: Results) -> tuple[RunComparison | None, str]:
    """Compare variants by every metric with a curve; without enough runs, return the reason instead.

    Finished runs are compared or, before there are two, all that have begun.
    """
    finished = [run for run in results.runs if run.state == "finished" and run.ends]
    runs = finished if len(finished) > 1 else [run for run in results.runs if run.ends]
    variants = {directory / run.name: run.variant for run in runs}
    evaluation = directory / EVALUATION
    metrics = [metric for metric in results.curves if all(metric in run.ends for run in runs)]
    first = next(iter(metrics), None)
    try:
        comparison = compare_runs([*variants], first, evaluation if evaluation.is_dir() else None, variants).comparison
    except BadInput as error:  # fewer than two runs
        return None, str(error)
    for metric in metrics:
        if metric not in comparison.at:
            other = compare_runs([*variants], metric, None, variants).comparison
            comparison.at[metric] = other.at[metric]
            comparison.differences += [difference for difference in other.differences if difference.metric == metric]
            for variant, same in zip(comparison.variants, other.variants, strict=True):
                variant.ends[metric] = same.ends[metric]
    left_out = [run for run in results.runs if run not in runs]
    comparison.notes += [f"{run.name} is {run.state} after {run.steps} steps, and not compared." for run in left_out]
    return comparison, ""


def _sections(results: Results, comparison: RunComparison | None, problem: str) -> list[Section]:
    """Return the sections that have content."""
    metric, curves = next(iter(results.curves.items()), ("", {}))
    hidden = [f"Of {len(curves)} variants, the charts show the {MAX_CURVES} best by {metric}."]
    sections = [Section("Curves", curve_charts(results), notes=hidden if len(curves) > MAX_CURVES else [])]
    if comparison is not None:
        sections.append(Section("Variants", cells=variant_table(comparison, results)))
        sections.append(_differences(comparison))
    evaluated = Section("Accuracy and length", evaluation_charts(results), _evaluation_table(results), results.failures)
    sections += [evaluated, Section("Settings", cells=_settings_table(results.runs))]
    failed = [f"{run.name}: {run.failure}" for run in results.runs if run.state == "failed"]
    notes = [*failed, *(comparison.notes if comparison is not None else [problem])]
    sections.append(Section("Runs", cells=run_table(results), notes=notes))
    return [section for section in sections if section.charts or section.cells or section.notes]


def variant_table(comparison: RunComparison, results: Results) -> Cells:
    """Return the final values of each variant, and the p-value of its difference from the first."""
    metrics = list(comparison.variants[0].ends)
    tests = {
        difference.variant: difference
        for difference in comparison.differences
        if difference.metric == comparison.metric
    }
    has_seeds = any(len(variant.runs) > 1 for variant in comparison.variants)
    rows = []
    for variant in comparison.variants:
        ends = [variant.ends[metric] for metric in metrics]
        cells = [format_spread(end) if has_seeds else format_number(end.mean) for end in ends]
        planned = sum(run.variant == variant.name for run in results.runs)
        p = _p(tests[variant.name]) if variant.name in tests else ""
        rows.append([variant.name, f"{len(variant.runs)} of {planned}", *cells, p])
    return [["variant", "runs", *metrics, f"p of {comparison.metric}"], *rows]


def _differences(comparison: RunComparison) -> Section:
    """Return a table of every difference from the first variant, and notes on the tests; empty for one variant."""
    title = f"Against {comparison.variants[0].name}"
    if not comparison.differences:
        return Section(title)
    tested, limit = significance_limit(comparison)
    rows = []
    for difference in comparison.differences:
        at = comparison.at.get(difference.metric)
        metric = difference.metric if at is None else f"{difference.metric} at step {at}"
        ends = [format_signed(end) for end in (difference.low, difference.high) if end is not None]
        cells = [difference.variant, metric, format_signed(difference.difference), " to ".join(ends), _p(difference)]
        rows.append([*cells, describe_significance(difference, limit)])
    notes = list(
        dict.fromkeys(f"{difference.note[0].upper()}{difference.note[1:]}." for difference in comparison.differences)
    )
    if tested > 1:
        notes.append(f"{tested} differences were tested, so that a p below {limit:.2g} is asked of each.")
    return Section(title, cells=[["variant", "metric", "difference", "95%", "p", ""], *rows], notes=notes)


def _p(difference: Difference) -> str:
    return "" if difference.p is None else f"{difference.p:.2g}"


def _evaluation_table(results: Results) -> Cells:
    """Return the means over the evaluated runs of each variant."""
    runs = results.evaluated
    if not runs:
        return []
    rates = dict.fromkeys(name for run in runs for name in run.evaluation if "@" in name)
    measures = [*rates, *(name for name in SHOWN_MEASURES if any(name in run.evaluation for run in runs))]
    means = {name: results.estimates(name) for name in measures}
    digits = {name: 1 if name == "tokens" or "thinking" in name else 3 for name in measures}
    rows = [
        [
            variant,
            str(models),
            *(f"{means[m][variant].value:.{digits[m]}f}" if variant in means[m] else "" for m in measures),
        ]
        for variant, models in Counter(run.variant for run in runs).items()
    ]
    return [["variant", "models", *measures], *rows]


def _settings_table(runs: Sequence[RunResult]) -> Cells:
    """Return the settings of each variant; empty if all names of variants contain them."""
    keys = list(dict.fromkeys(key for run in runs for key in run.values))
    by_variant = {run.variant: run.values for run in runs}
    if all("=" in variant or not values for variant, values in by_variant.items()):
        return []
    rows = [
        [name, *(format_value(values[key]) if key in values else "" for key in keys)]
        for name, values in by_variant.items()
    ]
    return [["variant", *keys], *rows]


def run_table(results: Results) -> Cells:
    metrics = list(results.curves)
    rows = [
        [
            run.name,
            run.state,
            str(run.steps) if run.max_steps in (None, run.steps) else f"{run.steps} of {run.max_steps}",
            *(format_number(run.ends[metric]) if metric in run.ends else "" for metric in metrics),
            duration(run.seconds),
        ]
        for run in results.runs
    ]
    return [["run", "state", "steps", *metrics, "time"], *rows]


def format_markdown(title: str, introduction: str, sections: Sequence[Section]) -> str:
    """Return a page with links to its charts."""
    lines = [f"# {escape_markdown(title)}", "", escape_markdown(introduction), ""]
    for section in sections:
        lines += [f"## {escape_markdown(section.title)}", ""]
        for chart in section.charts:
            lines += [f"![{escape_markdown(chart.title)}]({chart.file})", ""]
        if section.cells:
            lines += [*markdown_table(section.cells), ""]
        for note in section.notes:
            first, *rest = map(escape_markdown, note.split("\n"))
            lines += [f"- {first}", *([""] if rest else []), *(f"  {line}" for line in rest)]
        lines += [""] if section.notes else []
    return "\n".join(lines)


def format_html(title: str, introduction: str, sections: Sequence[Section]) -> str:
    """Return a page in one file that contains its charts."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape_xml(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape_xml(title)}</h1><p>{escape_xml(introduction)}</p>",
    ]
    for section in sections:
        parts.append(f"<h2>{escape_xml(section.title)}</h2>")
        parts += [f"<figure>{chart.svg}</figure>" for chart in section.charts]
        parts += [_html_table(section.cells)] if section.cells else []
        parts += ["<ul>", *map(_html_note, section.notes), "</ul>"] if section.notes else []
    return "\n".join([*parts, "</body></html>", ""])


def _html_table(cells: Cells) -> str:
    titles, *rows = cells
    head = "".join(f"<th>{escape_xml(cell)}</th>" for cell in titles)
    body = "\n".join("<tr>" + "".join(f"<td>{escape_xml(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _html_note(note: str) -> str:
    first, *rest = note.splitlines()
    block = f"<pre>{escape_xml(chr(10).join(rest))}</pre>" if rest else ""
    return f"<li>{escape_xml(first)}{block}</li>"
