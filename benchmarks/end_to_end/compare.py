"""Whole training on one GPU: Headrace with its own engine and with vLLM, and TRL's GRPOTrainer.

    python -m benchmarks.end_to_end.compare --workload gsm8k [--model DIR]                      # seconds of a step
    python -m benchmarks.end_to_end.compare --workload tool-calls --model DIR [--seeds 0 1 2]   # seconds to a reward

Everyone has the same model, prompts in the same order, rollouts in a step, loss, optimizer and learning rate, and the
GPU to itself; nothing is evaluated or saved meanwhile. Seconds count from the moment when everything is loaded; `start`
is what came before. Contenders (`--only`) are independent: one that fails is reported, and the others run.

`gsm8k`: 256 completions a step of up to 512 tokens, in groups of 8. Headrace has 384 in flight and samples one step
ahead (`headrace on-policy`: not ahead), TRL has vLLM in its process, with the fastest settings it has (`trl_run`).
Without `--model` the weights are those of `stand_in`, which ends its completions as a trained model does, and the
reward is a coin's; with it the reward is GSM8K's.

`tool-calls`: SmolLM2-135M-Instruct (`python -m benchmarks.models DIR`) learns to call functions
(`examples/tool-calls`). A run ends once the mean training reward of the last five steps has reached the highest
threshold, or after `--steps`. Prompts come once, so that the training reward is that of unseen ones.

`headrace vllm` and `trl vllm` want $HEADRACE_VLLM_PYTHON, the Python of an environment with vLLM (for `trl vllm` with
TRL and Headrace, too). The output folder gets the runs, `comparison.json` and `comparison.svg`. With `--resume` what
that file has of the same settings stays, and only what is missing runs.

On a machine without a network, with the packages unpacked in deps/base and deps/vllm (8 to 9 minutes for gsm8k):

    export PYTHONPATH=$PWD/src:$PWD:$PWD/deps/vllm:$PWD/deps/base VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM=0 \\
      VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 VLLM_HOST_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo
    export HEADRACE_VLLM_PYTHON=$(which python3)
    python3 -m benchmarks.end_to_end.compare --workload gsm8k --only headrace --resume
    python3 -m benchmarks.end_to_end.compare --workload gsm8k --only "trl vllm" "headrace vllm" --resume
    cp outputs/end-to-end-gsm8k/*.json outputs/end-to-end-gsm8k/*.log $OUT      # not the runs: they have weights
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from benchmarks.end_to_end import headrace_run, trl_run
from benchmarks.end_to_end.gpu_load import GpuLoad
from benchmarks.end_to_end.report import WINDOW, Run, reward_chart, reward_table, step_table, tail
from benchmarks.end_to_end.settings import UNKNOWN, Point, Settings, reached
from rich.console import Console

ROOT = Path(__file__).parents[2]
POLL_S = 0.25
STOP_TIMEOUT_S = 20.0
"""Time that a run gets to end by itself."""
WARM_UP_STEPS = 3
STEPS_AFTER = 2
"""Further steps that a run is given, so that none of those measured is the last one, which samples nothing ahead."""
VLLM = "HEADRACE_VLLM_PYTHON"
RECORD = "comparison.json"
CONTENDERS: dict[str, tuple[ModuleType, str]] = {
    "headrace": (headrace_run, "embedded alternate"),
    "headrace vllm": (headrace_run, "vllm alternate"),
    "trl": (trl_run, "transformers"),
    "trl vllm": (trl_run, "vllm"),
    "headrace overlap": (headrace_run, "embedded overlap"),
    "headrace on-policy": (headrace_run, "embedded alternate 0"),
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "tool-calls": {
        "only": ["headrace", "headrace vllm", "trl"],
        "seeds": [0, 1, 2],
        "steps": 60,
        "max_tokens": 64,
        "lr": 1e-5,
        "output": Path("outputs/end-to-end"),
    },
    "gsm8k": {
        "only": ["headrace", "trl vllm", "headrace vllm"],
        "seeds": [0],
        "steps": 12,
        "max_tokens": 512,
        "lr": 2e-6,
        "output": Path("outputs/end-to-end-gsm8k"),
    },
}


class Limits(NamedTuple):
    """When a run ends: at a reward, after a number of steps, or after seconds with its start."""

    reward: float
    steps: int
    seconds: float


def execute(who: str, settings: Settings, place: Path, limits: Limits) -> Run:
    module, how = CONTENDERS[who]
    command: list[str] = module.command(settings, how, place)
    counters: list[dict[str, float]] = []
    place.parent.mkdir(parents=True, exist_ok=True)
    with GpuLoad() as load, (place.parent / f"{place.name}.log").open("w") as log:
        started = time.time()
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        points: list[Point] = []
        try:
            while process.poll() is None and time.time() < started + limits.seconds:
                time.sleep(POLL_S)
                points = module.read(place)[1]
                if module is headrace_run and (current := headrace_run.read_engine_counters(place)) is not None:
                    counters.append(current)
                if len(points) >= limits.steps or reached(points, limits.reward, WINDOW):
                    break
        finally:
            stop(process)
        began, points = module.read(place)
        points = points[: limits.steps]
        if began is None or len(points) <= WARM_UP_STEPS:
            raise RuntimeError(
                f"{who} ended after {len(points)} steps; see {log.name}: {Path(log.name).read_text()[-1500:]}"
            )
        window = began + points[WARM_UP_STEPS - 1].seconds, began + points[-1].seconds
        busy = load.share(*window)
    return Run(who, settings.seed, began - started, busy, points, settings.rollouts, device_busy(counters, *window))


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the run to end; what is left of it after a while is killed, so that the next one has the GPU to itself."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def device_busy(counters: Sequence[dict[str, float]], start: float, end: float) -> float:
    """Return the seconds for which the GPU computed the embedded engine's steps between two moments."""
    within = [each for each in counters if start <= each["at"] <= end]
    if len(within) < 2 or not within[-1].get("steps_total"):
        return UNKNOWN
    waited = within[-1]["device_busy_seconds_total"] - within[0]["device_busy_seconds_total"]
    return waited * (end - start) / (within[-1]["at"] - within[0]["at"])


def load_runs(arguments: argparse.Namespace) -> list[Run]:
    """Return the runs of an earlier call with the same settings."""
    path = arguments.output / RECORD
    if not arguments.resume or not path.exists():
        return []
    record = json.loads(path.read_text())
    if record["settings"] != common_settings(arguments):
        raise SystemExit(
            f"{path} is of other settings: {record['settings']}; leave out --resume, or name another --output"
        )
    return [Run(**{**run, "points": [Point(**point) for point in run["points"]]}) for run in record["runs"]]


def save_runs(runs: Sequence[Run], arguments: argparse.Namespace) -> None:
    records = [{**run._asdict(), "points": [point._asdict() for point in run.points]} for run in runs]
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / RECORD).write_text(json.dumps({"settings": common_settings(arguments), "runs": records}))
    title = f"{arguments.workload}: training reward over seconds"
    (arguments.output / "comparison.svg").write_text(reward_chart(runs, title))


def common_settings(arguments: argparse.Namespace) -> dict[str, object]:
    """What all runs of a comparison have in common."""
    own = ("seeds", "only", "output", "limit", "resume")
    return {name: value for name, value in vars(arguments).items() if name not in own}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=list(DEFAULTS), default="tool-calls")
    parser.add_argument("--model", help="a directory: SmolLM2-135M-Instruct, or for gsm8k any model or the stand-in")
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), metavar="WHO", help=", ".join(CONTENDERS))
    parser.add_argument("--thresholds", nargs="+", type=float, default=[0.8, 0.9], help="rewards, for tool-calls")
    parser.add_argument("--steps", type=int, help="most of a run")
    parser.add_argument("--prompts", type=int, default=32, help="of a step")
    parser.add_argument("--group", type=int, default=8, help="answers to a prompt")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--lr", type=float)
    for name, what in (("headrace", "Headrace's run file"), ("trl", "TRL's GRPOConfig, in JSON")):
        help_text = f"further settings of {what}"
        parser.add_argument(f"--{name}", nargs="+", default=[], metavar="KEY=VALUE", help=help_text)
    parser.add_argument("--limit", type=float, default=240.0, help="most seconds of a run, start included")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--resume", action="store_true", help="keep the runs that the output folder has")
    arguments = parser.parse_args()
    for name, value in DEFAULTS[arguments.workload].items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    if arguments.workload == "tool-calls" and arguments.model is None:
        parser.error("--model: tool-calls needs the directory of SmolLM2-135M-Instruct")
    return arguments


def write_stand_in_once(directory: Path) -> None:
    """Write the stand-in in a process of its own, which gives the GPU's memory back."""
    if not (directory / "config.json").exists():
        subprocess.run([sys.executable, "-m", "benchmarks.end_to_end.stand_in", str(directory)], cwd=ROOT, check=True)


def main() -> None:
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # no run outlives it
    runs = load_runs(arguments)
    is_gsm8k = arguments.workload == "gsm8k"
    model = Path(arguments.model or arguments.output / "stand-in").resolve()
    if arguments.model is None:
        write_stand_in_once(model)
    for seed in arguments.seeds:
        for who in arguments.only:
            if any((run.who, run.seed) == (who, seed) for run in runs):
                continue
            if who.endswith("vllm") and VLLM not in os.environ:
                print(f"{who}: ${VLLM} does not name the Python of an environment with vLLM", flush=True)
                continue
            settings = Settings(
                *("gsm8k-stand-in" if arguments.model is None else arguments.workload, str(model), seed),
                *(arguments.steps + STEPS_AFTER, arguments.prompts, arguments.group),
                *(arguments.max_tokens, arguments.temperature, arguments.lr),
                *(tuple(arguments.headrace), tuple(arguments.trl)),
            )
            place = (arguments.output / f"{who.replace(' ', '-')}-{seed}").resolve()
            until = float("inf") if is_gsm8k else max(arguments.thresholds)
            try:
                run = execute(who, settings, place, Limits(until, arguments.steps, arguments.limit))
            except Exception:  # the others run all the same
                print(f"{who}, seed {seed}: {traceback.format_exc()}", flush=True)
                continue
            last = run.points[-1]
            print(
                f"{who}, seed {seed}: {last.step} steps in {last.seconds:.1f} s after {run.start:.1f} s, "
                f"reward {run.points[0].reward:.3f} > {tail(run):.3f}, {run.rollouts_per_second:.0f} rollouts/s",
                flush=True,
            )
            runs.append(run)
            save_runs(runs, arguments)
    if runs:
        console = Console(width=170)
        if not is_gsm8k:
            console.print(reward_table(runs, sorted(arguments.thresholds)))
        console.print(step_table(runs, WARM_UP_STEPS))


if __name__ == "__main__":
    main()
