"""Output of an evaluation: `results.json`, `results.csv`, charts, tables for the terminal, and progress bars."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from headrace.tools.evaluate.charts import accuracy_chart, curve_charts, length_chart
from headrace.tools.evaluate.results import ModelResult, Spread, choose_score
from headrace.transport.files import write_atomically

SCHEMA = 1
COLUMNS = ("format", "tokens", "thinking_tokens", "thinking_words", "truncated", "failed")
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
    columns = [*rates, *(name for name in COLUMNS if any(name in result.estimates for result in succeeded))]

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


ShowProgress = Callable[[str, int, int], AbstractContextManager[Callable[[], None]]]


@contextmanager
def show_progress(console: Console) -> Iterator[ShowProgress]:
    """Yield a function that shows the progress of a model: a bar on a terminal, else a line at begin and end.

    It takes the model's name, the number of finished episodes and of all, and yields a callback for finished episodes.
    """
    if not console.is_terminal:
        yield _print_progress(console)
        return
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as bars:

        @contextmanager
        def show(name: str, done: int, total: int) -> Iterator[Callable[[], None]]:
            task = bars.add_task(name, total=total, completed=done)
            yield lambda: bars.advance(task)
            bars.stop_task(task)

        yield show


def _print_progress(console: Console) -> ShowProgress:
    def print_line(line: str) -> None:
        console.print(line, soft_wrap=True)

    @contextmanager
    def show(name: str, done: int, total: int) -> Iterator[Callable[[], None]]:
        ended = done

        def count() -> None:
            nonlocal ended
            ended += 1

        print_line(f"{name}: {total - done} of {total} episodes to run")
        try:
            yield count
        finally:
            print_line(f"{name}: {ended} of {total} episodes done")

    return show
