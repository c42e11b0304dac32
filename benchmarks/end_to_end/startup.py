"""Where the time goes between `headrace rl` and its first step: with empty compile caches, and again with full ones.

    python -m benchmarks.end_to_end.startup [--model DIR] [--runs empty full] [--every-line] [--KEY VALUE ...]

The workload is GSM8K with a coin for a reward (`gsm8k.toml`); without --model, a stand-in model is written: of the
shape of Qwen2.5-0.5B on a GPU, a small one on a CPU. Seconds are since the command, seen from outside: log lines and
states of processes are looked for every 10 ms, the engine's counters as often once it serves. The first sample is the
first token of the first request. `--every-line` prints each line and state with its time as well. Other options go to
`headrace rl`. Each run is stopped after its first step.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.end_to_end.headrace_run import read_engine_counters
from benchmarks.trainer.compile_time import CACHES

from headrace.machine import visible_gpus
from headrace.observe.status import StatusReader
from headrace.transport.run_dir import RunDir

POLL_S = 0.01
RUN_TIMEOUT_S = 600.0
RUN_FILE = Path(__file__).with_name("gsm8k.toml")
SMALL_RUN = {"batch_size": 16, "group_size": 4, "max_inflight_rollouts": 16, "train.sampling.max_tokens": 16}
"""Of the orchestrator, on a CPU."""


class Event(NamedTuple):
    """The first line that matches `pattern`, of a process's log or of its states, which are written `<STATE>`."""

    name: str
    process: str
    pattern: str


EVENTS = [
    Event("processes started", "launcher", "started"),
    Event("orchestrator: imported", "orchestrator", "<starting>"),
    Event("orchestrator: engine found, first prompt drawn", "orchestrator", "<(?!starting)"),
    Event("trainer: process is up", "trainer", "<starting>"),
    Event("trainer: imported torch and transformers", "trainer", "<loading model>"),
    Event("trainer: model loaded", "trainer", "model and optimizer loaded"),
    Event("trainer: host memory pinned", "trainer", "of host memory is pinned"),
    Event("trainer: compiled", "trainer", "compiled in"),
    Event("trainer: ready", "trainer", "<waiting for batch 1>"),
    Event("engine: server process is up", "inference", "<starting>"),
    Event("engine: imported torch and transformers", "inference", "<loading model>"),
    Event("engine: layers compiled", "inference", "layers compiled in"),
    Event("engine: graphs captured", "inference", "captured in"),
    Event("engine: serving", "inference", "serving .* on "),
    Event("first request", "engine", "requests"),
    Event("first sample", "engine", "tokens"),
    Event("first batch", "batches", "step 1"),
    Event("first step trained", "trainer", "step 1: loss"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a model directory (default: a stand-in is written)")
    parser.add_argument("--runs", nargs="+", choices=("empty", "full"), default=("empty", "full"))
    parser.add_argument("--every-line", action="store_true")
    arguments, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = arguments.model or write_model(folder / "model")
        columns = []
        for number, caches in enumerate(arguments.runs):
            if caches == "empty" or number == 0:
                environment = os.environ | {name: str(folder / f"{number}-{each}") for name, each in CACHES.items()}
            command = [sys.executable, "-m", "headrace", "rl", str(RUN_FILE), "--clean"]
            place = folder / f"run-{number}"
            lines = watch([*command, *settings(model, place), *overrides], environment, place)
            columns.append(find_events(lines, arguments.every_line))
    bytecode = Path(importlib.util.cache_from_source(importlib.util.find_spec("torch").origin)).is_file()
    print(f"torch's bytecode is {'' if bytecode else 'not '}cached; seconds since the command, by compile caches")
    print(f"{'':<50}{''.join(f'{caches:>9}' for caches in arguments.runs)}")
    for event in EVENTS:
        cells = [f"{column[event.name]:.2f}" if event.name in column else "-" for column in columns]
        print(f"{event.name:<50}{''.join(f'{cell:>9}' for cell in cells)}")


def write_model(directory: Path) -> Path:
    """Write the stand-in, in a process of its own: this one keeps no memory of a GPU."""
    program = f"from benchmarks.end_to_end.startup import write_small_model as write; write({str(directory)!r})"
    if visible_gpus():
        program = f"from benchmarks.end_to_end.stand_in import *; write_stand_in(Path({str(directory)!r}))"
    subprocess.run([sys.executable, "-c", program], check=True)
    return directory


def write_small_model(directory: str) -> None:
    from benchmarks.end_to_end.stand_in import write_stand_in
    from transformers import Qwen2Config

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(vocab_size=4096, num_hidden_layers=2, tie_word_embeddings=True, dtype="float32", **sizes)
    write_stand_in(Path(directory), config)


def settings(model: Path, place: Path) -> list[str]:
    values: dict[str, object] = {
        "output_dir": place,
        "model.name": model,
        "max_steps": 2,
        "orchestrator.train.env.0.id": "benchmarks.end_to_end.gsm8k:coin_for_gsm8k",
    }
    if not visible_gpus():
        values |= {f"orchestrator.{name}": value for name, value in SMALL_RUN.items()}
    return [word for key, value in values.items() for word in (f"--{key}", str(value))]


def watch(command: list[str], environment: dict[str, str], place: Path) -> list[tuple[float, str, str]]:
    """Run to the first step, then stop; return seconds, process and text of each line, state and sign of progress."""
    start = time.monotonic()
    run = RunDir(place)
    seen: list[tuple[float, str, str]] = []
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as launcher:
        sources = [new_lines(run), new_states(run), engine_progress(place), first_batch(run)]
        while launcher.poll() is None and time.monotonic() - start < RUN_TIMEOUT_S:
            new = [pair for source in sources for pair in next(source)]
            seen += [(time.monotonic() - start, *pair) for pair in new]
            if any(process == "trainer" and "step 1: loss" in text for process, text in new):
                break
            time.sleep(POLL_S)
        launcher.send_signal(signal.SIGTERM)
        launcher.wait()
    return seen


Pairs = Iterator[list[tuple[str, str]]]
"""What was new at each poll: process and text."""


def new_lines(run: RunDir) -> Pairs:
    read: dict[Path, int] = {}
    while True:
        pairs = []
        for path in sorted(run.logs.glob("*.log")):
            if path not in read:
                read[path] = 0
                pairs.append(("launcher", "started"))
            text = path.read_bytes()[read[path] :]
            whole = text[: text.rfind(b"\n") + 1]
            read[path] += len(whole)
            pairs += [(path.stem, line) for line in whole.decode(errors="replace").splitlines()]
        yield pairs


def new_states(run: RunDir) -> Pairs:
    states: dict[str, str] = {}
    while True:
        now = {name: f"<{status.state}>" for name, status in StatusReader(run.status).read().items()}
        yield [pair for pair in now.items() if states.get(pair[0]) != pair[1]]
        states = now


def engine_progress(place: Path) -> Pairs:
    """Polls until the first token was sampled."""
    asked = False
    while True:
        counters = read_engine_counters(place) if RunDir(place).endpoints.is_dir() else None
        pairs = []
        if counters is not None:
            tokens = counters["tokens_sampled_total"]
            if not asked and (tokens or counters["requests_running"] or counters["requests_waiting"]):
                asked = True
                pairs.append(("engine", "requests"))
            if tokens:
                yield [*pairs, ("engine", "tokens")]
                break
        yield pairs
    while True:
        yield []


def first_batch(run: RunDir) -> Pairs:
    while not run.batches.exists(1):
        yield []
    yield [("batches", "step 1")]
    while True:
        yield []


def find_events(lines: list[tuple[float, str, str]], every_line: bool) -> dict[str, float]:
    """Return the seconds of each event that came."""
    found: dict[str, float] = {}
    for seconds, process, text in lines:
        if every_line:
            print(f"{seconds:8.2f}  {process:<13}{text}")
        for event in EVENTS:
            if event.name not in found and event.process == process and re.search(event.pattern, text):
                found[event.name] = seconds
    return found


if __name__ == "__main__":
    main()
