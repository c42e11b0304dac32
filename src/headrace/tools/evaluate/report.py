"""Output of an evaluation: `results.json`, `results.csv`, charts, tables for the terminal, and progress bars."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from headrace.observe.chart import (
    COLORS,
    LABEL_SPACING,
    WIDTH,
    Box,
    Plot,
    document,
    rule,
    same_digits,
    stroke,
    text,
    ticks,
)
from headrace.tools.common import short_names
from headrace.tools.evaluate.evaluation import ShowProgress
from headrace.tools.evaluate.results import Estimate, ModelResult, Spread, choose_score
from headrace.transport.files import write_atomically

SCHEMA = 1
SHOWN_MEASURES = ("format", "tokens", "thinking_tokens", "thinking_words", "truncated", "failed")
"""Measures of the table besides avg@k and pass@k, if any model has them."""

LENGTHS = {
    "thinking_tokens": "tokens of thinking",
    "tokens": "tokens of the reply",
    "thinking_words": "words of thinking",
}
"""Measures of the length chart: the first that all models have is used."""


def write_report(output: Path, title: str, about: dict[str, Any], results: Sequence[ModelResult]) -> list[Path]:
    """Write the results and charts; `about` is added to `results.json`. Return the files."""
    whole = {"schema": SCHEMA, **about, "models": [msgspec.to_builtins(result) for result in results]}
    files = {
        "results.json": msgspec.json.format(msgspec.json.encode(whole)).decode() + "\n",
        "results.csv": format_csv(results),
    }
    succeeded = [result for result in results if not result.failure]
    if succeeded:
        score = choose_score([result.estimates for result in succeeded], succeeded[0].samples)
        file = score.name.split()[-1]
        rows = [(result.name, result.estimates[score.measure]) for result in succeeded]
        files[f"{file}.svg"] = accuracy_chart(title, rows, f"{score.name}, with its 95% interval")
        measure = next((name for name in LENGTHS if all(name in result.estimates for result in succeeded)), None)
        files |= {f"curve-{name}.svg": chart for name, chart in curve_charts(title, succeeded).items()}
        if measure is not None:
            points = [(r.name, r.estimates[measure], r.estimates[score.measure]) for r in succeeded]
            files[f"{file}-length.svg"] = length_chart(title, f"{LENGTHS[measure]}, mean", points, score=score.name)
    for name, content in files.items():
        write_atomically(output / name, content.encode())
    return [output / name for name in files]


def format_csv(results: Sequence[ModelResult]) -> str:
    """Return a row per model: measures with their intervals, quantiles of lengths, and failures by reason."""
    measures = list(dict.fromkeys(measure for result in results for measure in result.estimates))
    reasons = sorted({reason for result in results for reason in result.errors})
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    ends = [column for measure in measures for column in (measure, f"{measure}_low", f"{measure}_high")]
    lengths = [measure for measure in measures if any(measure in result.lengths for result in results)]
    ends += [f"{measure}_{field}" for measure in lengths for field in Spread.__struct_fields__]
    errors = [f"error/{reason}" for reason in reasons]
    writer.writerow(["model", "source", "examples", "samples", *ends, *errors, "failure"])
    for result in results:
        row: list[object] = [result.name, result.source, result.examples, result.samples]
        for measure in measures:
            estimate = result.estimates.get(measure)
            row += ["", "", ""] if estimate is None else [estimate.value, estimate.low, estimate.high]
        for measure in lengths:
            row += [getattr(result.lengths.get(measure), field, "") for field in Spread.__struct_fields__]
        row += [result.errors.get(reason, 0) for reason in reasons]
        writer.writerow([*row, result.failure])
    return file.getvalue()


def score_table(title: str, results: Sequence[ModelResult]) -> Table:
    """Return a table with a row per model."""
    succeeded = [result for result in results if not result.failure]
    rates = list(dict.fromkeys(name for result in succeeded for name in result.estimates if "@" in name))
    columns = [*rates, *(name for name in SHOWN_MEASURES if any(name in result.estimates for result in succeeded))]

    def cell(result: ModelResult, name: str) -> str:
        if (estimate := result.estimates.get(name)) is None:
            return ""
        if name == "tokens" or "thinking" in name:
            return f"{estimate.value:.1f}"
        interval = f" [{estimate.low:.3f}, {estimate.high:.3f}]" if name.startswith("avg@") else ""
        return f"{estimate.value:.3f}{interval}"

    table = Table(Column("model", overflow="fold"), title=Text(title))
    for name in columns:
        table.add_column(name, justify="right")
    for result in succeeded:
        table.add_row(Text(result.name), *(cell(result, name) for name in columns))
    return table


def sampling_line(about: Mapping[str, Any]) -> str:
    """Return the sampling settings in one line, without rarely used ones that are not set."""
    always = {key: about["sampling"][key] for key in ("temperature", "top_p", "max_tokens")}
    rare = {key: about["sampling"][key] for key in ("top_k", "min_p")} | {"seq_len": about["seq_len"]}
    settings = always | {"n": about["samples"], "seed": about["seed"]}
    settings |= {key: value for key, value in rare.items() if value is not None}
    return "sampling: " + ", ".join(f"{key} = {'unset' if value is None else value}" for key, value in settings.items())


def length_table(results: Sequence[ModelResult]) -> Table:
    """Return a table with a row per model and measure of length, over single episodes."""
    table = Table(Column("model", overflow="fold"), "length", title="lengths")
    for name in ("mean", *Spread.__struct_fields__):
        table.add_column(name, justify="right")
    for result in results:
        for measure, spread in result.lengths.items():
            values = [result.estimates[measure].value, *msgspec.structs.astuple(spread)]
            table.add_row(Text(result.name), measure, *(f"{value:.1f}" for value in values))
    return table


@contextmanager
def show_progress(console: Console) -> Iterator[ShowProgress]:
    """Yield a function that shows the progress of a model: a bar on a terminal, else a line at begin and end.

    It takes the model's name, the number of finished episodes and of all, and yields a callback for finished episodes.
    """
    if not console.is_terminal:
        yield partial(_print_progress, console)
        return
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as bars:

        @contextmanager
        def show(name: str, done: int, total: int) -> Iterator[Callable[[], None]]:
            task = bars.add_task(name, total=total, completed=done)
            yield lambda: bars.advance(task)
            bars.stop_task(task)

        yield show


@contextmanager
def _print_progress(console: Console, name: str, done: int, total: int) -> Iterator[Callable[[], None]]:
    """Print a line when a model begins and when it ends."""
    ended: list[None] = []
    console.print(f"{name}: {total - done} of {total} episodes to run", soft_wrap=True)
    try:
        yield lambda: ended.append(None)
    finally:
        console.print(f"{name}: {done + len(ended)} of {total} episodes done", soft_wrap=True)


CHARACTER = 7.2
"""Approximate width of a character in pixels."""
MAX_NAME_CHARS = 40
ROW = 24
MARGIN = 20
TOP, UNDER = 44, 50
MIN_HEIGHT = 320
"""Height of the charts of lengths and curves, unless more names need more."""


def accuracy_chart(
    title: str, models: Sequence[tuple[str, Estimate]], what: str = "accuracy, with its 95% interval"
) -> str:
    """Draw a row per model with its accuracy or mean reward and interval; `what` labels the axis."""
    left = MARGIN + CHARACTER * max((len(_shown(name)) for name, _ in models), default=0) + 12
    height = TOP + ROW * len(models) + UNDER
    x_ticks = ticks(min([0.0, *(each.low for _, each in models)]), max([1.0, *(each.high for _, each in models)]), 5)
    plot = Plot((x_ticks[0], x_ticks[-1]), (0.0, 1.0), Box(left, TOP, WIDTH - 70, height - UNDER))
    plot.axes(x_ticks, (), what, "")
    for number, (name, accuracy) in enumerate(models):
        y = TOP + ROW * (number + 0.5)
        color = COLORS[number % len(COLORS)]
        plot.parts += [
            text(left - 12, y + 4.5, _shown(name), "end"),
            f'<path d="M{plot.x(accuracy.low)},{y:.1f}H{plot.x(accuracy.high)}" {stroke(color, 2)}/>',
            f'<circle cx="{plot.x(accuracy.value)}" cy="{y:.1f}" r="4.5" fill="{color}"/>',
            text(WIDTH - 60, y + 4.5, f"{accuracy.value:.3f}", color=color),
        ]
    return document(title, WIDTH, height, MARGIN, plot.parts)


def length_chart(
    title: str,
    what: str,
    models: Sequence[tuple[str, Estimate, Estimate]],
    bars: str = "95% intervals",
    score: str = "accuracy",
) -> str:
    """Draw (name, length, score) of models; `what` and `score` label the axes, `bars` describes the error bars.

    Names are to the right, each with a line to its point. The frontier joins the models that no other beats in both.
    """
    x_ticks = _range([length for _, length, _ in models], least=1.0)
    y_ticks = _range([accuracy for _, _, accuracy in models], least=0.1)
    plot, height = _plot_with_names([_shown(name) for name, _, _ in models], x_ticks, y_ticks, what, score)
    edge = frontier([(length.value, accuracy.value) for _, length, accuracy in models])
    plot.parts += [rule(plot.path(edge), dashes="5 4", width=1.5)] if edge else []
    colored = [(*model, COLORS[number % len(COLORS)]) for number, model in enumerate(models)]
    colored.sort(key=lambda model: (-model[2].value, model[1].value))
    plot.side_labels([(_shown(name), length.value, score.value, color) for name, length, score, color in colored])
    for _, length, accuracy, color in colored:
        x, y = plot.x(length.value), plot.y(accuracy.value)
        plot.parts += [
            f'<path d="M{plot.x(length.low)},{y}H{plot.x(length.high)}" {stroke(color, 1.5)}/>',
            f'<path d="M{x},{plot.y(accuracy.low)}V{plot.y(accuracy.high)}" {stroke(color, 1.5)}/>',
            f'<circle cx="{x}" cy="{y}" r="4.5" fill="{color}"/>',
        ]
    caption = f"bars: {bars}; dashed: the frontier, which no model beats in both"
    return document(title, WIDTH, height, MARGIN, plot.parts, caption)


def curve_chart(title: str, what: str, curves: Mapping[str, Sequence[tuple[int, Estimate]]]) -> str:
    """Draw a line per run over its steps, with its intervals as a band; names are next to the last values."""
    ends = same_digits([points[-1][1].value for points in curves.values()])
    names = {name: f"{_shown(name)} {end}" for name, end in zip(curves, ends, strict=True)}
    steps = [step for points in curves.values() for step, _ in points]
    x_ticks = ticks(min(steps), max(steps), 5, whole=True)
    y_ticks = _range([estimate for points in curves.values() for _, estimate in points], least=0.1)
    plot, height = _plot_with_names(list(names.values()), x_ticks, y_ticks, "optimizer step", what)
    labels = []
    for number, (name, points) in enumerate(curves.items()):
        color = COLORS[number % len(COLORS)]
        plot.band([(step, each.high) for step, each in points], [(step, each.low) for step, each in points], color)
        plot.line([(step, each.value) for step, each in points], stroke(color, 2.5), dots=color)
        step, last = points[-1]
        labels.append((names[name], step, last.value, color))
    plot.side_labels(sorted(labels, key=lambda label: -label[2]))
    return document(title, WIDTH, height, MARGIN, plot.parts, "points: evaluated checkpoints; band: 95% interval")


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the Pareto frontier of (length, accuracy) points: shorter is better, more accurate is better."""
    best, edge = -math.inf, []
    for length, accuracy in sorted(points, key=lambda point: (point[0], -point[1])):
        if accuracy > best:
            edge.append((length, accuracy))
            best = accuracy
    return edge


def _plot_with_names(
    names: Sequence[str], x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str, y_label: str
) -> tuple[Plot, float]:
    """Return a plot with axes and space for names to its right, and the height of the chart."""
    right = WIDTH - MARGIN - 24 - CHARACTER * max(map(len, names), default=0)
    top = TOP + ROW
    height = top + max(MIN_HEIGHT, LABEL_SPACING * (len(names) + 1)) + UNDER
    plot = Plot((x_ticks[0], x_ticks[-1]), (y_ticks[0], y_ticks[-1]), Box(60, top, right, height - UNDER))
    plot.axes(x_ticks, y_ticks, x_label, y_label)
    return plot, height


def _range(estimates: Sequence[Estimate], least: float) -> list[float]:
    """Return ticks around all intervals; the axis does not start at 0 because models are close to each other."""
    low, high = min(each.low for each in estimates), max(each.high for each in estimates)
    return ticks(low, max(high, low + least), 5)


def _shown(name: str) -> str:
    """Shorten a long name to its end, which distinguishes models of one folder."""
    return name if len(name) <= MAX_NAME_CHARS else f"…{name[-MAX_NAME_CHARS + 1 :]}"


Curves = dict[str, list[tuple[int, Estimate]]]
MEASURES = {
    "thinking": {"thinking_tokens": "tokens of thinking, mean", "thinking_words": "words of thinking, mean"},
    "format": {"format": "share of replies in format"},
}
"""By chart: the measures that it may show, in order of preference, with their labels."""


def curve_charts(title: str, results: Sequence[ModelResult]) -> dict[str, str]:
    """Return charts by name: `accuracy` (or `reward`), `thinking` and `format`, if a run has two steps with values."""
    score = choose_score([result.estimates for result in results], results[0].samples)
    scores = _curves([(result, result.estimates[score.measure]) for result in results])
    charts = {score.name.split()[-1]: curve_chart(title, score.name, scores)} if scores else {}
    for name, measures in MEASURES.items():
        for measure, what in measures.items():
            values = [(result, result.estimates[measure]) for result in results if measure in result.estimates]
            if curves := _curves(values):
                charts[name] = curve_chart(title, what, curves)
                break
    return charts


def _curves(values: Sequence[tuple[ModelResult, Estimate]]) -> Curves:
    """Group values by run, under short names; runs with one step are left out."""
    by_run: Curves = {}
    for result, estimate in values:
        if result.run and result.step is not None:
            by_run.setdefault(str(Path(result.run).absolute()), []).append((result.step, estimate))
    runs = [run for run, points in by_run.items() if len(points) > 1]
    names = zip(short_names(runs), runs, strict=True)
    return {name: sorted(by_run[run], key=lambda point: point[0]) for name, run in names}
