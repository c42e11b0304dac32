"""What an evaluation leaves: `results.json`, `results.csv`, pictures, and a table for the terminal."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Column, Table
from rich.text import Text

from headrace.tools.evaluate.charts import accuracy_chart, length_chart
from headrace.tools.evaluate.curves import curves_of
from headrace.tools.evaluate.estimates import Spread
from headrace.tools.evaluate.results import Result, score_of
from headrace.transport.files import write_atomically

SCHEMA = 1
COLUMNS = ("format", "tokens", "thinking_tokens", "thinking_words", "truncated", "failed")
"""Measures that the table on the terminal has beside avg@k and pass@k, where any model has them."""

LENGTHS = {
    "thinking_tokens": "tokens of thinking",
    "tokens": "tokens of the reply",
    "thinking_words": "words of thinking",
}
"""What accuracy is shown against: the first that all models have."""


def write_report(output: Path, title: str, about: dict[str, Any], results: Sequence[Result]) -> list[Path]:
    """`about` says what was asked and how. Returns the files."""
    whole = {"schema": SCHEMA, **about, "models": [msgspec.to_builtins(result) for result in results]}
    files = {
        "results.json": msgspec.json.format(msgspec.json.encode(whole)).decode() + "\n",
        "results.csv": as_csv(results),
    }
    known = [result for result in results if not result.failure]
    if known:
        score = score_of([result.estimates for result in known], known[0].samples)
        file = score.name.split()[-1]
        scores = [result.estimates[score.measure] for result in known]
        rows = [(result.name, found) for result, found in zip(known, scores, strict=True)]
        files[f"{file}.svg"] = accuracy_chart(title, rows, f"{score.name}, with its 95% interval")
        measure = next((name for name in LENGTHS if all(name in result.estimates for result in known)), None)
        files |= {f"curve-{name}.svg": chart for name, chart in curves_of(title, known).items()}
        if measure is not None:
            points = [
                (name, result.estimates[measure], found) for (name, found), result in zip(rows, known, strict=True)
            ]
            files[f"{file}-length.svg"] = length_chart(title, f"{LENGTHS[measure]}, mean", points, score=score.name)
    for name, content in files.items():
        write_atomically(output / name, content.encode())
    return [output / name for name in files]


def as_csv(results: Sequence[Result]) -> str:
    """A row per model; each measure with the ends of its interval, lengths with their spread, failures by reason."""
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
            found = result.estimates.get(measure)
            row += ["", "", ""] if found is None else [found.value, found.low, found.high]
        for measure in lengths:
            row += [getattr(result.lengths.get(measure), field, "") for field in Spread.__struct_fields__]
        row += [result.errors.get(reason, 0) for reason in reasons]
        writer.writerow([*row, result.failure])
    return file.getvalue()


def as_table(title: str, results: Sequence[Result]) -> Table:
    """For a terminal: a row per model, with the interval of its accuracy."""
    known = [result for result in results if not result.failure]
    rates = list(dict.fromkeys(name for result in known for name in result.estimates if "@" in name))
    columns = [*rates, *(name for name in COLUMNS if any(name in result.estimates for result in known))]
    table = Table(Column("model", overflow="fold"), title=Text(title))
    for name in columns:
        table.add_column(name, justify="right")
    for result in known:
        table.add_row(Text(result.name), *(_cell(result, name) for name in columns))
    return table


def sampling_line(about: Mapping[str, Any]) -> str:
    """Return the settings that replies were sampled with, in one line; of those that are rarely set, the set ones."""
    always = {key: about["sampling"][key] for key in ("temperature", "top_p", "max_tokens")}
    rare = {key: about["sampling"][key] for key in ("top_k", "min_p")} | {"seq_len": about["seq_len"]}
    settings = always | {"n": about["samples"], "seed": about["seed"]}
    settings |= {key: value for key, value in rare.items() if value is not None}
    return "sampling: " + ", ".join(f"{key} = {'unset' if value is None else value}" for key, value in settings.items())


def as_length_table(results: Sequence[Result]) -> Table:
    """For a terminal: a row per model and measure of length, over single episodes."""
    table = Table(Column("model", overflow="fold"), "length", title="lengths")
    for name in ("mean", *Spread.__struct_fields__):
        table.add_column(name, justify="right")
    for result in results:
        for measure, spread in result.lengths.items():
            values = [result.estimates[measure].value, *msgspec.structs.astuple(spread)]
            table.add_row(Text(result.name), measure, *(f"{value:.1f}" for value in values))
    return table


def _cell(result: Result, name: str) -> str:
    found = result.estimates.get(name)
    if found is None:
        return ""
    interval = f" [{found.low:.3f}, {found.high:.3f}]".replace("[", r"\[") if name.startswith("avg@") else ""
    return f"{found.value:.1f}" if name == "tokens" or "thinking" in name else f"{found.value:.3f}{interval}"
