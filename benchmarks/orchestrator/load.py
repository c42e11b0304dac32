"""The orchestrator under load: how late its event loop runs, and what one rollout costs it.

    python benchmarks/orchestrator/load.py [--in-flight 2000] [--windows 3] [--window 20]

The orchestrator is a real process with sockets, journal, batches and dumps; the fake engine and the fake trainer are
this one. Single-turn rollouts of 512 tokens; latency is lognormal with a median of 2 s and sigma 1, 3.3 s on average.
One line for each window after the first. Lag is the orchestrator's own gauge. `late` is how much later than its latency
the engine's answers left, so that an engine that holds up the orchestrator shows; `busy` is all that the machine did.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
from fake_engine import FakeEngine
from fake_run import COMPLETION_TOKENS, OrchestratorProcess, running

from headrace.observe.metrics import Record, Tail
from headrace.trainer.tiny import write_tiny_model

POLL = 0.05
LAGS = ("p50", "p90", "p99", "max")


class Reading(msgspec.Struct):
    """Counters at the end of a window."""

    time: float
    answered: int
    cpu: float
    engine_cpu: float
    machine_busy: float


def read(engine: FakeEngine, orchestrator: OrchestratorProcess) -> Reading:
    return Reading(
        time.monotonic(), engine.answered, orchestrator.cpu_seconds(), time.process_time(), machine_busy_seconds()
    )


def machine_busy_seconds() -> float:
    """Of all cores together (Linux)."""
    user, nice, system, _idle, _iowait, *interrupts = Path("/proc/stat").read_text().splitlines()[0].split()[1:8]
    return sum(map(int, (user, nice, system, *interrupts))) / os.sysconf("SC_CLK_TCK")


async def next_lags(gauges: Tail, orchestrator: OrchestratorProcess) -> Record:
    """Wait until the orchestrator reports the lag of another window."""
    while True:
        orchestrator.check()
        for record in gauges.read():
            if "event_loop_lag/p50" in record:
                return record
        await asyncio.sleep(POLL)


def line(before: Reading, after: Reading, lags: Record, engine: FakeEngine, megabytes: float) -> str:
    seconds, count = after.time - before.time, after.answered - before.answered
    late = np.quantile(engine.lateness, 0.99)
    return (
        f"{count / seconds:>11.0f}{engine.in_flight:>11}{1e3 * (after.cpu - before.cpu) / count:>13.2f}"
        + "".join(f"{1e3 * lags[f'event_loop_lag/{name}']:>7.1f}" for name in LAGS)
        + f"{megabytes:>8.0f}{1e3 * late:>10.1f}"
        + f"{(after.cpu - before.cpu) / seconds:>9.2f}{(after.engine_cpu - before.engine_cpu) / seconds:>8.2f}"
        + f"{(after.machine_busy - before.machine_busy) / seconds:>6.2f}"
    )


async def measure(model: Path, arguments: argparse.Namespace) -> None:
    engine = FakeEngine(model, COMPLETION_TOKENS, median=2.0)
    settings = {"max_inflight_rollouts": arguments.in_flight, "log_loop_interval": arguments.window}
    print(f"{'rollouts/s':>11}{'in flight':>11}{'CPU ms each':>13}", end="")
    print("".join(f"{name:>7}" for name in LAGS) + f"{'RSS MB':>8}{'late p99':>10}", end="")
    print(f"{'cores':>9}{'engine':>8}{'busy':>6}", flush=True)
    async with running(engine, model, settings) as orchestrator:
        gauges = Tail(orchestrator.run.metrics)
        await next_lags(gauges, orchestrator)
        for _ in range(arguments.windows):
            engine.lateness.clear()
            before = read(engine, orchestrator)
            lags = await next_lags(gauges, orchestrator)
            megabytes = orchestrator.resident_megabytes()
            print(line(before, read(engine, orchestrator), lags, engine, megabytes), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--in-flight", type=int, default=2000)
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--window", type=float, default=20.0, help="seconds")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_model(Path(directory))
        asyncio.run(measure(Path(directory), arguments))


if __name__ == "__main__":
    main()
