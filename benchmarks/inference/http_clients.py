"""Compare HTTP clients for the orchestrator's calls to an engine: one sampling step, and the CPU time of a request.

    python benchmarks/inference/http_clients.py [--repeats 7] [--clients aiohttp httpx]

A step samples `2 * in flight` completions through `EngineClient.generate`, with a fixed number in flight, from our real
server in another process. Two engines stand behind it: a stand-in that returns 256 tokens at once, so that HTTP is all
there is, and the embedded engine with the tiny model, which samples 64 tokens for each prompt. The clients are
interleaved and the order is rotated, since other processes use the cores, too; medians are shown, wall time of a step
and user plus system time of the client's process for each request.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx

from headrace.config.inference import InferenceConfig
from headrace.inference.backend import EngineState, GenerationResult, TokenChunk
from headrace.inference.client import engine_client
from headrace.inference.client.http import HttpClient, HttpResponse, ServerUnreachable
from headrace.inference.schema import SamplingParams
from headrace.rollout.version import Version
from headrace.trainer.tiny import write_tiny_model

PROMPT_TOKENS = 100
STAND_IN_TOKENS = 256
SAMPLED_TOKENS = 64
IN_FLIGHT = (64, 256)


class HttpxClient:
    def __init__(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.AsyncClient(limits=limits, trust_env=False)

    async def request(
        self, method: str, base_url: str, route: str, body: bytes | None, timeout: float, headers: Mapping[str, str]
    ) -> HttpResponse:
        try:
            response = await self._client.request(
                method, base_url + route, content=body, headers=headers, timeout=timeout
            )
        except httpx.TransportError as error:
            raise ServerUnreachable(str(error)) from error
        return HttpResponse(response.status_code, dict(response.headers), response.content)

    async def close(self) -> None:
        await self._client.aclose()


CLIENTS: dict[str, Callable[[], Any]] = {"aiohttp": HttpClient, "httpx": HttpxClient}


class StandInGeneration:
    def __init__(self) -> None:
        tokens = [index % 200 for index in range(STAND_IN_TOKENS)]
        logprobs = [-0.123456789 - index / 7 for index in range(STAND_IN_TOKENS)]
        self._result = GenerationResult(tokens, logprobs, [(Version(0, 0), 0, STAND_IN_TOKENS)], "length", None)

    async def result(self) -> GenerationResult:
        return self._result

    async def chunks(self) -> AsyncIterator[TokenChunk]:
        yield TokenChunk(self._result.token_ids, self._result.logprobs)

    def cancel(self) -> None:
        pass


class StandInBackend:
    """An engine that returns the same completion at once."""

    name = "embedded"
    max_model_len = 1024
    vocab_size = 256

    def submit(self, token_ids: list[int], params: SamplingParams, **options: Any) -> StandInGeneration:
        return StandInGeneration()

    def state(self) -> EngineState:
        return EngineState(Version(0, 0), 0, 0, False, 4096, 0.0)

    async def failure(self) -> str:
        return await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        pass


def run_server(model: Path, engine: str, pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    asyncio.run(serve(model, engine, pipe))


async def serve(model: Path, engine: str, pipe: Connection) -> None:
    from headrace.inference.embedded.backend import start_embedded
    from headrace.inference.keys import Keys
    from headrace.inference.server.app import App
    from headrace.inference.server.http_server import HttpServer, bind, url_of
    from headrace.inference.server.main import make_chat

    config = InferenceConfig(model={"name": str(model)}, max_model_len=1024, max_running=256)
    chat = make_chat(config, "tiny", model)
    backend: Any = StandInBackend()
    if engine == "embedded":
        backend = await start_embedded(config, model, None)
    server = HttpServer(App(backend, chat, Keys(), max_body=1 << 25))
    listener = bind("127.0.0.1", 0)
    pipe.send(url_of(listener))
    await server.serve(sockets=[listener])


async def run_step(url: str, name: str, in_flight: int, tokens: int) -> tuple[float, float]:
    """Return the wall seconds of one step and the client's CPU seconds for each request."""
    engine_client.HttpClient = CLIENTS[name]  # type: ignore[misc]
    client = engine_client.EngineClient([url])
    count = 2 * in_flight
    permits = asyncio.Semaphore(in_flight)

    async def sample(number: int) -> None:
        prompt = [(number * 31 + place) % 200 for place in range(PROMPT_TOKENS)]
        async with permits:
            await client.generate(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True, seed=number))

    try:
        await asyncio.gather(*map(sample, range(in_flight)))  # connections are open, code is warm
        wall, cpu = time.perf_counter(), sum(os.times()[:2])
        await asyncio.gather(*map(sample, range(count)))
        return time.perf_counter() - wall, (sum(os.times()[:2]) - cpu) / count
    finally:
        await client.close()


def measure(model: Path, engine: str, names: list[str], repeats: int) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=run_server, args=(model, engine, theirs), daemon=True)
    server.start()
    url = ours.recv()
    time.sleep(0.5)
    tokens = STAND_IN_TOKENS if engine == "stand-in" else SAMPLED_TOKENS
    for in_flight in IN_FLIGHT:
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for repeat in range(repeats):
            first = repeat % len(names)
            for name in names[first:] + names[:first]:
                found[name].append(asyncio.run(run_step(url, name, in_flight, tokens)))
        baseline = statistics.median(wall for wall, _ in found[names[0]])
        for name in names:
            wall = statistics.median(wall for wall, _ in found[name])
            cpu = statistics.median(cpu for _, cpu in found[name])
            print(
                f"| {engine} | {in_flight} | {name} | {1e3 * wall:.0f} | {100 * (wall / baseline - 1):+.0f}% "
                f"| {1e3 * cpu:.2f} |",
                flush=True,
            )
    server.terminate()
    server.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--clients", nargs="+", choices=CLIENTS, default=list(CLIENTS))
    parser.add_argument("--engines", nargs="+", choices=("stand-in", "embedded"), default=["stand-in", "embedded"])
    arguments = parser.parse_args()
    print("| engine | in flight | client | step (ms) | against the first | client CPU (ms/request) |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_model(Path(directory))
        for engine in arguments.engines:
            measure(Path(directory), engine, arguments.clients, arguments.repeats)


if __name__ == "__main__":
    main()
