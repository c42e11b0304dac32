"""Time to a reward on one GPU: Headrace with its own engine and with vLLM, and TRL's GRPOTrainer.

    python -m benchmarks.end_to_end.compare --model DIR [--seeds 0 1 2] [--only headrace trl] [--thresholds 0.8 0.9]

SmolLM2-135M-Instruct (`python -m benchmarks.models DIR`) learns to call functions (`examples/tool-calls`). Everyone has
the same model, prompts in the same order, rollouts in a step, loss, optimizer and learning rate, and the GPU to itself;
nothing is evaluated or saved meanwhile. A run ends once the mean training reward of the last five steps has reached
the highest threshold, or after `--steps`. Prompts come once, so that the training reward is that of unseen ones.
Seconds count from the moment when everything is loaded; `start` is what came before.

`headrace vllm` and `trl vllm` want $HEADRACE_VLLM_PYTHON, the Python of an environment with vLLM (for `trl vllm` with
TRL, too). The output folder gets the runs, `comparison.json` and `comparison.svg`. With `--resume` what
that file has of the same settings stays, and only what is missing runs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

from benchmarks.end_to_end import headrace_run, trl_run
from benchmarks.end_to_end.gpu_load import GpuLoad
from benchmarks.end_to_end.settings import Point, Settings, reached
from rich.console import Console
from rich.table import Table

from headrace.observe.chart import comparison_chart

ROOT = Path(__file__).parents[2]
WINDOW = 5
POLL = 0.25
PATIENCE = 20.0
"""Seconds that a run gets to end by itself."""
VLLM = "HEADRACE_VLLM_PYTHON"
RECORD = "comparison.json"
CONTENDERS = {
    "headrace": (headrace_run, "embedded alternate"),
    "headrace vllm": (headrace_run, "vllm alternate"),
    "trl": (trl_run, "transformers"),
    "headrace overlap": (headrace_run, "embedded overlap"),
    "trl vllm": (trl_run, "vllm"),
}
"""The first three are compared unless others are asked for."""


class Run(NamedTuple):
    who: str
    seed: int
    start: float
    busy: float
    points: list[Point]
    rollouts_per_second: float


def execute(who: str, settings: Settings, place: Path, until: float, limit: float) -> Run:
    """One run, until it has reached that reward or the limit of seconds."""
    module, how = CONTENDERS[who]
    command: list[str] = module.command(settings, how, place)
    read: Callable[[Path], tuple[float | None, list[Point]]] = module.read
    place.parent.mkdir(parents=True, exist_ok=True)
    with GpuLoad() as load, (place.parent / f"{place.name}.log").open("w") as log:
        started = time.time()
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        try:
            began, points = read(place)
            while process.poll() is None and time.time() < started + limit:
                time.sleep(POLL)
                began, points = read(place)
                if reached(points, until, WINDOW):
                    break
        finally:
            end(process)
        if began is None or not points:
            raise RuntimeError(f"{who} reported nothing; see {log.name}: {Path(log.name).read_text()[-1500:]}")
        last = points[-1].seconds
        busy = load.share(began, began + last)
    return Run(who, settings.seed, began - started, busy, points, len(points) * settings.rollouts / last)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask the run to end; what is left of it after a while is killed, so that the next one has the GPU to itself."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def load(given: argparse.Namespace) -> list[Run]:
    """The runs of an earlier call with the same settings."""
    path = given.output / RECORD
    if not given.resume or not path.exists():
        return []
    record = json.loads(path.read_text())
    if record["settings"] != settings_of(given):
        raise SystemExit(
            f"{path} is of other settings: {record['settings']}; leave out --resume, or name another --output"
        )
    return [Run(**{**run, "points": [Point(**point) for point in run["points"]]}) for run in record["runs"]]


def save(runs: Sequence[Run], given: argparse.Namespace) -> None:
    told = [{**run._asdict(), "points": [point._asdict() for point in run.points]} for run in runs]
    given.output.mkdir(parents=True, exist_ok=True)
    (given.output / RECORD).write_text(json.dumps({"settings": settings_of(given), "runs": told}))
    (given.output / "comparison.svg").write_text(chart(runs))


def settings_of(given: argparse.Namespace) -> dict[str, object]:
    """What all runs of a comparison have in common."""
    return {
        name: value for name, value in vars(given).items() if name not in ("seeds", "only", "output", "limit", "resume")
    }


def table_of(runs: Sequence[Run], thresholds: Sequence[float]) -> Table:
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
            f"{mean(run.busy for run in own):.0%}" if all(map(math.isfinite, (run.busy for run in own))) else "?",
            f"{median(run.start for run in own):.0f}",
        )
    return table


def tail(run: Run) -> float:
    return mean(point.reward for point in run.points[-WINDOW:])


def seconds_to(runs: Sequence[Run], threshold: float) -> str:
    """The median, and the seconds of each seed; a seed that has not got there counts as never."""
    points = [reached(run.points, threshold, WINDOW) for run in runs]
    found = median(math.inf if point is None else point.seconds for point in points)
    each = ", ".join("-" if point is None else f"{point.seconds:.1f}" for point in points)
    return f"{found:.1f} ({each})" if math.isfinite(found) else f"- ({each})"


def chart(runs: Sequence[Run]) -> str:
    """Reward over seconds, all runs at the same ones: the last known value of the moving mean."""
    curves = {}
    for who in dict.fromkeys(run.who for run in runs):
        own = [run for run in runs if run.who == who]
        last = math.floor(max(run.points[-1].seconds for run in own))
        curves[who] = [[(float(s), value_at(run.points, s)) for s in range(last + 1)] for run in own]
    return comparison_chart("SmolLM2-135M calls functions: training reward over seconds", curves, over="seconds")


def value_at(points: Sequence[Point], second: float) -> float:
    done = [point.reward for point in points if point.seconds <= second][-WINDOW:]
    return mean(done) if done else points[0].reward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the directory of SmolLM2-135M-Instruct")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=list(CONTENDERS)[:3], choices=list(CONTENDERS), metavar="WHO")
    parser.add_argument("--thresholds", nargs="+", type=float, default=[0.8, 0.9])
    parser.add_argument("--steps", type=int, default=60, help="most of a run")
    parser.add_argument("--prompts", type=int, default=32, help="of a step")
    parser.add_argument("--group", type=int, default=8, help="answers to a prompt")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--limit", type=float, default=240.0, help="most seconds of a run, start included")
    parser.add_argument("--output", type=Path, default=Path("outputs/end-to-end"))
    parser.add_argument("--resume", action="store_true", help="keep the runs that the output folder has")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # no run outlives it
    runs = load(given)
    for seed in given.seeds:
        for who in given.only:
            if any((run.who, run.seed) == (who, seed) for run in runs):
                continue
            if who.endswith("vllm") and VLLM not in os.environ:
                print(f"{who}: ${VLLM} does not name the Python of an environment with vLLM", flush=True)
                continue
            settings = Settings(
                *(given.model, seed, given.steps, given.prompts, given.group),
                *(given.max_tokens, given.temperature, given.lr),
            )
            place = (given.output / f"{who.replace(' ', '-')}-{seed}").resolve()
            try:
                run = execute(who, settings, place, max(given.thresholds), given.limit)
            except RuntimeError as error:
                print(f"{who}, seed {seed}: {error}", flush=True)
                continue
            last = run.points[-1]
            print(
                f"{who}, seed {seed}: {last.step} steps in {last.seconds:.1f} s after {run.start:.1f} s, "
                f"reward {run.points[0].reward:.3f} > {tail(run):.3f}, {run.rollouts_per_second:.0f} rollouts/s",
                flush=True,
            )
            runs.append(run)
            save(runs, given)
    if runs:
        Console(width=170).print(table_of(runs, sorted(given.thresholds)))


if __name__ == "__main__":
    main()
