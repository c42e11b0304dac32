"""A normal client's latency beside slow senders, stuck bodies and thousands of idle connections.

    OMP_NUM_THREADS=1 python benchmarks/inference/hostile_clients.py [--idle 5000] [--slow 200]

The server is a process of its own with the tiny model and deadlines of 5 s; the normal client sends one request after
another. Each row measures the client alone, opens the hostile connections in a third process, measures the client
again, and waits until the server has closed all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import psutil
from rich.console import Console
from rich.table import Table

from headrace.inference.client.engine_client import EngineClient
from headrace.inference.schema import SamplingParams
from headrace.machine import raise_open_file_limit
from headrace.trainer.tiny import write_tiny_model
from headrace.transport.endpoint import Endpoint, read_endpoints
from headrace.transport.run_dir import RunDir

SERVE = """
import sys
from pathlib import Path
from headrace.config.inference import HttpConfig, InferenceConfig
from headrace.inference.server.main import serve
from headrace.observe.status import Status
from headrace.transport.run_dir import RunDir

run = RunDir(Path(sys.argv[2]))
http = HttpConfig(header_timeout=5, body_timeout=5, max_unauthenticated=int(sys.argv[3]))
config = InferenceConfig(model={"name": sys.argv[1]}, max_running=64, max_model_len=128, http=http)
serve(config, status=Status(run.status, "inference"), run=run)
"""
MB = 2**20
MEASURED_REQUESTS = 200
DRIP_S = 0.5


class Hostile(NamedTuple):
    """Connections that send a beginning and then, if `drips`, a byte at a time until the server closes them."""

    name: str
    count: int
    begin: bytes
    drips: bool

    def run(self, host: str, port: int, pipe: Connection) -> None:
        """Report when all are open and then, when the last is closed, how many seconds one of them lasted at most."""
        raise_open_file_limit()
        pipe.send(asyncio.run(self._run_all(host, port, pipe)))

    async def _run_all(self, host: str, port: int, pipe: Connection) -> float:
        permits, opened = asyncio.Semaphore(100), 0

        async def run() -> float:
            nonlocal opened
            async with permits:
                reader, writer = await asyncio.open_connection(host, port)
                writer.write(self.begin)
            began = time.monotonic()
            opened += 1
            if opened == self.count:
                pipe.send(None)
            reading = asyncio.create_task(reader.read())
            while not reading.done():
                await asyncio.wait({reading}, timeout=DRIP_S if self.drips else None)
                if self.drips and not reading.done():
                    writer.write(b"x")
            reading.exception()  # a reset is an end, too
            writer.close()
            return time.monotonic() - began

        return max(await asyncio.gather(*[run() for _ in range(self.count)]))


async def latencies_ms(client: EngineClient) -> list[float]:
    found = []
    for _ in range(MEASURED_REQUESTS):
        began = time.perf_counter()
        await client.generate([5, 6, 7], SamplingParams(max_tokens=2, ignore_eos=True))
        found.append(1000 * (time.perf_counter() - began))
    return found


async def measure(endpoint: Endpoint, kinds: Sequence[Hostile]) -> Table:
    table = Table(title="latency of a normal client in ms, alone / beside hostile ones")
    for column in ("hostile clients", "p50", "p95", "all closed after s", "server MB"):
        table.add_column(column, justify="right")
    client, server = EngineClient([endpoint.url]), psutil.Process(endpoint.pid)
    host, port = endpoint.url.removeprefix("http://").split(":")
    await latencies_ms(client)
    processes = multiprocessing.get_context("spawn")
    for kind in kinds:
        alone, before = await latencies_ms(client), server.memory_info().rss / MB
        pipe, theirs = processes.Pipe()
        process = processes.Process(target=kind.run, args=(host, int(port), theirs))
        process.start()
        await asyncio.to_thread(pipe.recv)
        beside, memory = await latencies_ms(client), server.memory_info().rss / MB
        lasted = await asyncio.to_thread(pipe.recv)
        process.join()
        quantiles = [statistics.quantiles(each, n=20) for each in (alone, beside)]
        p50, p95 = (" / ".join(f"{each[place]:.1f}" for each in quantiles) for place in (9, 18))
        table.add_row(f"{kind.count:,} {kind.name}", p50, p95, f"{lasted:.1f}", f"{before:.0f} / {memory:.0f}")
    await client.close()
    return table


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--idle", type=int, default=5000)
    parser.add_argument("--slow", type=int, default=200)
    arguments = parser.parse_args()
    post = b"POST /inference/v1/generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 30000000\r\n\r\n"
    kinds = (
        Hostile("idle", arguments.idle, b"", drips=False),
        Hostile("slow heads", arguments.slow, b"GET /health HTTP/1.1\r\nX: ", drips=True),
        Hostile("slow bodies", arguments.slow, post + b'{"token_ids"', drips=True),
        Hostile("stuck large bodies", 20, post + b" " * 2 * MB, drips=False),
    )
    with tempfile.TemporaryDirectory() as directory:
        model, run = Path(directory) / "tiny", RunDir(Path(directory) / "run")
        write_tiny_model(model)
        run.root.mkdir()
        process = subprocess.Popen([sys.executable, "-c", SERVE, str(model), str(run.root), str(2 * arguments.idle)])
        try:
            while not (endpoints := read_endpoints(run.endpoints)):
                time.sleep(0.1)
            Console().print(asyncio.run(measure(endpoints["inference"], kinds)))
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
