"""What the runs of a sweep came to, read off their folders: numbers per run, curves per variant, evaluated models."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headrace.observe.metrics import Curve, History, Record, Tail
from headrace.tools.compare.comparison import HELD_OUT, PREFERRED, curve_of, final_value, is_evaluation
from headrace.tools.evaluate.results import Estimate, ModelResult
from headrace.tools.sweep.record import RunRecord, State, SweepRecord, state_of
from headrace.transport.run_dir import RunDir

EVALUATION = "eval"
"""The folder of the evaluation."""
LENGTHS = ("metrics/all/thinking_tokens", "metrics/all/thinking_words", "decode_len/all/mean")
"""How long replies are: the first of these that a run has reported is shown, unless somebody names metrics."""


class RunResult(msgspec.Struct):
    """A run in numbers."""

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
    runs: list[RunResult]
    curves: dict[str, dict[str, list[Curve]]]
    """By metric and variant, one per run that has reported it."""
    samples: int
    """Of each example of the evaluation; 0: there was none."""
    failures: list[str]
    """Models that could not be evaluated, and why."""


class _Evaluation(msgspec.Struct):
    models: list[ModelResult]


class _Read(NamedTuple):
    records: list[Record]
    history: History

    def curve(self, metric: str) -> Curve:
        return curve_of(self.records, self.history, metric)


def read_results(directory: Path, record: SweepRecord, metrics: Sequence[str]) -> Results:
    """Of the runs that are asked for, in their order; `metrics` are those with curves, unset those that matter."""
    read = {run.name: _read(directory / run.name) for run in record.asked}
    shown = list(metrics) or _metrics_of([each for each in read.values() if each.history.moves])
    evaluated = read_evaluation(directory)
    results = []
    curves: dict[str, dict[str, list[Curve]]] = {metric: {} for metric in shown}
    for run in record.asked:
        result = _result(run, state_of(run, directory), read[run.name])
        for metric in shown:
            if curve := read[run.name].curve(metric):
                curves[metric].setdefault(run.variant, []).append(curve)
                result.ends[metric] = final_value(curve, curve[-1][0], single=is_evaluation(metric))
        if found := evaluated.get((directory / run.name).resolve()):
            result.evaluation = found.estimates
        results.append(result)
    known = evaluated.values()
    return Results(
        results,
        {metric: several for metric, several in curves.items() if several},
        max((found.samples for found in known), default=0),
        [f"{found.name} was not evaluated: {found.failure}" for found in known if found.failure],
    )


def _read(folder: Path) -> _Read:
    records = Tail(RunDir(folder).metrics).read()
    return _Read(records, History(records))


def _metrics_of(read: Sequence[_Read]) -> list[str]:
    """What all runs that have begun are compared by, what was held out, and a length."""
    chosen = [metric for metric in PREFERRED if read and all(each.curve(metric) for each in read)][:1]
    held_out = [HELD_OUT] if any(each.curve(HELD_OUT) for each in read) else []
    return chosen + held_out + [metric for metric in LENGTHS if any(each.curve(metric) for each in read)][:1]


def _result(run: RunRecord, state: State, read: _Read) -> RunResult:
    latest, history = read.history.latest, read.history
    return RunResult(
        name=run.name,
        variant=run.variant,
        seed=run.seed,
        values=run.values,
        state=state,
        steps=history.step,
        max_steps=run.max_steps,
        seconds=float(latest.get("progress/seconds", history.elapsed if history.moves else 0.0)),
        tokens_sampled=int(latest.get("progress/tokens_sampled", 0)),
        tokens_trained=int(latest.get("progress/tokens_trained", 0)),
        failure=run.failure,
    )


def read_evaluation(directory: Path) -> dict[Path, ModelResult]:
    """What `headrace eval` said about final models, by run; nothing where there was no evaluation."""
    path = directory / EVALUATION / "results.json"
    if not path.is_file():
        return {}
    models = msgspec.json.decode(path.read_bytes(), type=_Evaluation).models
    return {Path(result.source).resolve().parent: result for result in models}


def as_csv(runs: Sequence[RunResult]) -> str:
    """A row per run: what it sets, and every number of it."""
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
            found = run.evaluation.get(name)
            row += [None] * 3 if found is None else [found.value, found.low, found.high]
        writer.writerow([*row, run.failure])
    return file.getvalue()
