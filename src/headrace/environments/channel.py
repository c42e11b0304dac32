"""What the pool and its workers say to each other, and how it travels: frames of a length and msgpack over a socket.

Both ends run the same code, since one starts the other; `Load` carries the schema for the case that the code was
changed under a running pool. Backpressure is left out: what is in flight bounds what is written.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from headrace.environments.base import Reply
from headrace.rollout.types import Rollout, RolloutError, Task
from headrace.rollout.types import printable as printable

SCHEMA = 2
ARRAY = 1
"""The code of a numpy array among msgpack's extension types."""
HEADER = 4
"""Bytes that give the length of a frame."""


class Load(msgspec.Struct, tag=True, array_like=True):
    """Comes first: what the worker is for, and where the parent finds modules."""

    schema: int
    identifier: str
    args: dict[str, Any]
    module_path: list[str]


class Run(msgspec.Struct, tag=True, array_like=True):
    """One episode. `job` names whatever the worker was asked to do; its end is a `Result` or a `Failed`."""

    job: int
    task: Task


class Score(msgspec.Struct, tag=True, array_like=True):
    """One group to be scored."""

    job: int
    rollouts: list[Rollout]


class Cancel(msgspec.Struct, tag=True, array_like=True):
    """End a job; it still answers."""

    job: int


class Answer(msgspec.Struct, tag=True, array_like=True):
    """What the model replied to a `Chat`."""

    call: int
    reply: Reply


class NoAnswer(msgspec.Struct, tag=True, array_like=True):
    """Why there is no reply to a `Chat`; the exception itself stays with the parent. `reason` is an EpisodeError's."""

    call: int
    kind: str
    text: str
    reason: str | None = None


class Ready(msgspec.Struct, tag=True, array_like=True):
    """The environment is loaded."""


class Refused(msgspec.Struct, tag=True, array_like=True):
    """The environment cannot be loaded; the worker ends."""

    text: str
    traceback: str


class Chat(msgspec.Struct, tag=True, array_like=True):
    """A call to the model. Its arguments are whatever the environment gave: the parent's context judges them."""

    job: int
    call: int
    messages: Any
    tools: Any
    max_tokens: Any


class HangUp(msgspec.Struct, tag=True, array_like=True):
    """The environment no longer waits for the answer to a `Chat`."""

    job: int
    call: int


class Result(msgspec.Struct, tag=True, array_like=True):
    """What a job produced. Decoded on its own, so that a malformed one costs its job and not the channel."""

    job: int
    value: msgspec.Raw


class Failed(msgspec.Struct, tag=True, array_like=True):
    """What a job raised, and where. `call` is set if it was the failure of that chat, passed on."""

    job: int
    reason: str
    text: str
    place: str = ""
    traceback: str = ""
    call: int | None = None


class Scores(msgspec.Struct, array_like=True):
    """What scoring a group changes on one rollout."""

    rewards: dict[str, float]
    metrics: dict[str, float]
    error: RolloutError | None


ToWorker = Load | Run | Score | Cancel | Answer | NoAnswer | Failed
"""`Failed` stands for a request that could not be read; the worker sends it back."""
FromWorker = Ready | Refused | Chat | HangUp | Result | Failed

_ABOUT_A_JOB = {kind.__name__ for kind in (Run, Score, Cancel, Chat, HangUp, Result, Failed)}
"""The messages whose first field is the number of a job."""


def _encode_other(value: Any) -> Any:
    """What msgpack does not know: arrays, and the numpy scalars that rewards are often made of."""
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        content = msgspec.msgpack.encode((value.dtype.str, value.shape, value.tobytes()))
        return msgspec.msgpack.Ext(ARRAY, content)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(
        f"{type(value).__name__} cannot travel between processes: use JSON values or numpy arrays of plain types"
    )


_array_parts = msgspec.msgpack.Decoder(tuple[str, tuple[int, ...], bytes])


def _decode_extension(code: int, data: memoryview) -> Any:
    if code != ARRAY:
        raise ValueError(f"unknown msgpack extension type {code}")
    dtype, shape, content = _array_parts.decode(data)
    return np.frombuffer(content, dtype).reshape(shape).copy()  # a copy can be written to


def _decode_other(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        return np.asarray(value)
    raise NotImplementedError(f"no way to read a {kind.__name__}")


encode = msgspec.msgpack.Encoder(enc_hook=_encode_other).encode
_any = msgspec.msgpack.Decoder(list[Any])


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind, dec_hook=_decode_other, ext_hook=_decode_extension)


class Channel(asyncio.Protocol):
    """One end. `receive` gets every message in order; `lost` is called once, when either end has been closed.

    A message that cannot be read is received as the failure of the job that it is about. Without one the channel is
    closed, and `cause` says why.
    """

    def __init__(self, kind: Any, receive: Callable[[Any], None], lost: Callable[[], None]) -> None:
        self._decoder = decoder(kind)
        self._receive = receive
        self._lost = lost
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self.cause = ""

    async def open(self, end: socket.socket) -> None:
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)

    def send(self, message: Any) -> None:
        """Once the other end is gone nothing is sent: `lost` has told, or is about to."""
        assert self._transport is not None, "open() comes first"
        body = encode(message)
        if not self._transport.is_closing():
            self._transport.write(len(body).to_bytes(HEADER, "big") + body)

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

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        start = 0
        while len(self._buffer) >= start + HEADER:
            body = start + HEADER
            end = body + int.from_bytes(self._buffer[start:body], "big")
            if len(self._buffer) < end:
                break
            self._read(bytes(self._buffer[body:end]))
            start = end
        del self._buffer[:start]

    def _read(self, frame: bytes) -> None:
        if self.cause:  # what follows a message that could not be read
            return
        try:
            message = self._decoder.decode(frame)
        except Exception as error:  # also what the readers of arrays and structs raise
            text = f"sent a message that cannot be read: {type(error).__name__}: {printable(str(error))}"
            job = _job_of(frame)
            if job is None:
                self.cause = text
                self.abort()
                return
            message = Failed(job, "worker", f"the other process {text}")
        self._receive(message)

    def connection_lost(self, error: Exception | None) -> None:
        self._lost()


def _job_of(frame: bytes) -> int | None:
    """The number of the job that a message is about, if that much of it can be read."""
    try:
        tag, job = _any.decode(frame)[:2]
    except Exception:
        return None
    return job if tag in _ABOUT_A_JOB and isinstance(job, int) else None
