"""Calls between two processes: length-prefixed msgpack over a socket, in either direction.

Both ends run the same code, since one starts the other; the first call carries the schema in case the code was changed
meanwhile. There is no backpressure: the number of calls in flight bounds what is written.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np

from headrace.environments.base import ChatFailed, EpisodeError
from headrace.environments.fault import Fault, fault_of
from headrace.safe_text import encodable

ARRAY = 1
"""The code of a numpy array among msgpack's extension types."""
HEADER_BYTES = 4
"""The length of a frame's length prefix."""
CANCELLED = Fault("CancelledError", "the call was cancelled", "", "")


class Message(msgspec.Struct, tag=True, array_like=True):
    """Base of all messages. Calls are numbered by their caller."""

    number: int


class Call(Message):
    """Call a method. Every call ends with a `Result` or a `Failed`.

    Arguments, and results, are decoded separately, so that a malformed value fails its call and not the channel.
    """

    method: str
    arguments: msgspec.Raw


class Cancel(Message):
    """Cancel a call; it still ends with a message."""


class Result(Message):
    """The value that a call returned."""

    value: msgspec.Raw


class Failed(Message):
    """The exception of a call. `reason` is that of an `EpisodeError`; `call` is set if it is the error of that call in
    the other direction, re-raised."""

    fault: Fault
    reason: str | None = None
    call: int | None = None


Outcome = Result | Failed


def _encode_other(value: Any) -> Any:
    """Encode types that msgpack does not have: arrays, and numpy scalars, which rewards often are."""
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        content = msgspec.msgpack.encode((value.dtype.str, value.shape, value.tobytes()))
        return msgspec.msgpack.Ext(ARRAY, content)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(
        f"{type(value).__name__} cannot be sent between processes: use JSON values or numpy arrays of plain types"
    )


_array_parts = msgspec.msgpack.Decoder(tuple[str, tuple[int, ...], bytes])


def _decode_extension(code: int, data: memoryview) -> Any:
    if code != ARRAY:
        raise ValueError(f"unknown msgpack extension type {code}")
    dtype, shape, content = _array_parts.decode(data)
    return np.frombuffer(content, dtype).reshape(shape).copy()  # a copy is writable


def _decode_other(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        return np.asarray(value)
    raise NotImplementedError(f"cannot decode a {kind.__name__}")


encode = msgspec.msgpack.Encoder(enc_hook=_encode_other).encode


def make_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind, dec_hook=_decode_other, ext_hook=_decode_extension)


_messages = make_decoder(Call | Cancel | Result | Failed)


def frame_message(message: Message) -> bytes:
    """Return a message with its length prefix."""
    body = encode(message)
    return len(body).to_bytes(HEADER_BYTES, "big") + body


class Channel(asyncio.Protocol):
    """One end of a connection. `handle` executes the other end's calls, concurrently, and returns their results.

    `on_lost` is called once, when either end closes. An undecodable message closes the channel and sets `cause`.
    """

    def __init__(self, on_lost: Callable[[], None], handle: Callable[[Call], Awaitable[Any]] | None = None) -> None:
        self.cause = ""
        self.pending: dict[int, asyncio.Future[Outcome]] = {}
        """Own calls without an outcome yet, cancelled ones included."""
        self.served: dict[int, asyncio.Task[None]] = {}
        """Calls of the other end that are being executed."""
        self._on_lost = on_lost
        self._handle = handle
        self._numbers = itertools.count()
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    async def open(self, end: socket.socket) -> None:
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)

    def call(self, method: str, arguments: bytes) -> tuple[int, asyncio.Future[Outcome]]:
        """Send a call with encoded arguments; return its number and the future of its outcome."""
        number = next(self._numbers)
        self.send(Call(number, method, msgspec.Raw(arguments)))
        outcome = self.pending[number] = asyncio.get_running_loop().create_future()
        return number, outcome

    def send(self, message: Message) -> None:
        """Send a message; ignored once the other end has closed, which `on_lost` reports."""
        assert self._transport is not None, "call open() first"
        frame = frame_message(message)
        if not self._transport.is_closing():
            self._transport.write(frame)

    def close(self) -> None:
        """Send what has been written, then close."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._on_lost()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        start = 0
        while len(self._buffer) >= start + HEADER_BYTES and not self.cause:
            body = start + HEADER_BYTES
            end = body + int.from_bytes(self._buffer[start:body], "big")
            if len(self._buffer) < end:
                break
            try:
                message = _messages.decode(bytes(self._buffer[body:end]))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                self.cause = f"sent a message that cannot be decoded: {type(error).__name__}: {encodable(str(error))}"
                self.abort()
                return
            self._receive(message)
            start = end
        del self._buffer[:start]

    def _receive(self, message: Call | Cancel | Outcome) -> None:
        """Execute a call, cancel one, or set the outcome of an own call."""
        number = message.number
        match message:
            case Call():
                task = self.served[number] = asyncio.create_task(self._execute(message))
                task.add_done_callback(partial(self._on_executed, number))
            case Cancel():
                if number in self.served:  # otherwise the call has ended, and its outcome was sent
                    self.served[number].cancel()
            case _:
                outcome = self.pending.pop(number, None)
                if outcome is not None and not outcome.done():
                    outcome.set_result(message)

    async def _execute(self, call: Call) -> None:
        """Execute a call of the other end and send its outcome."""
        assert self._handle is not None, "this end serves no calls"
        outcome: Outcome
        try:
            outcome = Result(call.number, msgspec.Raw(encode(await self._handle(call))))
        except (asyncio.CancelledError, KeyboardInterrupt):
            raise
        except BaseException as error:  # sys.exit() in a checker fails its call, not the process
            reason = encodable(str(error.reason)) if isinstance(error, EpisodeError) else None
            cause = error.call if isinstance(error, EpisodeError | ChatFailed) else None
            outcome = Failed(call.number, fault_of(error), reason, cause)
        self.send(outcome)

    def _on_executed(self, number: int, task: asyncio.Task[None]) -> None:
        """Send the outcome that `_execute` did not: of a cancelled call, or one whose failure cannot be encoded."""
        del self.served[number]
        if task.cancelled():  # perhaps before `_execute` began
            self.send(Failed(number, CANCELLED))
        elif (error := task.exception()) is not None:  # the failure could not be encoded in full
            self.send(Failed(number, fault_of(error)))
