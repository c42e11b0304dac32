"""Steady traffic through the real server with the orchestrator's client: what an engine does in a run.

    python -m benchmarks.inference.traffic [--models 0.5b 0.6b 4b] [--traffic gsm8k "gsm8k, seeded" tools ...]
                                           [--engines embedded "vllm served" "vllm alone"] [--kv keep recompute]

A closed loop with a constant number of requests in flight, groups of eight on one prompt, completion lengths that are
forced, and new weights after every 256 completions (or conversations). Random weights in the shapes of Qwen2.5-0.5B,
Qwen3-0.6B and Qwen3-4B; without a GPU, the tiny model with lengths of a tenth. `tools` are conversations of short turns
whose prefixes grow. The first requests are those that run at one moment of steady traffic, with random tokens in the
place of those they have sampled. Rows of one model and engine share a server. `vllm served` is vLLM behind the same
server; `vllm alone` is vLLM's asynchronous engine in one process, without server and without new weights; both need
$HEADRACE_VLLM_PYTHON, the Python of vLLM's environment.

`share` is the rate divided by the engine's own decode rate: that of as many requests as ran on average, which all start
at once and decode at the traffic's mean context. `host` is the time per step that Python works outside of waiting for
the GPU, mostly while the GPU computes the next step; `idle` is the share of time in which the GPU computes none.
`between tokens` is measured on streamed requests, which take their turn in the queue like others; the gap of an update
is from the last token of the old weights to the first of the new ones, a median with the number of gaps.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any, NamedTuple

import torch
from benchmarks.inference.traffic_jobs import TRAFFIC, Conversation, Traffic
from benchmarks.models import write_qwen3
from benchmarks.weights.publish import TrainerProcess
from rich.console import Console
from rich.table import Table

from headrace.inference.client.engine_client import EngineClient
from headrace.inference.client.http import HttpClient
from headrace.inference.schema import SamplingParams
from headrace.rollout.version import Version
from headrace.trainer.tiny import write_tiny_model
from headrace.transport.endpoint import Endpoint, read_endpoints
from headrace.transport.run_dir import RunDir

ON_GPU = torch.cuda.is_available()
VLLM_PYTHON = "HEADRACE_VLLM_PYTHON"
VLLM_ARGUMENTS = ["--attention-config", json.dumps({"backend": "FLASH_ATTN", "flash_attn_version": 3})]
ENGINES = ("embedded", "vllm served", "vllm alone")
UPDATE_EVERY = 256
"""Completions, or whole conversations, between two versions of the weights."""
MAX_MODEL_LEN = {"gsm8k": 1024, "reasoning": 5120, "tools": 4096}
POLL_S = 0.25
DECODE_S = 2.0
"""Seconds of decoding in which an engine's own rate is measured, in as many batches as that takes."""
MAX_DECODE_BATCHES = 40
DECODE_TIMEOUT_S = 300.0
DECODE_POLL_S = 0.05 if ON_GPU else 0.02
RAMP_UP_S = 0.2 if ON_GPU else 0.0
"""Until a batch that runs decodes evenly; a tenth of the lengths on a CPU has no time for that."""
PROBES = 4
"""Streamed requests on which the time between tokens is measured; each costs the server an event per token."""
SERVE = """
import json, sys
from pathlib import Path
from headrace.config.inference import InferenceConfig
from headrace.inference.server.main import serve
from headrace.observe.status import Status
from headrace.transport.run_dir import RunDir

run = RunDir(Path(sys.argv[1]))
serve(InferenceConfig.model_validate(json.loads(sys.argv[2])), status=Status(run.status, "inference"), run=run)
"""


class Setting(NamedTuple):
    """What is measured, and for how long."""

    model: str
    name: str
    traffic: Traffic
    kv: str
    in_flight: int
    max_running: int
    vocab: int
    max_model_len: int
    warm_up_s: float
    seconds: float


class Row(NamedTuple):
    setting: Setting
    engine: str
    rate: float
    running: float = 0.0
    share: float | None = None
    step_ms: float | None = None
    """None, like what follows, of engines that do not count their steps."""
    host_ms: float | None = None
    idle_share: float | None = None
    """Time in which the GPU computed no step."""
    prefill_share: float | None = None
    """Steps that also prefill."""
    gaps_ms: tuple[float, float] = (0.0, 0.0)
    """Median and 99th percentile of the time between two tokens."""
    updates: int = 0
    update_ms: float = 0.0
    """Mean time from the call to the answer."""
    update_gaps_ms: tuple[float, ...] = ()
    """From a streamed request's last token of the old weights to its first of the new ones."""


class Counters(NamedTuple):
    """The engine's counters at a moment, from its Prometheus page."""

    at: float
    running: float
    tokens: float
    steps: float
    prefill_steps: float
    wait_s: float
    busy_s: float


class Stream(NamedTuple):
    """A request whose tokens come one by one."""

    times: list[float]
    """When each token came."""
    changes: list[int]
    """The tokens that are the first ones of new weights; known when the request ends."""


class Server:
    """A server of one engine, and the clients of the loop."""

    def __init__(self, endpoints: Path) -> None:
        self.client = EngineClient(endpoints)
        self.http = HttpClient()
        self._endpoints = endpoints

    @property
    def endpoint(self) -> Endpoint:
        [endpoint] = read_endpoints(self._endpoints).values()
        return endpoint

    async def counters(self) -> Counters:
        endpoint = self.endpoint
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        page = await self.http.request("GET", endpoint.url, "/metrics", None, 10.0, headers)
        values = dict(re.findall(r"^headrace_(\w+) ([\d.e+-]+)$", page.content.decode(), re.MULTILINE))
        names = ("requests_running", "tokens_sampled_total", "steps_total", "prefill_steps_total")
        numbers = [
            float(values.get(name, 0)) for name in (*names, "device_wait_seconds_total", "device_busy_seconds_total")
        ]
        return Counters(time.perf_counter(), *numbers)

    async def stream(self, tokens: list[int], count: int, into: Stream) -> None:
        endpoint = self.endpoint
        sampling = {"max_tokens": count, "ignore_eos": True, "logprobs": 0}
        body = json.dumps({"token_ids": tokens, "stream": True, "sampling_params": sampling}).encode()
        headers = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
        async for event in self.http.stream("POST", endpoint.url, "/inference/v1/generate", body, 600.0, headers):
            now = time.perf_counter()
            [choice] = json.loads(event)["choices"]
            into.times.extend([now] * len(choice["token_ids"]))
            into.changes.extend(span["start"] for span in choice.get("weight_versions", ())[1:])

    async def close(self) -> None:
        await self.client.close()
        await self.http.close()


@contextmanager
def served(config: dict[str, Any], run: RunDir) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", SERVE, str(run.root), json.dumps(config)])
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


class Loop:
    """Requests in flight without end; `has_enough` is set after every 256 conversations."""

    def __init__(self, server: Server, setting: Setting) -> None:
        self._server = server
        self._setting = setting
        self._conversations = setting.traffic.steady_conversations(setting.vocab, setting.max_running)
        self._seeds = itertools.count()
        self._rng = random.Random(1)
        self.rollouts = 0
        self.has_enough = asyncio.Event()

    async def keep_asking(self) -> None:
        while True:
            await self._converse(next(self._conversations))

    async def _converse(self, turns: Conversation) -> None:
        tokens: list[int] = []
        for turn in turns:
            tokens = tokens + turn.tokens
            params = SamplingParams(
                max_tokens=turn.completion,
                ignore_eos=True,
                seed=next(self._seeds) if self._setting.traffic.seeded else None,
            )
            completion = await self._server.client.generate(tokens, params)
            tokens = tokens + completion.token_ids
        self.rollouts += 1
        if self.rollouts % UPDATE_EVERY == 0:
            self.has_enough.set()

    async def keep_probing(self, probes: list[Stream]) -> None:
        while True:
            prompt = [self._rng.randrange(3, self._setting.vocab) for _ in range(16)]
            probes.append(Stream([], []))
            count = min(256, self._setting.max_model_len - 32)
            await self._server.stream(prompt, count, probes[-1])


class Updates:
    """New weights whenever the loop has enough rollouts, and when each began and ended."""

    def __init__(self, run: RunDir, trainer: TrainerProcess) -> None:
        self._run, self._trainer = run, trainer
        self._steps = itertools.count(1)
        self.times: list[tuple[float, float]] = []

    async def keep_updating(self, loop: Loop, server: Server) -> None:
        while True:
            await loop.has_enough.wait()
            loop.has_enough.clear()
            version = Version(0, next(self._steps))
            await asyncio.to_thread(self._trainer.publish, "ipc" if ON_GPU else "stream", version)
            begun = time.perf_counter()
            await server.client.update_weights(self._run.weights.path(version), version)
            self.times.append((begun, time.perf_counter()))


@asynccontextmanager
async def background(*coroutines: Any) -> AsyncIterator[list[asyncio.Task[Any]]]:
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        yield tasks
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def measure_traffic(server: Server, setting: Setting, updates: Updates) -> dict[str, Any]:
    loop = Loop(server, setting)
    probes: list[Stream] = []
    tasks = [loop.keep_asking() for _ in range(setting.in_flight - PROBES)]
    tasks += [loop.keep_probing(probes) for _ in range(PROBES)]
    if setting.traffic.updates:
        tasks.append(updates.keep_updating(loop, server))
    async with background(*tasks):
        await asyncio.sleep(setting.warm_up_s)
        counters = [await server.counters()]
        while counters[-1].at - counters[0].at < setting.seconds:
            await asyncio.sleep(POLL_S)
            counters.append(await server.counters())
    first, last = counters[0], counters[-1]
    seconds, steps = last.at - first.at, last.steps - first.steps
    cuts = quantiles([b - a for times, _ in probes for a, b in pairwise(times) if a > first.at] or [0.0, 0.0], n=100)
    changes = [(times[at - 1], times[at]) for times, changes in probes for at in changes]
    updated = [(begun, ended) for begun, ended in updates.times if begun > first.at]
    return {
        "rate": (last.tokens - first.tokens) / seconds,
        "running": mean(each.running for each in counters),
        "step_ms": 1e3 * seconds / steps if steps else None,
        "host_ms": 1e3 * (seconds - (last.wait_s - first.wait_s)) / steps if steps and ON_GPU else None,
        "idle_share": 1 - (last.busy_s - first.busy_s) / seconds if steps and ON_GPU else None,
        "prefill_share": (last.prefill_steps - first.prefill_steps) / steps if steps else None,
        "gaps_ms": (1e3 * cuts[49], 1e3 * cuts[98]),
        "updates": len(updated),
        "update_ms": 1e3 * mean([ended - begun for begun, ended in updated] or [0.0]),
        "update_gaps_ms": tuple(1e3 * (b - a) for a, b in changes if a > first.at),
    }


async def measure_decoding(server: Server, setting: Setting, running: int) -> float:
    """Return tokens/s of `running` requests at the traffic's mean context, from when all run until the first ends; 0 if
    they are too short to be measured.

    The mean is over sampled tokens: it is what the traffic's attention reads, too.
    """
    sampled = read = 0.0
    for turns in itertools.islice(setting.traffic.conversations(setting.vocab, 1), 512):
        context = 0
        for turn in turns:
            context += len(turn.tokens) + turn.completion
            sampled += turn.completion
            read += turn.completion * (context - turn.completion / 2)
    before = round(read / sampled)
    count = min(500, 2 * before - 2, setting.max_model_len - before)
    rng = random.Random(2)
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    tokens = seconds = 0.0
    for _ in range(MAX_DECODE_BATCHES):
        prompts = [
            [rng.randrange(3, setting.vocab) for _ in range(max(1, before - count // 2))] for _ in range(running)
        ]
        first, last = await decode_batch(server, prompts, params)
        tokens, seconds = tokens + last.tokens - first.tokens, seconds + last.at - first.at
        if seconds >= DECODE_S:
            break
    return tokens / seconds if seconds else 0.0


async def decode_batch(server: Server, prompts: list[list[int]], params: SamplingParams) -> tuple[Counters, Counters]:
    """Return the counters when all requests run, and before the first ends; the same twice if it ends before."""
    while (await server.counters()).running:  # requests that were cancelled
        await asyncio.sleep(0.02)
    async with background(*(server.client.generate(prompt, params) for prompt in prompts)) as requests:
        first = await server.counters()
        while first.running < len(prompts) or first.tokens == 0:
            if any(request.done() for request in requests):
                return first, first
            await asyncio.sleep(DECODE_POLL_S)
            first = await server.counters()
        await asyncio.sleep(RAMP_UP_S)
        first = last = await server.counters()
        while (counters := await server.counters()).running == len(prompts):
            last = counters
            await asyncio.sleep(DECODE_POLL_S)
    return first, last


async def measure_served(
    server: Server, settings: list[Setting], run: RunDir, model: Path, engine: str
) -> AsyncIterator[Row]:
    trainer = TrainerProcess("benchmarks.weights.pause", str(run.weights.directory), str(model))
    try:
        trainer.wait_until_ready()
        await server.client.wait_ready(600)
        updates = Updates(run, trainer)
        own: dict[str, float] = {}
        for setting in settings:
            found = await measure_traffic(server, setting, updates)
            lengths = setting.traffic.lengths
            if lengths not in own:
                async with asyncio.timeout(DECODE_TIMEOUT_S):
                    own[lengths] = await measure_decoding(server, setting, round(found["running"]))
            yield Row(setting, engine, share=found["rate"] / own[lengths] if own[lengths] else None, **found)
    finally:
        trainer.kill()
        await server.close()


async def measure(engine: str, settings: list[Setting], model: Path, folder: Path, rows: list[Row]) -> None:
    """Add a row for each setting; they differ in the traffic only."""
    if engine == "vllm alone":
        for row in measure_vllm_alone(settings, model):
            rows.append(row)
            print(row, flush=True)
        return
    run = RunDir(folder / "run")
    run.root.mkdir()
    config: dict[str, Any] = {
        "model": {"name": str(model)},
        "max_running": settings[0].max_running,
        "max_model_len": settings[0].max_model_len,
        "kv_on_update": settings[0].kv,
    }
    if engine == "vllm served":
        config |= {"engine": "vllm", "vllm": {"python": os.environ[VLLM_PYTHON], "args": VLLM_ARGUMENTS}}
    with served(config, run):
        async for row in measure_served(Server(run.endpoints), settings, run, model, engine):
            rows.append(row)
            print(row, flush=True)


def measure_vllm_alone(settings: list[Setting], model: Path) -> Iterator[Row]:
    names = ("in_flight", "max_running", "max_model_len", "warm_up_s", "seconds")
    options = {name: getattr(settings[0], name) for name in names} | {"kv_bytes": 96 << 30}
    command = [os.environ[VLLM_PYTHON], "-m", "benchmarks.inference.traffic_vllm", str(model), json.dumps(options)]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_HOST_IP": "127.0.0.1"}
    command += [setting.name for setting in settings]
    left = iter(settings)
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):  # vLLM prints other lines
                yield Row(next(left), "vllm alone", json.loads(line)["tokens_per_second"])
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def table_of(rows: list[Row]) -> Table:
    table = Table(title="steady traffic, groups of 8, new weights after every 256 completions")
    for column in ("model", "traffic", "KV on update", "engine"):
        table.add_column(column)
    for column in ("tokens/s", "running", "share", "ms/step", "host ms", "idle", "with prefill", "between tokens ms"):
        table.add_column(column, justify="right")
    table.add_column("updates", justify="right")
    for row in rows:
        setting = row.setting
        table.add_row(
            setting.model,
            setting.name,
            setting.kv,
            row.engine,
            f"{row.rate:,.0f}",
            f"{row.running:.0f}",
            *(
                "" if value is None else format(value, form)
                for value, form in (
                    (row.share, ".2f"),
                    (row.step_ms, ".2f"),
                    (row.host_ms, ".2f"),
                    (row.idle_share, ".0%"),
                    (row.prefill_share, ".0%"),
                )
            ),
            f"{row.gaps_ms[0]:.1f}, {row.gaps_ms[1]:.1f}",
            f"{row.updates} of {row.update_ms:.0f} ms{describe_gaps(row.update_gaps_ms)}" if row.updates else "",
        )
    return table


def describe_gaps(gaps: Sequence[float]) -> str:
    return f", gap {median(gaps):.1f} ({len(gaps)})" if gaps else ""


def make_setting(model: str, name: str, kv: str, arguments: argparse.Namespace) -> Setting:
    traffic = TRAFFIC[name]
    longest = max(MAX_MODEL_LEN[TRAFFIC[each].lengths] for each in arguments.traffic)
    if not ON_GPU:
        traffic = traffic._replace(scale=0.1, max_tokens=traffic.max_tokens // 10)
    return Setting(
        model,
        name,
        traffic,
        kv,
        arguments.in_flight or (384 if ON_GPU else 24),
        arguments.max_running or (256 if ON_GPU else 16),
        150_000 if ON_GPU else 256,
        max_model_len=longest if ON_GPU else longest // 8,
        warm_up_s=arguments.warm_up,
        seconds=arguments.seconds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["0.5b", "0.6b", "4b"] if ON_GPU else ["tiny"])
    parser.add_argument("--traffic", nargs="+", default=["gsm8k"], choices=list(TRAFFIC))
    parser.add_argument("--engines", nargs="+", default=list(ENGINES if ON_GPU else ENGINES[:2]), choices=ENGINES)
    parser.add_argument("--kv", nargs="+", default=["keep"], choices=["keep", "recompute"])
    parser.add_argument("--in-flight", type=int)
    parser.add_argument("--max-running", type=int)
    parser.add_argument("--warm-up", type=float, default=8.0, metavar="SECONDS")
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    engines = [name for name in arguments.engines if name == "embedded" or VLLM_PYTHON in os.environ]
    rows: list[Row] = []
    for model in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            directory = Path(folder) / "model"
            write_tiny_model(directory) if model == "tiny" else write_qwen3(directory, model)
            for kv, engine in itertools.product(arguments.kv, engines):
                settings = [make_setting(model, name, kv, arguments) for name in arguments.traffic]
                with tempfile.TemporaryDirectory() as run:
                    try:
                        asyncio.run(measure(engine, settings, directory, Path(run), rows))
                    except Exception as error:  # the other rows are still worth having
                        print(f"{model}, {kv}, {engine}: {type(error).__name__}: {error}", flush=True)
    Console(width=160).print(table_of(rows))


if __name__ == "__main__":
    main()
