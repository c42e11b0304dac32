"""What a comparison prints: seconds to a reward, or seconds of a step, and a chart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import mean, median
from typing import NamedTuple

from benchmarks.end_to_end.settings import UNKNOWN, Point, reached
from rich.table import Table

from headrace.observe.chart import comparison_chart

WINDOW = 5
"""Steps whose mean reward counts."""


class Run(NamedTuple):
    who: str
    seed: int
    start: float
    """Seconds until it began."""
    busy: float
    """Share of the measured time with any kernel on the GPU."""
    points: list[Point]
    rollouts: int
    """Of a step."""
    device_busy_s: float = UNKNOWN
    """Time within the measured steps for which the GPU computed the embedded engine's steps."""

    @property
    def rollouts_per_second(self) -> float:
        return len(self.points) * self.rollouts / self.points[-1].seconds


def reward_table(runs: Sequence[Run], thresholds: Sequence[float]) -> Table:
    seeds = sorted({run.seed for run in runs})
    table = Table(title=f"seconds to a training reward (mean of {WINDOW} steps), seeds {', '.join(map(str, seeds))}")
    table.add_column("")
    columns = [f"to {threshold:g}" for threshold in thresholds]
    for column in (*columns, "steps to it", "reward, first > last", "exact", "rollouts/s", "GPU busy", "start s"):
        table.add_column(column, justify="right")
    for who in dict.fromkeys(run.who for run in runs):
        own = [run for run in runs if run.who == who]
        table.add_row(
            who,
            *(seconds_to(own, threshold) for threshold in thresholds),
            " ".join(str(point.step) if (point := reached(run.points, thresholds[-1], WINDOW)) else "-" for run in own),
            f"{mean(run.points[0].reward for run in own):.3f} > {mean(tail(run) for run in own):.3f}",
            f"{mean(run.points[0].exact for run in own):.3f} > {mean(run.points[-1].exact for run in own):.3f}",
            f"{median(run.rollouts_per_second for run in own):,.0f}",
            share(mean(run.busy for run in own)),
            f"{median(run.start for run in own):.0f}",
        )
    return table


def step_table(runs: Sequence[Run], warm_up: int) -> Table:
    """Seconds of a step after `warm_up` steps: the median of all seeds, with the least and the most."""
    table = Table(title=f"a step, from step {warm_up + 1} on: median (least to most)", caption=STEP_CAPTION)
    table.add_column("")
    measures = ("s a step", "headrace's", "tokens/s", "tokens", "sampling s", "training s")
    for column in (*measures, "idle", "GPU busy", "reward", "start s"):
        table.add_column(column, justify="right")
    ours = [run for run in runs if run.who == "headrace"]
    reference = known_median([seconds for run in ours for seconds, _ in measured_steps(run, warm_up)])
    for who in dict.fromkeys(run.who for run in runs):
        own = [run for run in runs if run.who == who]
        steps = [step for run in own for step in measured_steps(run, warm_up)]
        if not steps:
            continue
        seconds, training_s = median(seconds for seconds, _ in steps), known_median([each for _, each in steps])
        tokens = mean(point.mean_tokens for run in own for point in run.points[warm_up:])
        lengths = [each for each, _ in steps]
        table.add_row(
            who,
            f"{seconds:.2f} ({min(lengths):.2f} to {max(lengths):.2f})",
            f"{reference / seconds:.2f} of it",
            f"{own[0].rollouts * tokens / mean(lengths):,.0f}",
            f"{tokens:.0f}",
            f"{seconds - training_s:.2f}",
            f"{training_s:.2f}",
            share(mean(idle_share(run, warm_up) for run in own)),
            share(mean(run.busy for run in own)),
            f"{mean(run.points[0].reward for run in own):.3f} > {mean(tail(run) for run in own):.3f}",
            f"{median(run.start for run in own):.0f}",
        )
    return table


STEP_CAPTION = (
    "headrace's: its step as a share of this one. tokens: mean of a completion. training: what is not sampling "
    "(forward, backward, optimizer, new weights). idle: the share of sampling in which the GPU "
    "computes no step of the embedded engine"
)


def measured_steps(run: Run, warm_up: int) -> list[tuple[float, float]]:
    """Return the seconds of each step after the warm-up, and how many of them were training."""
    return [(after.seconds - point.seconds, point.training_s) for point, after in pairwise(run.points[warm_up - 1 :])]


def idle_share(run: Run, warm_up: int) -> float:
    steps = measured_steps(run, warm_up)
    sampling_s = sum(seconds for seconds, _ in steps) - len(steps) * known_median([training for _, training in steps])
    return 1 - run.device_busy_s / sampling_s


def known_median(values: Sequence[float]) -> float:
    return median([value for value in values if math.isfinite(value)] or [UNKNOWN])


def share(value: float) -> str:
    return f"{value:.0%}" if math.isfinite(value) else "?"


def tail(run: Run) -> float:
    return mean(point.reward for point in run.points[-WINDOW:])


def seconds_to(runs: Sequence[Run], threshold: float) -> str:
    """The median, and the seconds of each seed; a seed that has not got there counts as never."""
    points = [reached(run.points, threshold, WINDOW) for run in runs]
    found = median(math.inf if point is None else point.seconds for point in points)
    each = ", ".join("-" if point is None else f"{point.seconds:.1f}" for point in points)
    return f"{found:.1f} ({each})" if math.isfinite(found) else f"- ({each})"


def reward_chart(runs: Sequence[Run], title: str) -> str:
    """Reward over seconds, all runs at the same ones: the last known value of the moving mean."""
    curves = {}
    for who in dict.fromkeys(run.who for run in runs):
        own = [run for run in runs if run.who == who]
        last = math.floor(max(run.points[-1].seconds for run in own))
        curves[who] = [[(float(s), value_at(run.points, s)) for s in range(last + 1)] for run in own]
    return comparison_chart(title, curves, over="seconds")


def value_at(points: Sequence[Point], second: float) -> float:
    done = [point.reward for point in points if point.seconds <= second][-WINDOW:]
    return mean(done) if done else points[0].reward
