"""The decode rate of its own that the traffic benchmark compares an engine with."""

import asyncio
from typing import Any

import pytest
from benchmarks.inference.traffic import Counters, decode_batch

from headrace.inference.client.errors import EngineFailed
from headrace.inference.schema import SamplingParams

PARAMS = SamplingParams(max_tokens=1)


class Server:
    """A server whose requests end before the next one begins, so that two never run at once."""

    def __init__(self, error: Exception | None = None) -> None:
        self.client = self
        self._error = error

    async def generate(self, prompt: list[int], params: SamplingParams) -> None:
        if self._error is not None:
            raise self._error

    async def counters(self) -> Counters:
        await asyncio.sleep(0)
        return Counters(at=0.0, running=0.0, tokens=1.0, steps=1.0, prefill_steps=1.0, wait_s=0.0, busy_s=0.0)


async def decode(server: Any) -> tuple[Counters, Counters]:
    async with asyncio.timeout(10):
        return await decode_batch(server, [[1], [2]], PARAMS)


async def test_a_batch_whose_requests_never_run_at_once_has_no_rate() -> None:
    first, last = await decode(Server())
    assert first == last


async def test_a_failed_request_ends_the_measurement() -> None:
    with pytest.raises(EngineFailed):
        await decode(Server(EngineFailed("no")))
