"""How long a step's rollouts take to write as Parquet in a thread, and how late the event loop runs meanwhile.

    python benchmarks/orchestrator/dump.py [--repeats 5]

Beside the writer stands a plain one that hands Arrow Python rows, with fewer columns. Each has a process of its own,
since what Arrow loads on first use counts: the first write is shown apart from the median of those that follow. Lag is
how much later than asked a sleep of 1 ms ends, the worst during a write; `idle` is the lag when nothing is written.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.rollout.types import NOT_SAMPLED, Rollout, Sample, Turn
from headrace.transport.rollout_files import write_rollouts

PROMPT = 64
TICK = 0.001
IDLE_SECONDS = 0.3
WRITES = ((256, 512), (256, 4096))
Writer = Callable[[Path, list[Rollout]], None]


def rollout_of(rng: np.random.Generator, length: int) -> Rollout:
    """One turn of `length` tokens, prompt included, with GRPO's credit."""
    ids = rng.integers(0, 150_000, length)
    sampled = np.arange(length) >= PROMPT
    logprobs = np.where(sampled, -rng.exponential(0.5, length), 0.0)
    versions = np.where(sampled, 7, NOT_SAMPLED)
    turn = Turn(ids[:PROMPT], ids[PROMPT:], logprobs[PROMPT:], versions[PROMPT:], 1.0)
    sample = Sample(ids, sampled, logprobs, versions, PROMPT)
    sample.set_stream("advantages", np.where(sampled, rng.normal(), 0.0))
    messages = [{"role": "user", "content": "word " * PROMPT}, {"role": "assistant", "content": "word " * length}]
    reward = float(rng.random())
    return Rollout("env", "task", "group", 1, reward=reward, messages=messages, turns=[turn], samples=[sample])


def python_rows(directory: Path, rollouts: list[Rollout]) -> None:
    streams = {"token_ids": pa.int32(), "mask": pa.bool_(), "logprobs": pa.float32(), "versions": pa.int32()}
    tokens = pa.struct([(name, pa.list_(kind)) for name, kind in {**streams, "advantages": pa.float32()}.items()])
    schema = pa.schema(
        [("env", pa.string()), ("reward", pa.float64()), ("messages", pa.string()), ("samples", pa.list_(tokens))]
    )
    rows = [
        {
            "env": rollout.env,
            "reward": rollout.reward,
            "messages": msgspec.json.encode(rollout.messages).decode(),
            "samples": [
                {**{name: getattr(s, name) for name in streams}, "advantages": s.streams["advantages"]}
                for s in rollout.samples
            ],
        }
        for rollout in rollouts
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), directory / "rows.parquet", compression="zstd")


def flat_arrays(directory: Path, rollouts: list[Rollout]) -> None:
    write_rollouts(directory, 1, rollouts, [])


def nothing(directory: Path, rollouts: list[Rollout]) -> None:
    time.sleep(IDLE_SECONDS)


async def measure(write: Writer, directory: Path, rollouts: list[Rollout]) -> tuple[float, float, float]:
    """Seconds by the clock and of the CPU that writing took, and the worst lag meanwhile."""

    def cpu_seconds() -> float:
        before = time.thread_time()
        write(directory, rollouts)
        return time.thread_time() - before

    start = time.perf_counter()
    writing = asyncio.create_task(asyncio.to_thread(cpu_seconds))
    worst = 0.0
    while not writing.done():
        before = time.perf_counter()
        await asyncio.sleep(TICK)
        worst = max(worst, time.perf_counter() - before - TICK)
    return time.perf_counter() - start, await writing, worst


def report(name: str, count: int, length: int, repeats: int) -> None:
    """Measure one writer and print its line."""
    rng = np.random.default_rng(0)
    rollouts = [rollout_of(rng, length) for _ in range(count)]
    before = peak_megabytes()
    with tempfile.TemporaryDirectory() as directory:
        runs = [asyncio.run(measure(WRITERS[name], Path(directory), rollouts)) for _ in range(1 + repeats)]
    later = [statistics.median(column) for column in zip(*runs[1:], strict=True)]
    numbers = "".join(f"{seconds * 1e3:>10.1f}" for seconds in (*runs[0], *later))
    print(f"{f'{count} x {length}':<20}{name:<13}{numbers}{peak_megabytes() - before:>9.0f}", flush=True)


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    headings = "".join(f"{heading:>10}" for heading in ("first ms", "CPU ms", "lag ms", "later ms", "CPU ms", "lag ms"))
    print(f"{'rollouts x tokens':<33}{headings}{'MB more':>9}", flush=True)
    for count, length in WRITES:
        for name in WRITERS:
            process = multiprocessing.get_context("spawn").Process(target=report, args=(name, count, length, repeats))
            process.start()
            process.join()


WRITERS: dict[str, Writer] = {"idle": nothing, "Python rows": python_rows, "flat arrays": flat_arrays}

if __name__ == "__main__":
    main()
