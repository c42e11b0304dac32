"""Requests per second through the server and the client, and what each costs in CPU time.

    OMP_NUM_THREADS=1 python benchmarks/inference/over_http.py

The server is a process of its own with the tiny model; this process is the client. Groups of eight share a prompt.
"""

from __future__ import annotations

import asyncio
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from headrace.inference.client.engine_client import EngineClient
from headrace.inference.schema import SamplingParams
from headrace.trainer.tiny import write_tiny_model
from headrace.transport.run_dir import RunDir

SERVE = """
import sys
from pathlib import Path
from headrace.config.inference import InferenceConfig
from headrace.inference.server.main import serve
from headrace.observe.status import Status
from headrace.transport.run_dir import RunDir

run = RunDir(Path(sys.argv[2]))
config = InferenceConfig(model={"name": sys.argv[1]}, max_running=256, max_model_len=128)
serve(config, status=Status(run.status, "inference"), run=run)
"""
GROUP = 8


async def measure(client: EngineClient, concurrent: int, groups: int) -> float:
    """Seconds for that many groups with a bounded number of requests in flight."""
    rng = random.Random(0)
    permits = asyncio.Semaphore(concurrent)

    async def ask(prompt: list[int], length: int) -> None:
        async with permits:
            await client.generate(prompt, SamplingParams(max_tokens=length, ignore_eos=True))

    jobs = []
    for _ in range(groups):
        prompt = [rng.randrange(256) for _ in range(rng.randint(15, 25))]
        jobs += [ask(prompt, rng.randint(5, 15)) for _ in range(GROUP)]
    start = time.perf_counter()
    await asyncio.gather(*jobs)
    return time.perf_counter() - start


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


async def run(pid: int, endpoint: Path) -> Table:
    table = Table(title="through HTTP, about 20 prompt tokens and 10 new ones")
    for column in ("concurrent", "requests/s", "server CPU ms/request", "client CPU ms/request"):
        table.add_column(column, justify="right")
    client = EngineClient(endpoint)
    await client.wait_ready(120)
    await measure(client, 64, 16)
    for concurrent in (1, 32, 128, 256):
        groups = 3 if concurrent == 1 else 128
        server, own = cpu_seconds(pid), resource.getrusage(resource.RUSAGE_SELF)
        seconds = await measure(client, concurrent, groups)
        after = resource.getrusage(resource.RUSAGE_SELF)
        mine = after.ru_utime + after.ru_stime - own.ru_utime - own.ru_stime
        count = groups * GROUP
        table.add_row(
            str(concurrent),
            f"{count / seconds:,.0f}",
            f"{1000 * (cpu_seconds(pid) - server) / count:.2f}",
            f"{1000 * mine / count:.2f}",
        )
    await client.close()
    return table


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        model, run_dir = Path(directory) / "tiny", RunDir(Path(directory) / "run")
        write_tiny_model(model)
        run_dir.root.mkdir()
        process = subprocess.Popen([sys.executable, "-c", SERVE, str(model), str(run_dir.root)])
        try:
            Console().print(asyncio.run(run(process.pid, run_dir.endpoints)))
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
