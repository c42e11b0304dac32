"""Messages between a pool and its workers that cannot be decoded."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from headrace.environments.channel import HEADER_BYTES, CancelChat, Channel, FromWorker, encode


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.005)


class Ends:
    """A channel, what it receives, and the socket at its other end."""

    async def __aenter__(self) -> Ends:
        self.got: list[Any] = []
        self.lost = asyncio.Event()
        near, self.socket = socket.socketpair()
        self.channel = Channel(FromWorker, self.got.append, self.lost.set)
        await self.channel.open(near)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.channel.abort()
        self.socket.close()

    def send(self, *messages: Any) -> None:
        for body in map(encode, messages):
            self.socket.sendall(len(body).to_bytes(HEADER_BYTES, "big") + body)


async def test_a_message_that_cannot_be_read_costs_the_job_it_is_about():
    async with Ends() as ends:
        ends.send(["Failed", 7, 404, "not found"], ["CancelChat", 8, 1])
        await until(lambda: len(ends.got) == 2)
    failed, next_one = ends.got
    assert (failed.job, failed.reason) == (7, "worker")
    assert "ValidationError: Expected `str`, got `int`" in failed.text
    assert next_one == CancelChat(8, 1)


@pytest.mark.parametrize("frame", [["Nonsense", 7], {"job": 7}, ["Failed", "seven"]])
async def test_a_message_without_a_job_that_cannot_be_decoded_closes_the_channel_with_the_cause(frame: Any):
    async with Ends() as ends:
        ends.send(frame, ["CancelChat", 8, 1])
        await ends.lost.wait()
    assert ends.got == []
    assert "ValidationError" in ends.channel.cause
