"""Messages between a worker pool and its workers, and their transport: length-prefixed msgpack over a socket.

Both ends run the same code, since one starts the other; `Load` carries the schema in case the code was changed under a
running pool. There is no backpressure: the number of episodes in flight bounds what is written.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from headrace.environments.base import Reply
from headrace.rollout.types import Rollout, RolloutError, Task, printable

SCHEMA = 2
ARRAY = 1
"""The code of a numpy array among msgpack's extension types."""
HEADER_BYTES = 4
"""The length of a frame's length prefix."""


class Message(msgspec.Struct, tag=True, array_like=True):
    """Base of all messages."""


class Load(Message):
    """The first message: load an environment, with the parent's `sys.path`."""

    schema: int
    identifier: str
    args: dict[str, Any]
    module_path: list[str]


class Run(Message):
    """Run one episode. `job` identifies a request; every job ends with a `Result` or a `Failed`."""

    job: int
    task: Task


class Score(Message):
    """Score one group."""

    job: int
    rollouts: list[Rollout]


class Cancel(Message):
    """Cancel a job; it still ends with a message."""

    job: int


class ChatReply(Message):
    """The model's reply to a `ChatCall`."""

    call: int
    reply: Reply


class ChatError(Message):
    """Why a `ChatCall` has no reply; the exception itself stays with the parent. `reason` is an EpisodeError's."""

    call: int
    kind: str
    text: str
    reason: str | None = None


class Ready(Message):
    """The environment is loaded."""


class LoadFailed(Message):
    """The environment cannot be loaded; the worker ends."""

    text: str
    traceback: str


class ChatCall(Message):
    """A call to the model. Its arguments are not validated here: the parent's context does that."""

    job: int
    call: int
    messages: Any
    tools: Any
    max_tokens: Any


class CancelChat(Message):
    """The environment no longer waits for the reply to a `ChatCall`."""

    job: int
    call: int


class Result(Message):
    """The result of a job. Decoded separately, so that a malformed one fails its job and not the channel."""

    job: int
    value: msgspec.Raw


class Failed(Message):
    """The exception of a job, and where it was raised. `call` is set if it is the error of that chat, re-raised."""

    job: int
    reason: str
    text: str
    place: str = ""
    traceback: str = ""
    call: int | None = None


class Scores(msgspec.Struct, array_like=True):
    """The fields of one rollout that scoring a group changes."""

    rewards: dict[str, float]
    metrics: dict[str, float]
    error: RolloutError | None


ToWorker = Load | Run | Score | Cancel | ChatReply | ChatError | Failed
"""`Failed` replaces a request that could not be decoded; the worker sends it back."""
FromWorker = Ready | LoadFailed | ChatCall | CancelChat | Result | Failed

_JOB_MESSAGES = {kind.__name__ for kind in (Run, Score, Cancel, ChatCall, CancelChat, Result, Failed)}
"""The messages whose first field is the number of a job."""


def _encode_other(value: Any) -> Any:
    """Encode what msgpack has no type for: arrays, and the numpy scalars that rewards often are."""
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
_any = msgspec.msgpack.Decoder(list[Any])


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind, dec_hook=_decode_other, ext_hook=_decode_extension)


class Channel(asyncio.Protocol):
    """One end of a connection. `receive` gets every message in order; `lost` is called once, when either end closes.

    A message that cannot be decoded is received as the failure of its job. If it has none, the channel is closed and
    `cause` is set.
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
        """Send a message; ignored once the other end has closed, which `lost` reports."""
        assert self._transport is not None, "call open() first"
        body = encode(message)
        if not self._transport.is_closing():
            self._transport.write(len(body).to_bytes(HEADER_BYTES, "big") + body)

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
        while len(self._buffer) >= start + HEADER_BYTES:
            body = start + HEADER_BYTES
            end = body + int.from_bytes(self._buffer[start:body], "big")
            if len(self._buffer) < end:
                break
            self._read(bytes(self._buffer[body:end]))
            start = end
        del self._buffer[:start]

    def _read(self, frame: bytes) -> None:
        if self.cause:  # closed because of an earlier message
            return
        try:
            message = self._decoder.decode(frame)
        except Exception as error:  # the hooks for arrays and structs raise any type
            text = f"sent a message that cannot be decoded: {type(error).__name__}: {printable(str(error))}"
            job = _decode_job(frame)
            if job is None:
                self.cause = text
                self.abort()
                return
            message = Failed(job, "worker", f"the other process {text}")
        self._receive(message)

    def connection_lost(self, error: Exception | None) -> None:
        self._lost()


def _decode_job(frame: bytes) -> int | None:
    """Return the job of a message whose other fields cannot be decoded, if it has one."""
    try:
        tag, job = _any.decode(frame)[:2]
    except Exception:
        return None
    return job if tag in _JOB_MESSAGES and isinstance(job, int) else None
