"""What the experiments share: contenders, claims, paired differences over seeds, verdicts, one table, one plot.

A claim compares one measure of two contenders at the end of their runs. Runs of one seed draw the same tasks, so the
difference is taken seed by seed, and its 95% interval is Student's over the seeds:

    d_s = measure(better, seed s) - measure(worse, seed s)        mean(d) +- t(.975, n - 1) * std(d) / sqrt(n)

A claim of a difference is reproduced if the interval is on its side of 0, not reproduced if it is on the other side.
With a margin the claim is that nothing is lost: reproduced if the interval is above -margin, not reproduced if it is
below. Otherwise it is undecided.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from benchmarks.science.miniature import Measure, Setting, run
from rich.console import Console
from rich.table import Table

from headrace.observe.chart import comparison_chart

T_975 = {
    2: 12.7062,
    3: 4.3027,
    4: 3.1824,
    5: 2.7764,
    6: 2.5706,
    7: 2.4469,
    8: 2.3646,
    9: 2.3060,
    10: 2.2622,
    32: 2.0395,
}
"""The .975 quantile of Student's t with n - 1 degrees of freedom, by n."""
SEEDS = (1, 2, 3, 4, 5)
"""The reported seeds. Settings are chosen with others."""

Run = dict[str, Any]
"""A result of `miniature.run`: `curves` and `seconds`."""
Runs = dict[int, Run]
"""By seed."""


@dataclass(frozen=True)
class Interval:
    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Return the mean of 2 to 10, or 32, values and its 95% interval."""
        mean, half = fmean(values), T_975[len(values)] * stdev(values) / len(values) ** 0.5
        return cls(mean, mean - half, mean + half)


@dataclass(frozen=True)
class Claim:
    """`better` has more of a measure than `worse` (`sign` = 1), or less (-1); with a margin: not less, or not more."""

    measure: str
    better: str
    worse: str
    sign: int = 1
    margin: float = 0.0

    @property
    def text(self) -> str:
        relation = ("more", "less")[self.sign < 0]
        if self.margin:
            relation = f"at most {self.margin:g} {('less', 'more')[self.sign < 0]}"
        return f"{self.better} has {relation} {self.measure} than {self.worse}"

    def verdict(self, difference: Interval) -> str:
        low, high = sorted((self.sign * difference.low, self.sign * difference.high))
        if low > -self.margin:
            return "reproduced"
        return "not reproduced" if high < -self.margin else "undecided"


@dataclass(frozen=True)
class Experiment:
    """One experiment: what runs, what is measured, and what is claimed; the first claim is the headline."""

    title: str
    contenders: Mapping[str, Setting]
    measure: Measure
    claims: tuple[Claim, ...]
    plotted: str
    """The measure of the plot, over steps."""
    seeds: tuple[int, ...] = SEEDS
    derive: Callable[[Run, dict[str, Run]], dict[str, float]] = lambda run, all_runs: {}
    """Measures of a whole run, given the runs of all contenders with the same seed."""

    def finals(self, name: str, runs: Mapping[str, Runs]) -> dict[int, dict[str, float]]:
        """Return for each seed of a contender the last value of each curve, and the measures of the whole run."""
        finals = {}
        for seed, own in runs[name].items():
            last = {measure: points[-1][1] for measure, points in own["curves"].items()}
            finals[seed] = last | self.derive(own, {other: by_seed[seed] for other, by_seed in runs.items()})
        return finals

    def differences(self, claim: Claim, runs: Mapping[str, Runs]) -> list[float]:
        """Return the paired difference of each seed, in the order of seeds."""
        better, worse = self.finals(claim.better, runs), self.finals(claim.worse, runs)
        return [better[seed][claim.measure] - worse[seed][claim.measure] for seed in sorted(better)]


def named(name: str) -> Experiment:
    """Return the experiment of a module of this package."""
    return import_module(f"benchmarks.science.{name}").EXPERIMENT  # type: ignore[no-any-return]


def run_all(name: str, folder: Path, seeds: Sequence[int], jobs: int = 1) -> dict[str, Runs]:
    """Return the runs of an experiment's contenders and seeds, `jobs` at once; each is kept in a file, not repeated."""
    contenders = named(name).contenders
    folder.mkdir(parents=True, exist_ok=True)
    files = {(one, seed): folder / f"{one.replace(' ', '-')}-{seed}.json" for seed in seeds for one in contenders}
    missing = [(name, *pair, file) for pair, file in files.items() if not file.exists()]
    # A process of its own for each run: models and engines of one do not take memory from the next.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for finished in as_completed([pool.submit(_run_to_file, *one) for one in missing]):
            print(finished.result(), flush=True)
    return {one: {seed: json.loads(files[one, seed].read_text()) for seed in seeds} for one in contenders}


def _run_to_file(name: str, contender: str, seed: int, file: Path) -> str:
    torch.set_num_threads(1)  # the models are tiny, and runs repeat
    experiment = named(name)
    result = run(experiment.contenders[contender], seed, experiment.measure)
    draft = file.with_suffix(".tmp")
    draft.write_text(json.dumps(result))
    draft.replace(file)
    return f"{contender}, seed {seed}: {result['seconds']:.0f} s"


def summarize(experiment: Experiment, runs: Mapping[str, Runs]) -> dict[str, Any]:
    """Return every number of an experiment as JSON: settings, claims with intervals and verdicts, curves."""
    claims = []
    for claim in experiment.claims:
        differences = experiment.differences(claim, runs)
        interval = Interval.of(differences)
        claims.append(
            {
                "claim": claim.text,
                "differences": differences,
                "mean": interval.mean,
                "interval": [interval.low, interval.high],
                "verdict": claim.verdict(interval),
            }
        )
    settings = {
        name: {"files": list(one.files), "keys": dict(one.keys), "staleness": one.staleness, "retention": one.retention}
        for name, one in experiment.contenders.items()
    }
    return {
        "title": experiment.title,
        "verdict": claims[0]["verdict"],
        "claims": claims,
        "settings": settings,
        "runs": {name: {str(seed): result for seed, result in by_seed.items()} for name, by_seed in runs.items()},
    }


def contender_table(experiment: Experiment, runs: Mapping[str, Runs]) -> Table:
    """Return the final measures of each contender: mean over the seeds, and the smallest and the largest."""
    measures = list(dict.fromkeys(claim.measure for claim in experiment.claims))
    table = Table("contender", *measures, "CPU s per run", title=experiment.title)
    for name, by_seed in runs.items():
        finals = experiment.finals(name, runs).values()
        columns = [[final[measure] for final in finals] for measure in measures]
        cells = [f"{fmean(values):.3g} ({min(values):.3g} to {max(values):.3g})" for values in columns]
        table.add_row(name, *cells, f"{fmean(result['seconds'] for result in by_seed.values()):.0f}")
    return table


def claim_table(summary: Mapping[str, Any]) -> Table:
    table = Table("claim", "difference by seed", "mean", "95% interval", "verdict")
    for claim in summary["claims"]:
        differences = " ".join(f"{value:+.3g}" for value in claim["differences"])
        interval = " to ".join(f"{value:+.3g}" for value in claim["interval"])
        table.add_row(claim["claim"], differences, f"{claim['mean']:+.3g}", interval, claim["verdict"])
    return table


def report(experiment: Experiment, runs: Mapping[str, Runs], folder: Path, name: str) -> dict[str, Any]:
    """Print the tables; write `NAME.json` and `NAME.svg` into the folder."""
    summary = summarize(experiment, runs)
    console = Console(width=180)
    console.print(contender_table(experiment, runs))
    console.print(claim_table(summary))
    (folder / f"{name}.json").write_text(json.dumps(summary) + "\n")
    curves = {
        contender: [[(x, y) for x, y in result["curves"][experiment.plotted]] for result in by_seed.values()]
        for contender, by_seed in runs.items()
    }
    (folder / f"{name}.svg").write_text(comparison_chart(experiment.title, curves, what=experiment.plotted))
    return summary
