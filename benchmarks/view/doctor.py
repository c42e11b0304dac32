"""How long `headrace doctor` takes on a run that goes on: the clock and the CPU time of the whole command.

    .venv/bin/python benchmarks/view/doctor.py [--steps 10000] [--repeats 10]

The run is a recorded one with as many steps; this process is its launcher and writes its status files, and one model
of its configuration is a server here. The CPU time says more than the clock on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from headrace.observe.run_state import HeartbeatContent
from headrace.observe.status import Status
from headrace.transport.run_dir import RunDir

RECORDED = Path(__file__).parents[2] / "tests" / "data" / "recorded-runs" / "rl"


def make_run(root: Path, steps: int, server: str) -> list[Status]:
    run = RunDir(root)
    shutil.copytree(RECORDED, root)
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    records = [record for record in lines if record["step"] == 2]
    run.metrics.write_text(
        "".join(json.dumps(record | {"step": step}) + "\n" for step in range(1, steps + 1) for record in records)
    )
    run.config.write_text(run.config.read_text() + f'\n[benchmark]\nbase_url = "{server}"\n')
    beat = HeartbeatContent(time.time(), os.getpid(), "running", steps, time.time(), host=socket.gethostname())
    run.heartbeat.write_bytes(msgspec.json.encode(beat))
    statuses = [Status(run.status, name) for name in ("inference", "orchestrator", "trainer")]
    for status in statuses:
        status.set("working")
    return statuses


def measure(command: list[str]) -> tuple[float, float]:
    """Return the seconds by the clock and of the CPU."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - started, sum(after[:2]) - sum(before[:2])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        statuses = make_run(Path(folder) / "run", arguments.steps, f"http://127.0.0.1:{server.getsockname()[1]}/v1")
        print(f"{'command':<28}{'clock s':>9}{'worst':>8}{'CPU s':>8}")
        doctor = [sys.executable, "-m", "headrace", "doctor", str(Path(folder) / "run")]
        for name, command in (("an empty Python", [sys.executable, "-c", "pass"]), ("headrace doctor", doctor)):
            clocks, cpus = zip(*(measure(command) for _ in range(arguments.repeats)), strict=True)
            print(f"{name:<28}{statistics.median(clocks):>9.2f}{max(clocks):>8.2f}{statistics.median(cpus):>8.3f}")
        for status in statuses:
            status.close("finished")
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
