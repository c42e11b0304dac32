"""Output of a comparison of runs: text for the terminal, and a page with charts."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

import msgspec

from headrace.observe.chart import comparison_chart
from headrace.observe.status import duration
from headrace.safe_text import escape_line, escape_markdown, markdown_table
from headrace.tools.compare.comparison import (
    ComparisonWithCurves,
    RunComparison,
    RunReport,
    SeedRange,
    format_setting,
    smaller_is_better,
)
from headrace.tools.compare.significance import Difference
from headrace.transport.files import write_atomically

Cells = list[list[str]]
"""A table: its column titles, then its rows."""

SIGNIFICANCE_LEVEL = 0.05
"""Divided by the number of tests (Bonferroni)."""
VERDICTS = {"bootstrap_of_steps": ("larger than the variation between steps", "within the variation between steps")}
"""By method: the verdicts for a p-value below and above the limit, where they are not about significance."""
WIDTH = 100
MAX_CELL_CHARS = 40
"""Longer values are shortened to their end, which distinguishes paths."""


def format_comparison(comparison: RunComparison) -> str:
    """Return the tables and sentences for the terminal."""
    parts = [f"{title}\n{align_table(cells)}" for title, cells in titled_tables(comparison)]
    lines = [*describe_differences(comparison), *comparison.notes]
    filled = [textwrap.fill(f"- {line}", WIDTH, subsequent_indent="  ") for line in lines]
    return "\n\n".join([*parts, "\n".join(filled)])


def write_page(compared: ComparisonWithCurves, directory: Path) -> list[Path]:
    """Write `comparison.md`, `comparison.json` and a chart per metric; return the files, the page first."""
    comparison = compared.comparison
    charts = {
        directory / f"{re.sub(r'[^A-Za-z0-9.-]+', '-', metric)}.svg": comparison_chart(
            f"{metric} over optimizer steps", {name: list(seeds) for name, seeds in curves.items()}, what=metric
        )
        for metric, curves in compared.curves.items()
    }
    files = {
        directory / "comparison.md": format_page(comparison, [path.name for path in charts]),
        directory / "comparison.json": msgspec.json.format(msgspec.json.encode(comparison)).decode() + "\n",
        **charts,
    }
    for path, content in files.items():
        write_atomically(path, content.encode())
    return list(files)


def format_page(comparison: RunComparison, charts: Sequence[str]) -> str:
    lines = [f"# {escape_markdown(', '.join(variant.name for variant in comparison.variants))}", ""]
    for chart in charts:
        lines += [f"![{chart.removesuffix('.svg')} over optimizer steps]({chart})", ""]
    for title, cells in titled_tables(comparison):
        lines += [f"## {escape_markdown(title)}", "", *markdown_table(cells), ""]
    lines += [f"- {escape_markdown(line)}" for line in (*describe_differences(comparison), *comparison.notes)]
    return "\n".join([*lines, ""])


def titled_tables(comparison: RunComparison) -> list[tuple[str, Cells]]:
    """Return the tables that have rows, with their titles."""
    titled = [("What differs", _settings(comparison)), (f"{comparison.metric} by run", _runs(comparison))]
    if any(len(variant.runs) > 1 for variant in comparison.variants):
        titled.append(("Over seeds, at the end", _variants(comparison)))
    return [(title, cells) for title, cells in titled if len(cells) > 1]


def _settings(comparison: RunComparison) -> Cells:
    variants = comparison.variants
    rows = [[key, *(format_setting(variant.settings[key]) for variant in variants)] for key in variants[0].settings]
    seeds = [[run.seed for run in comparison.runs if run.variant == variant.name] for variant in variants]
    if any(of_variant != seeds[0] for of_variant in seeds) or len(seeds[0]) > 1:
        rows.append(["seed", *(", ".join(map(format_setting, of_variant)) for of_variant in seeds)])
    return [["key", *(variant.name for variant in variants)], *rows]


def _runs(comparison: RunComparison) -> Cells:
    best = "lowest" if smaller_is_better(comparison.metric) else "highest"
    evaluated = list(dict.fromkeys(name for run in comparison.runs for name in run.evaluations))
    titles = ["run", "first", best, "last", *(f"held-out {name}" for name in evaluated)]
    return [
        [*titles, "steps", "time", "tokens sampled", "tokens trained"],
        *(_run(run, evaluated) for run in comparison.runs),
    ]


def _run(run: RunReport, evaluated: Sequence[str]) -> list[str]:
    scores = [run.evaluations.get(name) for name in evaluated]
    return [
        run.name,
        *map(format_number, (run.metric.first, run.metric.best, run.metric.last)),
        *("none" if ends is None else f"{format_number(ends.first)} to {format_number(ends.last)}" for ends in scores),
        f"{run.steps}" if run.max_steps in (None, run.steps) else f"{run.steps} of {run.max_steps}",
        duration(run.seconds),
        f"{run.tokens_sampled:,}",
        f"{run.tokens_trained:,}",
    ]


def _variants(comparison: RunComparison) -> Cells:
    metrics = list(comparison.variants[0].ends)
    rows = [
        [variant.name, str(len(variant.runs)), *(format_spread(variant.ends[metric]) for metric in metrics)]
        for variant in comparison.variants
    ]
    return [["variant", "seeds", *metrics], *rows]


def format_spread(spread: SeedRange) -> str:
    return f"{format_number(spread.mean)} ({format_number(spread.lowest)} to {format_number(spread.highest)})"


def describe_differences(comparison: RunComparison) -> list[str]:
    """Return one sentence per difference with its interval and p-value."""
    if not comparison.differences:
        return ["The runs differ only in their seeds: there is a spread, but no difference to test."]
    tested, limit = significance_limit(comparison)
    lines = [
        _sentence(difference, limit, comparison.at.get(difference.metric)) for difference in comparison.differences
    ]
    if tested > 1:
        lines.append(f"{tested} differences were tested, so each is significant only if p < {limit:.2g}.")
    return lines


def significance_limit(comparison: RunComparison) -> tuple[int, float]:
    """Return the number of tests, and the p-value below which each of them is significant."""
    tested = sum(difference.p is not None for difference in comparison.differences)
    return tested, SIGNIFICANCE_LEVEL / max(tested, 1)


def describe_significance(difference: Difference, limit: float) -> str:
    """Return whether the difference is significant, in words; empty if it was not tested."""
    if difference.p is None:
        return ""
    return VERDICTS.get(difference.method, ("significant", "not significant"))[difference.p >= limit]


def _sentence(d: Difference, limit: float, at: int | None) -> str:
    where = "" if at is None else f" at step {at}"
    subject = f"{d.variant} against {d.baseline}, {d.metric}{where}: {format_signed(d.difference)}"
    if d.p is None or d.low is None or d.high is None:
        return f"{subject}; {d.note}."
    interval = f"95% from {format_signed(d.low)} to {format_signed(d.high)}, p = {d.p:.2g}"
    return f"{subject} ({interval}), {describe_significance(d, limit)}. {d.note[0].upper()}{d.note[1:]}."


def align_table(cells: Cells) -> str:
    """Format a table with its first column left-aligned and the others right-aligned."""
    cells = [[escape_line(cell) for cell in row] for row in cells]
    cells = [
        [row[0], *(cell if len(cell) <= MAX_CELL_CHARS else f"...{cell[3 - MAX_CELL_CHARS :]}" for cell in row[1:])]
        for row in cells
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  " + "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in cells
    )


def format_number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:,.0f}"


def format_signed(value: float) -> str:
    return f"{value:+.3f}" if abs(value) < 1000 else f"{value:+,.0f}"
