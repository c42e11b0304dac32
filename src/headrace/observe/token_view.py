"""Terminal view of the tokens of an exported step: those with the largest gradients, or a whole sample."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headrace.errors import BadInput
from headrace.rollout.schema import DamagedFile
from headrace.transport.run_dir import ExportHeader, TokenExports, read_header

NUMBERS = {
    "advantage": ("advantages", "{:+.3f}"),
    "trainer": ("trainer_logprobs", "{:.3f}"),
    "engine": ("inference_logprobs", "{:.3f}"),
    "ratio": ("ratio", "{:.3f}"),
    "gradient": ("gradient", "{:+.1e}"),
    "share": ("share", "{:.2%}"),
}
"""Column and format of each number, by heading."""


def read_tokens(exports: TokenExports, step: int | None, sample: int | None = None) -> tuple[ExportHeader, pa.Table]:
    """Read an exported step, the newest by default: all of it, or one sample."""
    steps = exports.steps()
    if not steps:
        fix = "Train with trainer.token_export.sample above 0 (20 by default), or choose steps or an interval."
        raise BadInput(f"{exports.directory} has no tokens of any step", key="trainer.token_export", fix=fix)
    if step not in (None, *steps):
        fact = f"{exports.directory} has the tokens of other steps: {', '.join(map(str, steps))}"
        fix = "Choose one of these; trainer.token_export.steps and .interval select the steps that a run exports."
        raise BadInput(fact, key="STEP", value=step, fix=fix)
    path = exports.path(steps[-1] if step is None else step)
    try:
        table = pq.read_table(path, filters=None if sample is None else pc.field("sample") == sample)
    except pa.ArrowInvalid as error:
        raise DamagedFile(f"not a readable Parquet file: {error}", file=path, fix="Give another STEP.") from error
    header = read_header(table.schema.metadata, str(path))
    if table.num_rows == 0:
        samples = pc.unique(pq.read_table(path, columns=["sample"])["sample"]).to_pylist()
        choices = f"0 to {max(samples)}" if header.sequences is None else ", ".join(map(str, samples))
        raise BadInput(f"{path} has samples {choices}", key="--sample", value=sample, fix="Choose one of these.")
    return header, table


def largest(table: pa.Table, count: int) -> pa.Table:
    """Return the trained tokens with the largest absolute gradients, NaN first."""
    trained = table.filter(pc.is_valid(table["gradient"]))
    sizes = np.nan_to_num(np.abs(trained["gradient"].to_numpy()), nan=math.inf)
    return trained.take(np.argsort(-sizes, kind="stable")[:count])


def render(header: ExportHeader, rows: pa.Table, text_of: Callable[[int], str]) -> RenderableType:
    """Return facts of the step, and a line for each token."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("env", "sample", "position", "token", "loss", *NUMBERS):
        side: Literal["left", "right"] = "left" if name in ("env", "token", "loss") else "right"
        # In a narrow terminal, names are wrapped before digits are lost.
        table.add_column(name, justify=side, no_wrap=name not in ("env", "loss"), max_width=24)
    for row in rows.to_pylist():
        numbers = ("" if row[key] is None else form.format(row[key]) for key, form in NUMBERS.values())
        losses = " ".join(f"[{name}]" if row[f"{name}_masked"] else name for name in header.counts if row[f"in_{name}"])
        token = repr(text_of(row["token_id"]))
        cells = (row["env"], str(row["sample"]), str(row["position"]), token, losses, *numbers)
        table.add_row(*map(Text, cells), style="dim" if row["gradient"] is None else None)
    return Group(Text(headline(header)), table)


def headline(header: ExportHeader) -> str:
    """Return the step, the number of trained tokens by loss, and what the columns mean."""
    losses = ", ".join(f"{count:,} by {name}" for name, count in header.counts.items() if count)
    total = "not finite" if header.gradient_sum is None else f"{header.gradient_sum:.4g}"
    sampled = ""
    if header.sequences is not None:
        sampled = (
            f"exported: of {header.sequences:,} sequences those with the largest gradients (trainer.token_export)\n"
        )
    return (
        f"step {header.step}; tokens trained: {losses or 'none'}\n"
        f"{sampled}"
        "loss: the losses that train the token, in brackets if they masked it\n"
        f"gradient: dL/dt, where t is the trainer's logprob; share: of the sum of all |dL/dt|, which is {total}\n"
    )
