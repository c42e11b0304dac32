"""A comparison of runs for people: text for the terminal, and a page with curves."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

import msgspec

from headrace.observe.chart import comparison_chart
from headrace.observe.summary import duration
from headrace.tools.compare.comparison import Compared, Comparison, RunReport, Spread, shown, smaller_is_better
from headrace.tools.compare.difference import Difference
from headrace.transport.files import write_atomically

Cells = list[list[str]]
"""A table: its titles, then its rows."""

SIGNIFICANT = 0.05
"""The p below which a difference is called so, divided by how many are tested."""
VERDICTS = {"bootstrap_of_steps": ("more than steps vary by", "within what steps vary by")}
"""By method, where seeds were not what was tested over: in words, whether p is below that."""
WIDTH = 100
LONGEST = 40
"""Characters of a value in the terminal; of a longer one the end is shown, which tells paths apart."""


def text(comparison: Comparison) -> str:
    """For the terminal."""
    parts = [f"{title}\n{aligned(cells)}" for title, cells in tables(comparison)]
    told = [*sentences(comparison), *comparison.notes]
    return "\n\n".join([*parts, "\n".join(textwrap.fill(f"- {line}", WIDTH, subsequent_indent="  ") for line in told)])


def write_page(compared: Compared, directory: Path) -> list[Path]:
    """`comparison.md` with a chart per metric, and `comparison.json`; returns the files, the page first."""
    comparison = compared.comparison
    charts = {
        directory / f"{re.sub(r'[^A-Za-z0-9.-]+', '-', metric)}.svg": comparison_chart(
            f"{metric} over optimizer steps", {name: list(seeds) for name, seeds in curves.items()}, what=metric
        )
        for metric, curves in compared.curves.items()
    }
    files = {
        directory / "comparison.md": page(comparison, [path.name for path in charts]),
        directory / "comparison.json": msgspec.json.format(msgspec.json.encode(comparison)).decode() + "\n",
        **charts,
    }
    for path, content in files.items():
        write_atomically(path, content.encode())
    return list(files)


def page(comparison: Comparison, charts: Sequence[str]) -> str:
    lines = [f"# {', '.join(variant.name for variant in comparison.variants)}", ""]
    for chart in charts:
        lines += [f"![{chart.removesuffix('.svg')} over optimizer steps]({chart})", ""]
    for title, cells in tables(comparison):
        lines += [f"## {title}", "", *markdown(cells), ""]
    lines += [f"- {line}" for line in (*sentences(comparison), *comparison.notes)]
    return "\n".join([*lines, ""])


def tables(comparison: Comparison) -> list[tuple[str, Cells]]:
    """Each with its title, as far as there is anything to tell."""
    found = [("What differs", _settings(comparison)), (f"{comparison.metric} by run", _runs(comparison))]
    if any(len(variant.runs) > 1 for variant in comparison.variants):
        found.append(("Over seeds, at the end", _variants(comparison)))
    return [(title, cells) for title, cells in found if len(cells) > 1]


def _settings(comparison: Comparison) -> Cells:
    variants = comparison.variants
    rows = [[key, *(shown(variant.settings[key]) for variant in variants)] for key in variants[0].settings]
    seeds = [[run.seed for run in comparison.runs if run.variant == variant.name] for variant in variants]
    if any(given != seeds[0] for given in seeds) or len(seeds[0]) > 1:
        rows.append(["seed", *(", ".join(map(shown, given)) for given in seeds)])
    return [["key", *(variant.name for variant in variants)], *rows]


def _runs(comparison: Comparison) -> Cells:
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
        *map(number, (run.metric.first, run.metric.best, run.metric.last)),
        *("none" if ends is None else f"{number(ends.first)} to {number(ends.last)}" for ends in scores),
        f"{run.steps}" if run.max_steps in (None, run.steps) else f"{run.steps} of {run.max_steps}",
        duration(run.seconds),
        f"{run.tokens_sampled:,}",
        f"{run.tokens_trained:,}",
    ]


def _variants(comparison: Comparison) -> Cells:
    metrics = list(comparison.variants[0].ends)
    rows = [
        [variant.name, str(len(variant.runs)), *(band(variant.ends[metric]) for metric in metrics)]
        for variant in comparison.variants
    ]
    return [["variant", "seeds", *metrics], *rows]


def band(spread: Spread) -> str:
    return f"{number(spread.mean)} ({number(spread.lowest)} to {number(spread.highest)})"


def sentences(comparison: Comparison) -> list[str]:
    """What the differences are, and how sure."""
    if not comparison.differences:
        return ["The runs differ in nothing but their seeds: there is a spread, and no difference to test."]
    tested, limit = limit_of(comparison)
    told = [_sentence(found, limit, comparison.at.get(found.metric)) for found in comparison.differences]
    if tested > 1:
        told.append(f"{tested} differences were tested, so that a p below {limit:.2g} is asked of each.")
    return told


def limit_of(comparison: Comparison) -> tuple[int, float]:
    """How many differences were tested, and the p that is asked of each of them."""
    tested = sum(found.p is not None for found in comparison.differences)
    return tested, SIGNIFICANT / max(tested, 1)


def verdict(found: Difference, limit: float) -> str:
    """Whether it is more than chance, in words; nothing where nothing could be tested."""
    return "" if found.p is None else VERDICTS.get(found.method, ("significant", "not significant"))[found.p >= limit]


def _sentence(found: Difference, limit: float, at: int | None) -> str:
    where = "" if at is None else f" at step {at}"
    what = f"{found.variant} against {found.baseline}, {found.metric}{where}: {signed(found.difference)}"
    if found.p is None or found.low is None or found.high is None:
        return f"{what}; {found.note}."
    interval = f"95% from {signed(found.low)} to {signed(found.high)}, p = {found.p:.2g}"
    return f"{what} ({interval}), {verdict(found, limit)}. {found.note[0].upper()}{found.note[1:]}."


def aligned(cells: Cells) -> str:
    """Names to the left, all else to the right."""
    cells = [
        [row[0], *(cell if len(cell) <= LONGEST else f"...{cell[3 - LONGEST :]}" for cell in row[1:])] for row in cells
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  " + "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in cells
    )


def markdown(cells: Cells) -> list[str]:
    """A table's lines."""
    titles, *rows = cells
    return ["| " + " | ".join(map(_escaped, row)) + " |" for row in (titles, ["---"] * len(titles), *rows)]


def _escaped(cell: str) -> str:
    return cell.replace("|", r"\|")


def number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:,.0f}"


def signed(value: float) -> str:
    return f"{value:+.3f}" if abs(value) < 1000 else f"{value:+,.0f}"
