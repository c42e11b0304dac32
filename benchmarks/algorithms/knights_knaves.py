"""Knights and knaves of reasoning-gym with GRPO and with RLCSD, from the same start: one table over the seeds.

    python -m benchmarks.algorithms.knights_knaves --seeds 3 --jobs 1 --output outputs/knights-knaves

A run that is there is not run again. All runs begin with one model, which the first makes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from math import isnan
from pathlib import Path
from statistics import fmean, stdev

from benchmarks.algorithms.learning import headrace, held_out, place
from rich.console import Console
from rich.table import Table

from headrace.observe.chart import comparison_chart
from headrace.observe.metrics import Curve, History, read_metrics
from headrace.observe.summary import read_history
from headrace.transport.run_dir import RunDir

EXAMPLE = "examples/knights-knaves"
ENV = "knights-knaves"
CASES = {"grpo": (f"{EXAMPLE}/grpo.toml",), "rlcsd": (f"{EXAMPLE}/grpo.toml", f"{EXAMPLE}/rlcsd.toml")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="seeds at once")
    parser.add_argument("--output", type=Path, default=Path("outputs/knights-knaves-seeds"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda seed: run_seed(options.output, seed), range(options.seeds)))
    report(options.output, options.seeds)


def run_seed(output: Path, seed: int) -> None:
    """One after the other."""
    for name, files in CASES.items():
        started = time.perf_counter()
        headrace("rl", *files, "--seed", seed, output=place(output, name, seed))
        print(f"{name}, seed {seed}: {time.perf_counter() - started:.0f} s", flush=True)


def report(output: Path, seeds: int) -> None:
    table = Table(title=f"{seeds} seeds, held-out puzzles")
    columns = ("", "reward at the start", "at the end", "mean", "solved at the start", "at the end", "steps", "seconds")
    for column in (*columns, "contrasted", "tokens moved"):
        table.add_column(column)
    curves: dict[str, list[Curve]] = {}
    for name in CASES:
        places = [RunDir(place(output, name, seed)) for seed in range(seeds)]
        runs = [read_history(found) for found in places]
        curves[name] = [held_out(run) for run in runs]
        solved = [solved_of(found) for found in places]
        ends = [curve[-1][1] for curve in curves[name]]
        table.add_row(
            name,
            listed(curve[0][1] for curve in curves[name]),
            listed(ends),
            f"{fmean(ends):.3f}" + (f" ± {stdev(ends):.3f}" if seeds > 1 else ""),
            listed(shares[0] for shares in solved),
            listed(shares[-1] for shares in solved),
            " ".join(str(max(run.steps)) for run in runs),
            " ".join(f"{run.latest['progress/seconds']:.0f}" for run in runs),
            listed(average(run, f"algo/{ENV}/contrast_available") for run in runs),
            listed(average(run, f"algo/{ENV}/modulated_fraction") for run in runs),
        )
    Console(width=200).print(table)
    title = "Knights and knaves: held-out reward"
    (output / "knights-knaves.svg").write_text(comparison_chart(title, curves))


def solved_of(run: RunDir) -> list[float]:
    """The share of held-out puzzles that were solved, at each evaluation."""
    key = f"eval/{ENV}/metrics/solved"
    return [float(record[key]) for record in read_metrics(run.metrics) if key in record]


def average(run: History, key: str) -> float:
    """Over all steps; nothing where an algorithm does not count it."""
    values = [record[key] for record in run.steps.values() if key in record]
    return fmean(values) if values else float("nan")


def listed(values: Iterable[float]) -> str:
    return " ".join("-" if isnan(value) else f"{value:.3f}" for value in values)


if __name__ == "__main__":
    main()
