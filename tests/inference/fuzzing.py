"""Mutated requests to a server, at the level of JSON and of HTTP: none may end in a 5xx, hang, or stay in the engine.

    python -m tests.inference.fuzzing [--requests 50000] [--seed 0]

Request N of a seed depends on nothing else, so a failure is replayed by its number: `Fuzzer(seed).request(N)`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from rich.console import Console
from rich.table import Table

from headrace.inference.client.engine_client import EngineClient
from headrace.inference.schema import SamplingParams
from headrace.trainer.tiny import write_tiny_model
from headrace.transport.endpoint import Endpoint, read_endpoints
from headrace.transport.run_dir import RunDir

SERVE = """
import ctypes
import gc
import json
import signal
import sys
from pathlib import Path
from headrace.config.inference import InferenceConfig
from headrace.inference.server.main import serve
from headrace.observe.status import Status
from headrace.transport.run_dir import RunDir

run = RunDir(Path(sys.argv[1]))

class Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena o s n mapped u f used free keep".split()]

mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", Mallinfo)  # only in glibc
mallinfo.restype = Mallinfo

def count_memory(*_):
    gc.collect()
    c = mallinfo()
    (run.root / "memory").write_text(f"{sys.getallocatedblocks()} {c.used + c.mapped} {c.free} ")

signal.signal(signal.SIGUSR1, count_memory)
config = InferenceConfig(model={"name": sys.argv[2]}, **json.loads(sys.argv[3]))
serve(config, status=Status(run.status, "inference"), run=run)
"""
CONFIG = {"max_running": 32, "max_model_len": 64, "max_body_mb": 1}
CONCURRENT = 24
ANSWER_TIMEOUT_S = 120.0
"""For the answer to a request that is complete: far more than any takes, since one that hangs is what is looked for."""
BROKEN_WAIT_S = 0.1
"""For the answer to one that may be incomplete; then the client disconnects."""
MB = 2**20

IDS = [5, 6, 7]
MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]
SAMPLING: dict[str, Any] = {
    **{"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "stop": ["a", "b"], "max_tokens": 3},
    **{"stop_token_ids": [5, 258], "ignore_eos": True},
}
OPENAI: dict[str, Any] = {
    **SAMPLING,
    **{"n": 2, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True, "cache_salt": "a"},
    **{"presence_penalty": 0, "logit_bias": {}, "min_tokens": 0, "user": "me", "metadata": {"a": "b"}},
}
PATHS = ["", "/", "/nowhere", "/dev/zero", "/dev/tty", "/proc/self/mem", "a\0b", "x" * 5000, "/tmp", "../../etc/passwd"]
BODIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "/inference/v1/generate": (
        {"token_ids": IDS},
        {
            "sampling_params": {**SAMPLING, "logprobs": 1, "prompt_logprobs": 1},
            **{"stream": True, "urgent": True, "cache_salt": "a", "request_id": "b", "flat_logprobs": True},
        },
    ),
    "/v1/chat/completions": (
        {"messages": MESSAGES},
        {
            **OPENAI,
            **{"logprobs": True, "top_logprobs": 2, "tool_choice": "auto", "max_completion_tokens": 3},
            "tools": [{"type": "function", "function": {"name": "f"}}],
        },
    ),
    "/v1/completions": ({"prompt": ["a", "b"]}, {**OPENAI, "echo": True, "logprobs": 2, "best_of": 2}),
    "/tokenize": ({"prompt": "hello"}, {"messages": MESSAGES, "add_special_tokens": True}),
    "/detokenize": ({"tokens": IDS}, {"model": "tiny"}),
    "/update_weights": ({"path": PATHS, "incarnation": 0, "step": 1}, {}),
    "/v1/load_lora_adapter": ({"lora_name": "a", "lora_path": PATHS}, {}),
    "/v1/unload_lora_adapter": ({"lora_name": "a"}, {}),
    "/pause": ({}, {}),
    "/resume": ({}, {}),
}
READ_ONLY = ["/health", "/metrics", "/v1/models", "/v1/models/tiny", "/", "//", "/..", "/%00", "/?%ff", "/health/", "*"]
WILD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 20, 128, 129, 2**31, 2**63, 2**64, -(2**63), 10**30, 10**400, -1.0, 1e308),
    *(float("nan"), float("inf"), "", "a", "\0", "\ud800", "é\u202e\x1b", "x" * 3000, [], {}, [[]], [{}], {"": None}),
    *(1e-300, [5] * 70, [-1], [264], ["a", 5], {"role": "tool"}, [{"role": "x", "content": 5}], "<|im_end|>"),
]
HEADERS = [
    *("X-Session-ID: \xff", "Expect: 100-continue", "Upgrade: websocket\r\nConnection: Upgrade", "Connection: close"),
    *("Transfer-Encoding: chunked", "Transfer-Encoding: gzip, chunked", "Content-Encoding: gzip", "X: " + "y" * 70_000),
    *("Authorization: Bearer wrong", "Authorization: \x7f", "Host: evil.example", "Origin: null", "Content-Length: 3"),
    *("Content-Length: -1", "Content-Length: 99999999999999999999", "X y: z", ": a", "A\0: b", "Content-Type: text/x"),
]


class Request(NamedTuple):
    content: bytes
    may_be_incomplete: bool


class Fuzzer:
    """Requests of one seed, for a server with this admin key."""

    def __init__(self, seed: int, admin_key: str) -> None:
        self._seed, self._key = seed, admin_key

    def request(self, number: int) -> Request:
        rng = random.Random(f"{self._seed}-{number}")
        if rng.random() < 0.05:
            method = rng.choice(["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "BREW"])
            return self._on_wire(rng, method, rng.choice([*READ_ONLY, *BODIES]), b"")
        path = rng.choice([*BODIES])
        needed, optional = BODIES[path]
        body = {name: rng.choice(value) if value is PATHS else value for name, value in needed.items()}
        body |= {name: value for name, value in optional.items() if rng.random() < 0.25}
        body = json.loads(json.dumps(body))
        for _ in range(rng.choice([0, 0, 1, 1, 2])):
            _spoil(rng, body)
        content = json.dumps(body).encode()
        if rng.random() < 0.1:
            content = _damage(rng, content)
        if rng.random() < 0.01:
            content = rng.choice([b"[" * 100_000, b" " * 2 * MB, b'{"a":' * 50_000, b'"' + b"x" * (MB - 9), b""])
        return self._on_wire(rng, "POST", path, content)

    def _on_wire(self, rng: random.Random, method: str, path: str, body: bytes) -> Request:
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {self._key}\r\n"
        chunked = bool(body) and rng.random() < 0.1
        broken = rng.random() < 0.2
        if broken and rng.random() < 0.5:
            head += rng.choice(HEADERS) + "\r\n"
        if chunked:
            cut = rng.randrange(len(body) + 1)
            parts = [part for part in (body[:cut], body[cut:]) if part]
            body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
            head += "Transfer-Encoding: chunked\r\n"
        else:
            length = len(body) + (rng.choice([-2, 1, 100]) if broken and rng.random() < 0.3 else 0)
            head += f"Content-Length: {length}\r\n"
        content = head.encode("latin-1") + b"\r\n" + body
        if broken and rng.random() < 0.5:
            content = rng.choice([lambda: _damage(rng, content), lambda: content * 2, lambda: content[:-1]])()
        return Request(content, broken)


def _spoil(rng: random.Random, body: Any) -> None:
    """Put something else somewhere into a JSON value, or remove something."""
    place = body
    while True:
        keys = [*place] if isinstance(place, dict) else [*range(len(place))]
        if not keys or (isinstance(place, dict) and rng.random() < 0.1):
            key = "surplus"
            break
        key = rng.choice(keys)
        if not isinstance(place[key], dict | list) or rng.random() < 0.5:
            break
        place = place[key]
    if isinstance(place, list):
        place[key if keys else 0 :] = [copy.deepcopy(rng.choice(WILD))]
    elif key in place and rng.random() < 0.2:
        del place[key]
    else:
        place[key] = copy.deepcopy(rng.choice(WILD))


def _damage(rng: random.Random, content: bytes) -> bytes:
    """Flip, insert or remove a few bytes."""
    damaged = bytearray(content or b"x")
    for _ in range(rng.choice([1, 1, 3, 10])):
        place = rng.randrange(len(damaged))
        damaged[place : place + rng.randrange(2)] = rng.randbytes(rng.randrange(3))
        damaged = damaged or bytearray(b"x")
    return bytes(damaged)


class Memory(NamedTuple):
    """MB that the idle server and its engine have resident, and what the server has in use of its part."""

    server_mb: float
    engine_mb: float
    blocks: int
    """Of Python's own allocator."""
    malloc_mb: float
    """Of the C library's allocator, with `free_mb` between them that it keeps; 0 where that is not glibc."""
    free_mb: float


@dataclass
class Outcome:
    statuses: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    memory: dict[int, Memory] = field(default_factory=dict)
    """By the number of requests."""
    seconds: float = 0.0


async def fuzz(endpoint: Endpoint, requests: range, seed: int) -> Outcome:
    """Send requests of a seed, many at a time; returns when all have been answered and the engine is idle."""
    assert endpoint.admin_key is not None
    host, port = endpoint.url.removeprefix("http://").split(":")
    fuzzer, outcome, numbers = Fuzzer(seed, endpoint.admin_key), Outcome(), iter(requests)
    began = time.monotonic()
    client = EngineClient([endpoint.url], admin_key=endpoint.admin_key)

    async def send_all() -> None:
        for number in numbers:
            request = fuzzer.request(number)
            status = await send(host, int(port), request)
            outcome.statuses[status] += 1
            if status[0] == "5" or (status == "no answer" and not request.may_be_incomplete):
                outcome.failures.append(f"seed {seed}, request {number}: {status}: {request.content[:200]!r}")

    async def resume() -> None:
        while True:  # some requests pause the engine
            await client.resume()
            await asyncio.sleep(0.05)

    resuming = asyncio.create_task(resume())
    await asyncio.gather(*[send_all() for _ in range(CONCURRENT)])
    while (health := (await client.health())[0]).running + health.waiting:
        await asyncio.sleep(0.05)
    resuming.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await resuming
    await client.resume()
    reply = await client.generate(IDS, SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(reply.token_ids) == 2
    await client.close()
    outcome.seconds = time.monotonic() - began
    return outcome


async def send(host: str, port: int, request: Request) -> str:
    """Send one request on a connection of its own; returns the status of its answer."""
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 28)
    try:
        writer.write(request.content)
        async with asyncio.timeout(BROKEN_WAIT_S if request.may_be_incomplete else ANSWER_TIMEOUT_S):
            head = b"HTTP/1.1 100"
            while head.startswith(b"HTTP/1.1 100"):
                head = await reader.readuntil(b"\r\n\r\n")
            fields = head.lower()
            if b"transfer-encoding: chunked" in fields:
                await reader.readuntil(b"0\r\n\r\n")
            elif not request.content.startswith(b"HEAD") and b"content-length: " in fields:
                await reader.readexactly(int(fields.partition(b"content-length: ")[2].split(b"\r")[0]))
            return head[9:12].decode()
    except (asyncio.IncompleteReadError, OSError):  # OSError: also a timeout
        return "no answer"
    finally:
        writer.close()


def memory_of(endpoint: Endpoint, directory: Path) -> Memory:
    """Measure a server of `running_server`, which must be idle."""
    server, report = psutil.Process(endpoint.pid), directory / "run" / "memory"
    report.unlink(missing_ok=True)
    server.send_signal(signal.SIGUSR1)
    while not (report.exists() and report.read_text().endswith(" ")):
        time.sleep(0.01)
    (engine,) = server.children()
    blocks, used, free = map(int, report.read_text().split())
    return Memory(server.memory_info().rss / MB, engine.memory_info().rss / MB, blocks, used / MB, free / MB)


@contextlib.contextmanager
def running_server(directory: Path, **config: Any) -> Iterator[Endpoint]:
    """A server of the tiny model in a process of its own; gives its endpoint."""
    write_tiny_model(directory / "tiny")
    run = RunDir(directory / "run")
    run.root.mkdir()
    arguments = str(run.root), str(directory / "tiny"), json.dumps(CONFIG | config)
    process = subprocess.Popen([sys.executable, "-c", SERVE, *arguments])
    try:
        while not (endpoints := read_endpoints(run.endpoints)):
            assert process.poll() is None
            time.sleep(0.1)
        (endpoint,) = endpoints.values()
        yield endpoint
    finally:
        process.terminate()
        process.wait()


def main(requests: int, seed: int) -> Outcome:
    outcome, part = Outcome(), max(1, requests // 10)
    with tempfile.TemporaryDirectory() as directory, running_server(Path(directory)) as endpoint:
        for start in range(0, requests, part):
            end = min(start + part, requests)
            done = asyncio.run(fuzz(endpoint, range(start, end), seed))
            outcome.statuses += done.statuses
            outcome.failures += done.failures
            outcome.seconds += done.seconds
            outcome.memory[end] = memory_of(endpoint, Path(directory))
    table = Table(title=f"{requests:,} requests, seed {seed}: {outcome.seconds:.0f} s, {len(outcome.failures)} failed")
    columns = "server MB", "engine MB", "server: Python blocks", "malloc in use MB", "free MB"
    for column in ("answer", "requests", "after requests", *columns):
        table.add_column(column, justify="right")
    statuses, memory = sorted(outcome.statuses.items()), [*outcome.memory.items()]
    for row in range(max(len(statuses), len(memory))):
        left = (statuses[row][0], f"{statuses[row][1]:,}") if row < len(statuses) else ("", "")
        count, used = memory[row] if row < len(memory) else (None, ())
        right = ("",) if count is None else (f"{count:,}", *(f"{size:,.1f}".removesuffix(".0") for size in used))
        table.add_row(*left, *right)
    Console().print(table)
    for failure in outcome.failures[:20]:
        print(failure)
    return outcome


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
