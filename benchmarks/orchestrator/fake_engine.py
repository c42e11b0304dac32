"""An engine that costs next to nothing: answers encoded beforehand, sent after a lognormal latency.

Plain HTTP/1.1 on an asyncio protocol, since a web framework would cost as much as the orchestrator that is measured.
`lateness` holds how much later than its latency each answer left: as long as it is small, the engine is no bottleneck.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import string
from pathlib import Path

import msgspec
import numpy as np

from headrace.inference.schema import (
    SCHEMA_HEADER,
    GenerateChoice,
    GenerateResponse,
    Health,
    UpdateWeightsRequest,
    UpdateWeightsResponse,
    WeightVersionSpan,
)
from headrace.rollout.schema import SCHEMA
from headrace.rollout.version import Version
from headrace.text.tokenizer import Tokenizer
from headrace.transport.endpoint import Endpoint, write_endpoint
from headrace.transport.weights import read_marker

ANSWERS = 64
"""Different answers to choose from: the members of a group then get different rewards."""
VERSION = "987654321-0"
"""Stands in an encoded answer where the version goes."""


class FakeEngine:
    """`median` seconds of latency with `sigma` of its logarithm, `tokens` in each answer."""

    def __init__(self, model: Path, tokens: int, median: float, sigma: float = 1.0, seed: int = 0) -> None:
        rng = random.Random(seed)
        tokenizer = Tokenizer(model)
        self.answers = [encode_answer(tokenizer, letters(tokens - 1, rng), rng) for _ in range(ANSWERS)]
        self.vocab_size = tokenizer.vocab_size
        self.version = Version(0, 0)
        self.in_flight = 0
        self.answered = 0
        self.lateness: list[float] = []
        self._rng = rng
        self._mu, self._sigma = math.log(median), sigma

    async def listen(self, endpoint: Path) -> asyncio.Server:
        server = await asyncio.get_running_loop().create_server(lambda: _Connection(self), "127.0.0.1", 0, backlog=4096)
        port = server.sockets[0].getsockname()[1]
        write_endpoint(endpoint, Endpoint(f"http://127.0.0.1:{port}", os.getpid()))
        return server

    def latency(self) -> float:
        return self._rng.lognormvariate(self._mu, self._sigma)

    def answer(self, request: bytes, version: bytes) -> bytes:
        before, after = self.choose(request)
        return _with_head(before + version + after)

    def choose(self, request: bytes) -> tuple[bytes, bytes]:
        return self._rng.choice(self.answers)

    def health(self) -> bytes:
        health = Health("ok", str(self.version), "fake", self.in_flight, 0, False, 4096, 4096, self.vocab_size)
        return _with_head(msgspec.json.encode(health))

    def update_weights(self, body: bytes) -> bytes:
        marker = read_marker(Path(msgspec.json.decode(body, type=UpdateWeightsRequest).path))
        self.version = marker.version
        return _with_head(msgspec.json.encode(UpdateWeightsResponse(marker.incarnation, marker.step, marker.checksum)))


class _Connection(asyncio.Protocol):
    """One request at a time, as a client without pipelining sends them."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._received = b""
        self._pending: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._pending is not None:
            self._pending.cancel()
            self._engine.in_flight -= 1

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, blank, body = self._received.partition(b"\r\n\r\n")
        if blank and len(body) == _content_length(head):
            self._received = b""
            self._serve(head, body)

    def _serve(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"POST /inference/v1/generate "):
            delay = self._engine.latency()
            version = str(self._engine.version).encode()
            self._engine.in_flight += 1
            self._pending = self._loop.call_later(delay, self._answer, body, version, self._loop.time() + delay)
        elif head.startswith(b"POST /update_weights "):
            self._transport.write(self._engine.update_weights(body))
        else:
            assert head.startswith(b"GET /health "), head
            self._transport.write(self._engine.health())

    def _answer(self, body: bytes, version: bytes, due: float) -> None:
        self._pending = None
        self._engine.in_flight -= 1
        self._engine.answered += 1
        self._engine.lateness.append(self._loop.time() - due)
        self._transport.write(self._engine.answer(body, version))


def letters(count: int, rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_lowercase, k=count))


def encode_answer(tokenizer: Tokenizer, text: str, rng: random.Random) -> tuple[bytes, bytes]:
    """What the engine would send, before and after the version that sampled it."""
    assert tokenizer.eos_token_id is not None
    ids = [*tokenizer.encode(text), tokenizer.eos_token_id]
    # As many digits as a float32 has when it becomes a Python float: they are most of an answer's bytes.
    logprobs = [float(np.float32(-rng.random())) for _ in ids]
    spans = [WeightVersionSpan(VERSION, 0, len(ids))]
    answer = GenerateResponse("r", [GenerateChoice(0, ids, "stop", weight_versions=spans, flat_logprobs=logprobs)])
    before, _, after = msgspec.json.encode(answer).partition(VERSION.encode())
    return before, after


def _with_head(body: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n{SCHEMA_HEADER}: {SCHEMA}\r\n"
    return b"%sContent-Length: %d\r\n\r\n%s" % (head.encode(), len(body), body)


def _content_length(head: bytes) -> int:
    _, found, rest = head.lower().partition(b"\r\ncontent-length:")
    return int(rest.partition(b"\r\n")[0]) if found else 0
