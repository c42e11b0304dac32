"""A long run of the orchestrator: does its memory stay where it is?

    python benchmarks/orchestrator/soak.py [--rollouts 200000] [--in-flight 512]

The same processes as in load.py, with a median latency of 0.2 s so that it ends in minutes. Memory is flat if it never
passes 500 MB and ends no more than 5% above where it was after a fifth of the rollouts, when everything is warm.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

from fake_engine import FakeEngine
from fake_run import COMPLETION_TOKENS, running

from headrace.trainer.tiny import write_tiny_model

POLL = 0.1
LIMIT_MB = 500
GROWTH = 1.05
PARTS = 10
WARM = 2
"""Tenths after which memory must not grow any more."""


async def soak(model: Path, rollouts: int, in_flight: int) -> list[float]:
    """Resident memory after each tenth, in MB; a line is printed for each."""
    engine = FakeEngine(model, COMPLETION_TOKENS, median=0.2)
    # Few dumps stay on disk: what is asked here is memory.
    settings = {"max_inflight_rollouts": in_flight, "keep_rollouts": 20}
    resident: list[float] = []
    async with running(engine, model, settings) as orchestrator:
        for part in range(1, PARTS + 1):
            began, before = time.monotonic(), engine.answered
            while engine.answered < rollouts * part // PARTS:
                orchestrator.check()
                await asyncio.sleep(POLL)
            resident.append(orchestrator.resident_megabytes())
            engine.lateness.clear()
            pace = (engine.answered - before) / (time.monotonic() - began)
            print(f"{part / PARTS:>6.0%}{engine.answered:>10}{resident[-1]:>9.0f}{pace:>12.0f}", flush=True)
    return resident


def verdict(resident: list[float]) -> str:
    flat = max(resident) < LIMIT_MB and resident[-1] < GROWTH * resident[WARM - 1]
    return f"{'flat' if flat else 'NOT FLAT'}: {resident[WARM - 1]:.0f} MB warm, {resident[-1]:.0f} MB at the end"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=200_000)
    parser.add_argument("--in-flight", type=int, default=512)
    arguments = parser.parse_args()
    print(f"{'':>6}{'rollouts':>10}{'RSS MB':>9}{'rollouts/s':>12}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_model(Path(directory))
        resident = asyncio.run(soak(Path(directory), arguments.rollouts, arguments.in_flight))
    print(verdict(resident))


if __name__ == "__main__":
    main()
