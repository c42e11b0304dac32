"""Messages between two processes that cannot be decoded."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import msgspec
import pytest

from headrace.environments.channel import HEADER_BYTES, Call, Channel, Failed, Result, encode


class Ends:
    """A channel that serves calls by returning their arguments plus one, and the socket at its other end."""

    async def __aenter__(self) -> Ends:
        self.lost = asyncio.Event()
        near, self.socket = socket.socketpair()
        self.socket.setblocking(False)
        self.channel = Channel(self.lost.set, self.serve)
        await self.channel.open(near)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.channel.abort()
        self.socket.close()

    async def serve(self, call: Call) -> int:
        [number] = msgspec.msgpack.decode(call.arguments, type=tuple[int])
        return number + 1

    def send(self, *messages: Any) -> None:
        for body in map(encode, messages):
            self.socket.sendall(len(body).to_bytes(HEADER_BYTES, "big") + body)

    async def received(self, kind: type) -> Any:
        header = await asyncio.get_running_loop().sock_recv(self.socket, HEADER_BYTES)
        body = await asyncio.get_running_loop().sock_recv(self.socket, int.from_bytes(header, "big"))
        return msgspec.msgpack.decode(body, type=kind)


async def test_arguments_that_cannot_be_decoded_cost_their_call():
    async with Ends() as ends:
        ends.send(["Call", 7, "add", ["text"]], ["Call", 8, "add", [1]])
        failed = await ends.received(Failed)
        result = await ends.received(Result)
    assert (failed.number, failed.reason, failed.fault.kind) == (7, None, "ValidationError")
    assert (result.number, bytes(result.value)) == (8, encode(2))


async def test_a_call_that_is_cancelled_still_ends_with_a_message():
    async with Ends() as ends:
        ends.send(["Call", 7, "add", [1]], ["Cancel", 7])
        failed = await ends.received(Failed)
    assert (failed.number, failed.fault.kind) == (7, "CancelledError")


@pytest.mark.parametrize("frame", [["Nonsense", 7], {"number": 7}, ["Failed", "seven"], ["Call", 7, 404, []]])
async def test_a_message_that_cannot_be_decoded_closes_the_channel_with_the_cause(frame: Any):
    async with Ends() as ends:
        ends.send(frame, ["Call", 8, "add", [1]])
        await ends.lost.wait()
        assert ends.channel.served == {}
    assert "ValidationError" in ends.channel.cause
