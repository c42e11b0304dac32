"""A large shape on one GPU: planned, trained, saved, killed and resumed, as a user's run would be.

    python -m benchmarks.end_to_end.sizes --model 1.7b [--steps 10] [--interval 3] [--kill-after 7] [--KEY VALUE ...]
    python -m benchmarks.end_to_end.sizes --model 8b --steps 5 --interval 5 --end-after 6 --directory /dev/shm \\
        --trainer.optim.state_bits 8 --orchestrator.batch_size 64 --orchestrator.max_inflight_rollouts 96
    python -m benchmarks.end_to_end.sizes --model 32b --steps 5 --interval 2 --kill-after 3 \\
        --trainer.lora.r 16 --trainer.lora.save_merged false --weights /dev/shm

Random weights in the shape of a Qwen3, GSM8K's prompts with a coin for a reward, 128 completions a step of 256 tokens.
After the metrics of step `--kill-after` every process of the run gets SIGKILL; then it is resumed to the end and
audited. `memory` is the most host memory that was in use above that before the start, page cache and the weights'
files aside, from MemAvailable. `stopped` is the time that training waited for a checkpoint. Other options go to
`headrace rl`. The run keeps one checkpoint, so that the disk needs room for two; with room for one, save at the last
step alone and `--end-after` a later one: the resumed run gets more steps, and is killed before it saves.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil
from benchmarks.models import QWEN3
from benchmarks.trainer.checkpoints import lowest_free_memory
from rich.console import Console
from rich.table import Table

from headrace.machine import free_memory
from headrace.observe.metrics import read_metrics
from headrace.transport.run_dir import RunDir

RUN_FILE = Path(__file__).with_name("gsm8k.toml")
POLL_S = 0.2
SETTINGS: dict[str, Any] = {
    "seq_len": 512,
    "orchestrator.batch_size": 128,
    "orchestrator.group_size": 8,
    "orchestrator.max_inflight_rollouts": 192,
    "orchestrator.train.sampling.max_tokens": 256,
    "orchestrator.train.env.0.id": "benchmarks.end_to_end.gsm8k:coin_for_gsm8k",
    "trainer.optim.lr": 2e-6,
    "trainer.ckpt.keep_last": 1,
}


class Part(NamedTuple):
    """One start of the run, until it ended or was killed."""

    name: str
    first_step_s: float
    """Seconds from the command to the end of its first step."""
    records: list[dict[str, Any]]
    """The trainer's metrics of its steps."""
    memory: int


def write_model(directory: Path, size: str) -> None:
    """Write the weights, in a process of its own: this one keeps no memory of a GPU."""
    program = (
        "from pathlib import Path; from benchmarks.models import write_qwen3, write_qwen3_5m;"
        "from benchmarks.end_to_end.stand_in import train_tokenizer;"
        f"place, size = Path({str(directory)!r}), {size!r};"
        "write_qwen3_5m(place) if size == '5m' else write_qwen3(place, size);"
        "train_tokenizer().save_pretrained(place)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def trained(run: RunDir) -> list[dict[str, Any]]:
    return [record for record in read_metrics(run.metrics) if "time/forward_backward" in record]


def run_part(name: str, command: list[str], run: RunDir, is_enough: Callable[[int], bool]) -> Part:
    """Start the run, and kill all of its processes once `is_enough` of the trained step."""
    before, free, start = len(trained(run)), free_memory(), time.monotonic()
    first_step_s = 0.0
    with lowest_free_memory() as lowest:
        launcher = psutil.Popen(command)
        while launcher.poll() is None:
            time.sleep(POLL_S)
            records = trained(run)[before:]
            if records and not first_step_s:
                first_step_s = time.monotonic() - start
            if records and is_enough(records[-1]["step"]):
                for process in (launcher, *launcher.children(recursive=True)):
                    process.kill()
        launcher.wait()
        return Part(name, first_step_s, trained(run)[before:], free - lowest())


def table_of(parts: list[Part]) -> Table:
    table = Table("", "first step s", "steps", "s a step", "stopped s", "memory GB")
    for part in parts:
        stopped = [record["time/save_ckpt"] for record in part.records if record.get("time/save_ckpt")]
        steps = [record["step"] for record in part.records]
        table.add_row(
            part.name,
            f"{part.first_step_s:.0f}",
            f"{min(steps)} to {max(steps)}" if steps else "none",
            f"{median([record['time/step'] for record in part.records[1:]] or [0.0]):.1f}",
            ", ".join(f"{seconds:.1f}" for seconds in stopped),
            f"{part.memory / 1e9:.1f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["5m", *QWEN3], required=True, help="5m: for a CPU")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--interval", type=int, default=3, help="steps between two checkpoints")
    parser.add_argument("--kill-after", type=int, default=7, metavar="STEP")
    parser.add_argument(
        "--end-after", type=int, metavar="STEP", help="kill the resumed run too, where there is room for one checkpoint"
    )
    parser.add_argument("--weights", type=Path, help="where the weights are written (default: a temporary directory)")
    parser.add_argument("--directory", type=Path, help="where the run is written (default: a temporary directory)")
    arguments, overrides = parser.parse_known_args()
    console = Console(width=140)
    with (
        tempfile.TemporaryDirectory(dir=arguments.weights) as weights,
        tempfile.TemporaryDirectory(dir=arguments.directory) as place,
    ):
        begun = time.monotonic()
        write_model(Path(weights) / "model", arguments.model)
        console.print(f"weights written in {time.monotonic() - begun:.0f} s")
        run = RunDir(Path(place) / "run")
        settings = SETTINGS | {"output_dir": run.root, "model.name": Path(weights) / "model"}

        def command_of(steps: int, interval: int) -> list[str]:
            command = [sys.executable, "-m", "headrace", "rl", str(RUN_FILE)]
            for key, value in (settings | {"max_steps": steps, "trainer.ckpt.interval": interval}).items():
                if f"--{key}" not in overrides:
                    command += [f"--{key}", str(value)]
            return command + overrides

        command = command_of(arguments.steps, arguments.interval)
        subprocess.run([*command, "--dry-run"], check=True)
        first = run_part("first", command, run, lambda step: step >= arguments.kill_after)
        end_after = arguments.end_after or arguments.steps + 1
        if (arguments.end_after or 0) > arguments.steps:
            command = command_of(end_after + 1, end_after + 1)
        resumed = run_part("resumed", [*command, "--resume"], run, lambda step: step >= end_after)
        console.print(table_of([first, resumed]))
        subprocess.run([sys.executable, "-m", "headrace", "audit", str(run.root)], check=False)
        for line in (run.logs / "trainer.log").read_text(errors="replace").splitlines():
            if any(word in line for word in ("checkpoint", "rror", "memory", "compiled")):
                print(line)


if __name__ == "__main__":
    main()
