"""The embedded engine beside vLLM on one GPU: many requests at once, with the sampled tokens' logprobs.

    python -m benchmarks.inference.gpu [--models 0.6b 4b 30b-a3b] [--only embedded vllm] [--requests 256 1024]

Random weights of Qwen3-0.6B's and Qwen3-4B's sizes in bfloat16, or of 12 layers of Qwen3-30B-A3B; 256 prompt tokens
and 512 new ones for each request, all of them at once, temperature 1, no prompt twice, no prefix cache, equal bytes for
keys and values. Every engine is a process of its own, and has the GPU to itself: they import while weights are
written, and are made and measured one after the other.
`start` is making the engine, imports not counted. `prefill` is the load with a single new token; what is left
over the other tokens is `ms/step`. Medians, and (least to most).

vLLM is asked where $HEADRACE_VLLM_PYTHON names the Python of its environment. An engine that fails loses its rows only.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.inference.loads import Load
from benchmarks.inference.worker import Worker, running
from rich.console import Console
from rich.table import Table

VLLM_PYTHON = "HEADRACE_VLLM_PYTHON"
VLLM_ENVIRONMENT = {"VLLM_HOST_IP": "127.0.0.1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
PROMPT, COMPLETION = 256, 512
VOCAB = 151_936
KV_TOKENS = 802_816
"""Room for keys and values: 1,024 requests of 768 tokens, and a little more."""
KV_BYTES_PER_TOKEN = {"0.6b": 2 * 28 * 8 * 128 * 2, "4b": 2 * 36 * 8 * 128 * 2, "30b-a3b": 2 * 12 * 4 * 128 * 2}
MAX_MODEL_LEN = 1024
WARM_UP_TOKENS = 16
NAMES = ("embedded", "vllm")


class Row(NamedTuple):
    """One engine with one number of requests: seconds of each repetition."""

    model: str
    requests: int
    who: str
    start: float
    prefill: float
    seconds: list[float]

    @property
    def rates(self) -> list[float]:
        return sorted(self.requests * COMPLETION / seconds for seconds in self.seconds)

    @property
    def step(self) -> float:
        """Seconds of one decoding step."""
        return (median(self.seconds) - self.prefill) / (COMPLETION - 1)


def load(requests: int, completion: int = COMPLETION) -> Load:
    return Load("all at once", requests, requests, (PROMPT, PROMPT), (completion, completion))


def started(
    name: str, model: str, directory: Path, concurrent: int, step_tokens: int | None, stack: ExitStack
) -> Worker:
    """The process of an engine, which only imports until it is asked."""
    options: dict[str, Any] = {
        "max_model_len": MAX_MODEL_LEN,
        "concurrent": concurrent,
        "kv_bytes": KV_TOKENS * KV_BYTES_PER_TOKEN[model],
    }
    if name == "vllm":
        python, environment = os.environ[VLLM_PYTHON], VLLM_ENVIRONMENT
    else:
        python, environment, options = sys.executable, {}, {**options, "step_tokens": step_tokens}
    process = running(f"gpu_{name}", directory, options, python=python, environment=environment)
    return stack.enter_context(process)


def write(model: str, directory: Path) -> None:
    """Random weights, by a process of its own: this one never touches the GPU."""
    program = f"import pathlib, benchmarks.models as m; m.write_qwen3(pathlib.Path({str(directory)!r}), {model!r})"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
    say(f"{model}: weights written")


def measure(name: str, model: str, worker: Worker, counts: Sequence[int], repetitions: int) -> list[Row]:
    start = worker.ask([], 0).wall
    say(f"{model}, {name}: ready after {start:.1f} s")
    rows = []
    for requests in counts:
        seeds = iter(range(1000))
        worker.ask(load(requests, WARM_UP_TOKENS).jobs(VOCAB, next(seeds)), requests)
        prefill = worker.ask(load(requests, 1).jobs(VOCAB, next(seeds)), requests).wall
        row = Row(model, requests, name, start, prefill, [])
        for _ in range(repetitions):
            row.seconds.append(worker.ask(load(requests).jobs(VOCAB, next(seeds)), requests).wall)
            say(f"{model}, {requests} requests, {name}: {requests * COMPLETION / row.seconds[-1]:,.0f} tokens/s")
        rows.append(row)
    return rows


def compare(
    model: str, directory: Path, names: Sequence[str], counts: Sequence[int], repetitions: int, step_tokens: int | None
) -> list[Row]:
    rows: list[Row] = []
    with ExitStack() as everyone:
        stacks = [everyone.enter_context(ExitStack()) for _ in names]
        workers = [
            started(name, model, directory, max(counts), step_tokens, stack)
            for name, stack in zip(names, stacks, strict=True)
        ]
        write(model, directory)
        for name, worker, stack in zip(names, workers, stacks, strict=True):
            with stack:  # it ends, and its memory is free, before the next one is made
                try:
                    rows += measure(name, model, worker, counts, repetitions)
                except RuntimeError as error:
                    say(f"{model}, {name}: {error}")
    return rows


def rows_table(rows: Sequence[Row]) -> Table:
    table = Table(title=f"{PROMPT} + {COMPLETION} tokens a request, bfloat16, with logprobs")
    for column in ("model", "requests", "engine"):
        table.add_column(column)
    for column in ("new tokens/s", "ms/step", "prefill s", "KV GB", "start s"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"Qwen3-{row.model}",
            f"{row.requests:,}",
            row.who,
            f"{median(row.rates):,.0f} ({row.rates[0]:,.0f} to {row.rates[-1]:,.0f})",
            f"{1000 * row.step:.2f}",
            f"{row.prefill:.2f}",
            f"{KV_TOKENS * KV_BYTES_PER_TOKEN[row.model] / 1e9:.1f}",
            f"{row.start:.0f}",
        )
    return table


def ratio_table(rows: Sequence[Row]) -> Table:
    table = Table(title="embedded, times as fast as vLLM")
    for column in ("model", "requests", "whole load", "decoding step"):
        table.add_column(column, justify="right")
    found = {(row.model, row.requests, row.who): row for row in rows}
    for model, requests, _ in dict.fromkeys(key for key in found if key[2] == "vllm"):
        ours, theirs = found.get((model, requests, "embedded")), found[model, requests, "vllm"]
        if ours is not None:
            whole = median(ours.rates) / median(theirs.rates)
            table.add_row(f"Qwen3-{model}", f"{requests:,}", f"{whole:.2f} x", f"{theirs.step / ours.step:.2f} x")
    return table


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGAN:5.0f} s] {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["0.6b", "4b"], choices=list(KV_BYTES_PER_TOKEN))
    parser.add_argument("--only", nargs="+", default=list(NAMES), choices=NAMES, metavar="ENGINE")
    parser.add_argument("--requests", nargs="+", type=int, default=[256, 1024])
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--step-tokens", type=int, help="most tokens of a step of the embedded engine")
    arguments = parser.parse_args()
    names = [name for name in arguments.only if name != "vllm" or VLLM_PYTHON in os.environ]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        for model in arguments.models:
            directory = Path(scratch) / model
            rows += compare(model, directory, names, arguments.requests, arguments.repetitions, arguments.step_tokens)
            Console(width=140).print(rows_table(rows))
    Console(width=140).print(ratio_table(rows))
    if VLLM_PYTHON not in os.environ:
        print(f"No rows for vLLM: ${VLLM_PYTHON} does not name the Python of its environment.")


BEGAN = time.monotonic()

if __name__ == "__main__":
    main()
