"""Runs beside each other: what differs in their configurations, what each came to, and how sure the difference is.

Runs that differ in their seeds alone are one variant, and every variant is held against the first. A training metric
comes to the mean of its last steps, an evaluation to its last value, both at a step that all runs have reached.

Left out on purpose: runs that have not reported the metric, each with a sentence, and differences along the way, which
the curves show.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headrace.config.files import read_toml
from headrace.errors import BadInput
from headrace.observe.environments import END_STEPS
from headrace.observe.history import Curve, History, Record, Tail
from headrace.tools.compare.difference import Difference, Side, difference
from headrace.tools.compare.examples import Scores, read_own_scores, read_scores
from headrace.tools.compare.settings import SEEDS, Settings, differences, group_by_variant, settings_of
from headrace.tools.names import short_names
from headrace.transport.run_dir import RolloutKind, RunDir

HELD_OUT = "held-out"
"""The mean over the evaluation environments, as in `headrace summary`."""
ACCURACY = "accuracy"
"""Of a run's final model, as `headrace eval` found it."""
PREFERRED = ("reward/all/mean", "loss")
"""What is compared unless somebody says otherwise: the first of these that all runs have."""
SMALLER_IS_BETTER = ("loss", "error", "kl")
"""Words in the names of metrics."""


class Ends(msgspec.Struct):
    first: float
    best: float
    last: float


class RunReport(msgspec.Struct):
    """A run in numbers."""

    name: str
    path: str
    variant: str
    seed: int | None
    steps: int
    max_steps: int | None
    metric: Ends
    seconds: float
    tokens_sampled: int
    tokens_trained: int
    evaluations: dict[str, Ends]
    """avg@k by environment."""


class Spread(msgspec.Struct):
    """What the seeds of a variant came to."""

    mean: float
    lowest: float
    highest: float


class Variant(msgspec.Struct):
    name: str
    runs: list[str]
    settings: dict[str, Any]
    """Those in which variants differ; None: unset."""
    ends: dict[str, Spread]
    """By metric."""


class Comparison(msgspec.Struct):
    """What `headrace compare --json` prints."""

    metric: str
    at: dict[str, int]
    """By metric: the step at which runs are held against each other, the last that all of them have reached."""
    runs: list[RunReport]
    variants: list[Variant]
    differences: list[Difference]
    notes: list[str]
    """What was left out, or is not finished."""


class Compared(NamedTuple):
    comparison: Comparison
    curves: dict[str, dict[str, list[Curve]]]
    """By metric and variant, one per seed."""


class _Run(NamedTuple):
    name: str
    root: Path
    settings: Settings
    history: History
    records: list[Record]

    def curve(self, metric: str) -> Curve:
        return curve_of(self.records, self.history, metric)


class _Measure(NamedTuple):
    """One thing that runs are compared by, with an entry per run."""

    name: str
    at: int | None
    ends: list[float]
    curves: list[Curve]
    steps: list[list[float]]
    examples: list[Scores]

    def side(self, variant: str, group: Sequence[int]) -> Side:
        return Side(
            variant,
            [self.ends[n] for n in group],
            [self.steps[n] for n in group] if self.steps else [],
            [self.examples[n] for n in group] if self.examples else [],
        )


def compare_runs(
    paths: Sequence[Path],
    metric: str | None = None,
    evaluation: Path | None = None,
    variants: Mapping[Path, str] | None = None,
) -> Compared:
    """Read the runs and hold them against each other; raises `BadInput` unless two or more have reported the metric.

    `evaluation` is what `headrace eval` wrote about them; unset, the evaluations that the runs saved count. `variants`
    has the names of the variants by path; unset, they follow from the configurations.
    """
    notes: list[str] = []
    runs = _read(paths, notes)
    chosen = metric or _preferred(runs)
    runs = [run for run in runs if _has(run, chosen, notes)]
    if len(runs) < 2:
        few = f"a comparison takes at least two runs that have reported {chosen}, and there is {len(runs) or 'none'}"
        raise BadInput("\n".join([*notes, few]))
    notes += filter(None, map(_unfinished, runs))
    groups = _groups(runs) if variants is None else _named_groups(runs, variants)
    measures = _measures(runs, chosen, evaluation, notes)
    variant_of = {n: name for name, group in groups.items() for n in group}
    first, *others = groups
    comparison = Comparison(
        metric=chosen,
        at={measure.name: measure.at for measure in measures if measure.at is not None},
        runs=[_report(run, variant_of[n], chosen) for n, run in enumerate(runs)],
        variants=_variants(runs, groups, measures),
        differences=[
            difference(measure.name, measure.side(first, groups[first]), measure.side(other, groups[other]))
            for measure in measures
            for other in others
        ],
        notes=notes,
    )
    curves = {
        measure.name: {name: [measure.curves[n] for n in group] for name, group in groups.items()}
        for measure in measures
        if measure.curves
    }
    return Compared(comparison, curves)


def curve_of(records: Iterable[Record], history: History, metric: str) -> Curve:
    """A metric by step, with what a resume made again counted once."""
    if metric == HELD_OUT:
        return history.held_out()
    for series in (history.steps, history.trained):
        if points := [(step, float(r[metric])) for step, r in series.items() if _is_number(r.get(metric))]:
            return points
    last = max([history.step, *history.steps])
    told = [(int(record["step"]), record[metric]) for record in records if _is_number(record.get(metric))]
    return sorted({step: float(value) for step, value in told if step <= last}.items())


def ending(curve: Curve, at: int, *, single: bool) -> float:
    """What a curve has come to at a step: its last value, or unless `single` the mean of its last few."""
    values = [value for step, value in curve if step <= at] or [curve[0][1]]
    ends = values[-1:] if single else values[-END_STEPS:]
    return math.fsum(ends) / len(ends)


def smaller_is_better(metric: str) -> bool:
    return any(word in metric for word in SMALLER_IS_BETTER)


def shown(value: Any) -> str:
    """A value of a configuration, as a cell of a table."""
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _read(paths: Sequence[Path], notes: list[str]) -> list[_Run]:
    roots = list(dict.fromkeys((path.parent if path.is_file() else path).resolve() for path in paths))
    found = []
    for root, name in zip(roots, short_names([*map(str, roots)]), strict=True):
        run = RunDir(root)
        missing = [file.name for file in (run.config, run.metrics) if not file.is_file()]
        if not missing:
            records = Tail(run.metrics).read()
            found.append(_Run(name, root, settings_of(read_toml(run.config)), History(records), records))
        elif root.is_dir():
            notes.append(f"{root} is left out: it is no run, or one that has not begun; it has no {missing[0]}.")
        else:
            notes.append(f"{root} is left out: there is no such directory.")
    return found


def _preferred(runs: Sequence[_Run]) -> str:
    return next((metric for metric in PREFERRED if runs and all(run.curve(metric) for run in runs)), PREFERRED[0])


def _has(run: _Run, metric: str, notes: list[str]) -> bool:
    if run.curve(metric):
        return True
    known = sorted(key for key in run.history.latest if key.endswith("/all/mean") or "@" in key or key == "loss")
    some = f"among what it has are {', '.join(known[:6])}" if known else "it has not come to a step"
    notes.append(f"{run.name} is left out: it has not reported {metric}; {some}.")
    return False


def _unfinished(run: _Run) -> str:
    steps, most = run.history.step, run.settings.get("max_steps")
    if most is None or steps >= most:
        return ""
    return f"{run.name} has done {steps} of {most} steps, and is compared as far as it went."


def _groups(runs: Sequence[_Run]) -> dict[str, list[int]]:
    """The numbers of each variant's runs by its name: the run's own where each is alone, else what makes it one."""
    groups = group_by_variant([run.settings for run in runs])
    names = [runs[group[0]].name for group in groups]
    if len(groups) < len(runs):
        differing = _differing(runs, groups)
        told = [_told(differing, number) for number in range(len(groups))]
        if 1 <= len(differing) <= 2 and len(set(told)) == len(told):
            names = told
        else:  # too much to be told in a name
            more = [f" and {len(group) - 1} more" if len(group) > 1 else "" for group in groups]
            names = [name + rest for name, rest in zip(names, more, strict=True)]
    return dict(zip(names, groups, strict=True))


def _named_groups(runs: Sequence[_Run], variants: Mapping[Path, str]) -> dict[str, list[int]]:
    known = {path.resolve(): name for path, name in variants.items()}
    groups: dict[str, list[int]] = {}
    for number, run in enumerate(runs):
        groups.setdefault(known[run.root], []).append(number)
    return groups


def _told(differing: dict[str, list[Any]], number: int) -> str:
    return ", ".join(f"{key.rpartition('.')[2]} {shown(values[number])}" for key, values in differing.items())


def _differing(runs: Sequence[_Run], groups: Iterable[Sequence[int]]) -> dict[str, list[Any]]:
    """The keys that make the variants, with the value of each."""
    found = differences([runs[group[0]].settings for group in groups])
    return {key: values for key, values in found.items() if key not in SEEDS}


def _variants(runs: Sequence[_Run], groups: dict[str, list[int]], measures: Sequence[_Measure]) -> list[Variant]:
    differing = _differing(runs, groups.values())
    return [
        Variant(
            name,
            [runs[n].name for n in group],
            {key: values[number] for key, values in differing.items()},
            {measure.name: _spread([measure.ends[n] for n in group]) for measure in measures},
        )
        for number, (name, group) in enumerate(groups.items())
    ]


def _measures(runs: Sequence[_Run], chosen: str, evaluation: Path | None, notes: list[str]) -> list[_Measure]:
    """What was asked for, and what was held out, if all runs were evaluated."""
    held_out = not is_evaluation(chosen) and all(run.curve(HELD_OUT) for run in runs)
    if held_out and any(run.history.evals.keys() != runs[0].history.evals.keys() for run in runs):
        notes.append("The runs were evaluated on different environments: their held-out scores are not compared.")
        held_out = False
    metrics = [chosen, HELD_OUT] if held_out else [chosen]
    measures = [
        _of_saved_evaluations(runs) if metric == HELD_OUT and evaluation is None else _of_curve(runs, metric)
        for metric in metrics
    ]
    if evaluation is not None:
        scores = read_scores(evaluation, [run.root for run in runs])
        without = [run.name for run, known in zip(runs, scores, strict=True) if not known]
        if without:
            notes.append(f"{evaluation} has no episodes of {' and '.join(without)}: accuracies are left out.")
        else:
            accuracy = [math.fsum(known.values()) / len(known) for known in scores]
            measures.append(_Measure(ACCURACY, None, accuracy, [], [], scores))
    return measures


def _of_saved_evaluations(runs: Sequence[_Run]) -> _Measure:
    """Return what was held out at the last step of which every run has saved its evaluation, with scores by example."""
    saved = [RolloutKind.EVAL.files(RunDir(run.root).rollouts).keys() & dict(run.curve(HELD_OUT)) for run in runs]
    for step in sorted(set.intersection(*saved), reverse=True):
        scores = [read_own_scores(run.root, step, run.history.evals) for run in runs]
        if all(scores):
            return _of_curve(runs, HELD_OUT, step)._replace(examples=scores)
    return _of_curve(runs, HELD_OUT)


def _of_curve(runs: Sequence[_Run], metric: str, at: int | None = None) -> _Measure:
    """Compare at step `at`; unset, at the last one that all runs have reached."""
    curves = [run.curve(metric) for run in runs]
    at = min(curve[-1][0] for curve in curves) if at is None else at
    single = is_evaluation(metric)
    steps = [] if single else [[value for step, value in curve if step <= at] for curve in curves]
    return _Measure(metric, at, [ending(curve, at, single=single) for curve in curves], curves, steps, [])


def _report(run: _Run, variant: str, metric: str) -> RunReport:
    latest, history = run.history.latest, run.history
    return RunReport(
        name=run.name,
        path=str(run.root),
        variant=variant,
        seed=run.settings.get("seed"),
        steps=history.step,
        max_steps=run.settings.get("max_steps"),
        metric=_ends(run.curve(metric), smaller_is_better(metric)),
        seconds=float(latest.get("progress/seconds", history.elapsed)),
        tokens_sampled=int(latest.get("progress/tokens_sampled", 0)),
        tokens_trained=int(latest.get("progress/tokens_trained", 0)),
        evaluations={name: _ends(sorted(scores.items()), False) for name, scores in history.evals.items() if scores},
    )


def _ends(curve: Curve, smaller: bool) -> Ends:
    values = [value for _, value in curve]
    return Ends(values[0], min(values) if smaller else max(values), values[-1])


def _spread(values: Sequence[float]) -> Spread:
    return Spread(math.fsum(values) / len(values), min(values), max(values))


def is_evaluation(metric: str) -> bool:
    return metric == HELD_OUT or metric.startswith("eval/")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
