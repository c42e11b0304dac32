"""A normal client's latency beside slow senders, stuck bodies and thousands of idle connections.

    OMP_NUM_THREADS=1 python -m benchmarks.inference.hostile_clients [--idle 5000] [--slow 200]

The server is a process of its own with the tiny model and deadlines of 5 s; the normal client sends one request after
another. Each row measures the client alone, opens the hostile connections in a third process, measures the client
again, waits until the server has closed all of them, and measures once more.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from headrace.inference.client.engine_client import EngineClient
from headrace.inference.schema import SamplingParams
from headrace.machine import raise_open_file_limit
from headrace.transport.endpoint import Endpoint
from tests.inference.fuzzing import MB, Memory, memory_of, running_server

DEADLINE_S = 5
MEASURED_REQUESTS = 100
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


class Effect(NamedTuple):
    """What hostile connections do to a server: before, with and after them."""

    latencies_ms: list[list[float]]
    memory: list[Memory]
    closed_after_s: float


async def measure(endpoint: Endpoint, directory: Path, kind: Hostile) -> Effect:
    """Measure a server of `running_server` in that directory."""
    client = EngineClient([endpoint.url])
    host, port = endpoint.url.removeprefix("http://").split(":")
    await latencies_ms(client)
    effect = Effect([await latencies_ms(client)], [memory_of(endpoint, directory)], 0.0)
    processes = multiprocessing.get_context("spawn")
    pipe, theirs = processes.Pipe()
    process = processes.Process(target=kind.run, args=(host, int(port), theirs))
    process.start()
    for _ in range(2):
        closed_after_s = await asyncio.to_thread(pipe.recv)  # None once all are open
        effect.latencies_ms.append(await latencies_ms(client))
        effect.memory.append(memory_of(endpoint, directory))
    process.join()
    await client.close()
    return effect._replace(closed_after_s=closed_after_s)


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
    table = Table(title="a normal client's latency and the server's memory, before / with / after hostile clients")
    for column in ("hostile clients", "p50 ms", "p95 ms", "all closed after s", "server MB", "in use MB"):
        table.add_column(column, justify="right")
    http = {"header_timeout": DEADLINE_S, "body_timeout": DEADLINE_S, "max_unauthenticated": 2 * arguments.idle}
    with tempfile.TemporaryDirectory() as name, running_server(Path(name), http=http, max_body_mb=64) as endpoint:
        for kind in kinds:
            effect = asyncio.run(measure(endpoint, Path(name), kind))
            quantiles = [statistics.quantiles(each, n=20) for each in effect.latencies_ms]
            sizes = [(each.server_mb, each.malloc_mb) for each in effect.memory]
            figures = [[each[9] for each in quantiles], [each[18] for each in quantiles], *zip(*sizes, strict=True)]
            p50, p95, resident, used = (" / ".join(f"{value:.1f}" for value in each) for each in figures)
            table.add_row(f"{kind.count:,} {kind.name}", p50, p95, f"{effect.closed_after_s:.1f}", resident, used)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
