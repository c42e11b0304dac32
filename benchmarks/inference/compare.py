"""The embedded engine beside transformers' continuous batching, `generate`, vLLM and the bare matrix products.

    python -m benchmarks.inference.compare [--threads 2] [--models demo 5M smollm2] [--baseline SRC] [--only mixed]
                                           [--busy N] [--engines embedded vLLM]

One table of sampled tokens per second, by the clock and by the processor, for equal lengths, lengths spread over a
factor of eight, and groups of eight that share a prompt. Everyone gets the same prompts and completion lengths,
float32, the same number of threads and temperature 1; all but `generate` return the sampled tokens' logprobs. Every
engine is a process of its own, asked in turn, with other prompts every time; medians count. `of ceiling` is the
fraction of what the matrix products of the load would reach alone, `embedded` how many times as fast ours is.

vLLM is asked where $HEADRACE_VLLM_PYTHON names the Python of its environment. SmolLM2 is made at first use (see
`benchmarks.models`). `--baseline` measures the embedded engine of another source tree, too.

`--busy N` runs N endless loops beside every measurement, and adds a row for the embedded engine with one thread. With
two loops on two cores, fair shares are half of the machine for two threads and a third for one. `--engines` leaves out
what takes minutes under such a load.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks.inference.loads import Load, loads
from benchmarks.inference.worker import Seconds, Worker, running
from benchmarks.models import smollm2, write_qwen3_5m
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from headrace.trainer.tiny import write_tiny_model

VLLM_PYTHON = "HEADRACE_VLLM_PYTHON"
VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",
}
EMBEDDED, CEILING = "embedded", "matrix products"
LAUNCHED = MappingProxyType({"OMP_WAIT_POLICY": "PASSIVE"})
"""What the launcher sets for our servers."""
WARM_UP_SEED = 1_000_000


class Case(NamedTuple):
    """A model and what it is asked for."""

    name: str
    directory: Path
    loads: list[Load]
    repetitions: int


class Entry(NamedTuple):
    """A contender: a module of this folder, its options, and the process it wants."""

    name: str
    module: str
    options: dict[str, Any]
    python: str = sys.executable
    environment: Mapping[str, str] = MappingProxyType({})
    threads: int | None = None
    """Instead of the number that all others have."""


def cases(names: list[str], scratch: Path) -> list[Case]:
    """The chosen models; the small ones are written here."""
    found = []
    if "demo" in names:
        write_tiny_model(scratch / "demo")
        found.append(Case("demo, 0.8M", scratch / "demo", loads(32, 1, 32, 48), 2))
    if "5M" in names:
        write_qwen3_5m(scratch / "5M")
        found.append(Case("Qwen3, 5.8M", scratch / "5M", loads(64, 1, 48, 48), 2))
    if "smollm2" in names:
        found.append(Case("SmolLM2-135M", smollm2(), loads(32, 1, 24, 32), 1))
    return found


def entries(case: Case, baseline: Path | None, busy: int) -> list[Entry]:
    """Return the contenders; vLLM only where its Python is known."""
    longest = max(load.longest for load in case.loads)
    concurrent = max(load.concurrent for load in case.loads)
    ours: dict[str, Any] = {"max_model_len": longest + 1}
    batching = "transformers batching"
    found = [
        Entry(EMBEDDED, "embedded", ours, environment=LAUNCHED),
        Entry(batching, "transformers_batching", {**ours, "replaced": False}),
        Entry(f"{batching}, attention replaced", "transformers_batching", {**ours, "replaced": True}),
        Entry("generate, lock-step", "lock_step", {}),
        Entry(CEILING, "ceiling", {}),
    ]
    if baseline is not None:
        found.insert(1, Entry(f"embedded of {baseline}", "embedded", ours, environment={"PYTHONPATH": str(baseline)}))
    if busy:
        found.insert(1, Entry(f"{EMBEDDED}, one thread", "embedded", ours, environment=LAUNCHED, threads=1))
    if python := os.environ.get(VLLM_PYTHON):
        options = {**ours, "concurrent": concurrent}
        found.insert(-1, Entry("vLLM", "vllm_offline", options, python=python, environment=VLLM_ENVIRONMENT))
    return found


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Run processes that never wait."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def measure(case: Case, load: Load, workers: dict[str, Worker], vocab: int, busy: int) -> dict[str, list[Seconds]]:
    """Ask every contender in turn, as often as the case wants, beside `busy` endless loops."""
    found: dict[str, list[Seconds]] = {name: [] for name in workers}
    for repetition in range(case.repetitions):
        jobs = load.jobs(vocab, seed=repetition)
        for name, worker in workers.items():
            with busy_loops(busy):
                found[name].append(worker.ask(jobs, load.concurrent))
            rate = sum(job.completion for job in jobs) / found[name][-1].wall
            print(f"{case.name}, {load.name}, {name}: {rate:,.0f} tokens/s", file=sys.stderr, flush=True)
    return found


def compare(case: Case, arguments: argparse.Namespace, table: Table) -> None:
    vocab = AutoConfig.from_pretrained(case.directory).vocab_size
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for entry in entries(case, arguments.baseline, arguments.busy):
            if arguments.engines and not entry.name.startswith((*arguments.engines, CEILING)):
                continue
            environment = {**entry.environment, "OMP_NUM_THREADS": str(entry.threads or arguments.threads)}
            process = running(entry.module, case.directory, entry.options, python=entry.python, environment=environment)
            workers[entry.name] = stack.enter_context(process)
        for worker in workers.values():  # one after the other: they come up while others still load
            warm_up = case.loads[1]._replace(requests=8, completions=(4, 4))
            worker.ask(warm_up.jobs(vocab, WARM_UP_SEED), warm_up.concurrent)
        for load in case.loads:
            if not arguments.only or load.name in arguments.only:
                add_rows(table, case, load, measure(case, load, workers, vocab, arguments.busy), vocab)


def add_rows(table: Table, case: Case, load: Load, found: dict[str, list[Seconds]], vocab: int) -> None:
    tokens = [sum(job.completion for job in load.jobs(vocab, seed)) for seed in range(case.repetitions)]
    wall = {name: median(t / s.wall for t, s in zip(tokens, runs, strict=True)) for name, runs in found.items()}
    cpu = {name: median(t / s.cpu for t, s in zip(tokens, runs, strict=True)) for name, runs in found.items()}
    what = f"{load.requests} x {_range(load.prompts)} + {_range(load.completions)}, {load.concurrent} at a time"
    for name in found:
        table.add_row(
            case.name if name == EMBEDDED else "",
            f"{load.name}: {what}" if name == EMBEDDED else "",
            name,
            f"{wall[name]:,.0f}",
            f"{cpu[name]:,.0f}",
            f"{wall[name] / wall[CEILING]:.2f}",
            f"{wall[EMBEDDED] / wall[name]:.2f} x",
        )
    table.add_section()


def _range(lengths: tuple[int, int]) -> str:
    return str(lengths[0]) if lengths[0] == lengths[1] else f"{lengths[0]}-{lengths[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--models", nargs="+", default=["demo", "5M", "smollm2"], choices=["demo", "5M", "smollm2"])
    parser.add_argument("--repetitions", type=int, help="of every measurement; by default what is known to be enough")
    parser.add_argument("--only", nargs="+", default=[], metavar="LOAD", help="equal, mixed, 'groups of 8'")
    parser.add_argument("--baseline", type=Path, help="another source tree whose embedded engine is measured, too")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="endless loops beside every measurement")
    parser.add_argument("--engines", nargs="+", default=[], metavar="NAME", help="beginnings of names; default: all")
    arguments = parser.parse_args()
    table = Table(
        title=f"sampled tokens per second, float32, {arguments.threads} thread(s), {arguments.busy} busy loop(s)"
    )
    for column in ("model", "load: prompt + completion tokens", "engine"):
        table.add_column(column)
    for column in ("tokens/s", "per CPU-s", "of ceiling", "embedded"):
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory() as scratch:
        for case in cases(arguments.models, Path(scratch)):
            if arguments.repetitions is not None:
                case = case._replace(repetitions=arguments.repetitions)
            compare(case, arguments, table)
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table)
    if VLLM_PYTHON not in os.environ:
        console.print(f"No row for vLLM: ${VLLM_PYTHON} does not name the Python of its environment.")


if __name__ == "__main__":
    main()
