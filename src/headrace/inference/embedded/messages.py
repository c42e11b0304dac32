"""Messages between the HTTP server and the process of the embedded engine, over a socket.

A frame is a length of four bytes and a list of messages in MessagePack.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Generic, Literal, TypeVar

import msgspec

from headrace.errors import BadInput, Failure
from headrace.inference.backend import (
    EngineError,
    EngineOverloaded,
    EngineState,
    EngineStopped,
    GenerationResult,
    InvalidRequest,
    ModelNotFound,
    RequestCancelled,
    TokenChunk,
)
from headrace.inference.memory import ColocatedTrainer
from headrace.inference.schema import SamplingParams
from headrace.inference.weights.reading import WeightsError, WeightsUnreachable
from headrace.rollout.version import Version

T = TypeVar("T")
_HEAD = struct.Struct("!I")


ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        *(BadInput, Failure, InvalidRequest, ModelNotFound, WeightsError, WeightsUnreachable),
        *(EngineError, EngineOverloaded, EngineStopped, RequestCancelled),
    )
}
"""The errors that the server distinguishes, by name."""


class Error(msgspec.Struct, array_like=True):
    """An error of the engine's process: the nearest of `ERRORS`, with the fields of a `BadInput`."""

    kind: str
    fact: str
    key: str | None = None
    value: str | int | float | None = None
    fix: str | None = None
    file: str | None = None
    line: int | None = None

    @classmethod
    def of(cls, error: BaseException) -> Error:
        """Return an error as it is sent."""
        kind = next((base.__name__ for base in type(error).__mro__ if ERRORS.get(base.__name__) is base), None)
        if kind is None:
            return cls(EngineError.__name__, f"{type(error).__name__}: {error}")
        if not isinstance(error, BadInput) or len(error.problems) > 1:
            return cls(kind, str(error))
        value = error.value if isinstance(error.value, int | float | None) else str(error.value)
        file = None if error.file is None else str(error.file)
        return cls(kind, error.fact, error.key, value, error.fix, file, error.line)

    def exception(self) -> Exception:
        """Return the received error as an exception to raise."""
        kind = ERRORS[self.kind]
        if not issubclass(kind, BadInput):
            return kind(self.fact)
        return kind(self.fact, key=self.key, value=self.value, fix=self.fix, file=self.file, line=self.line)


class Message(msgspec.Struct, tag=True, array_like=True):
    """One message, or the command of one; the name of its class is sent with it."""


class Start(Message):
    """Load the engine: the first message."""

    config: bytes
    """The `InferenceConfig`, as JSON."""
    directory: Path
    """The model's directory."""
    shared: ColocatedTrainer | None
    """The trainer on the engine's device, if there is one."""


class Submit(Message):
    """Add a request to the queue."""

    number: int
    token_ids: list[int]
    params: SamplingParams
    cache_salt: str | None
    urgent: bool
    adapter: str | None


class Follow(Message):
    """Send a request's tokens as they are sampled."""

    number: int


class Cancel(Message):
    """Cancel a request."""

    number: int


Method = Literal["pause", "resume", "update_weights", "load_adapter", "unload_adapter"]


class Call(Message):
    """Call a method of `EngineThread` with those arguments that are set; the engine sends an `Answer`."""

    number: int
    method: Method
    name: str | None = None
    directory: Path | None = None
    version: Version | None = None


class Close(Message):
    """End all requests and the process."""


class Starting(Message):
    """What the process does before it is ready."""

    activity: str


class Ready(Message):
    """The engine is loaded and accepts requests."""

    max_model_len: int
    vocab_size: int
    state: EngineState


class CannotStart(Message):
    """Loading failed."""

    error: Error


class Tokens(Message):
    """Tokens of a request that is followed, since the last ones."""

    number: int
    chunk: TokenChunk


class Finished(Message):
    """A request has its result."""

    number: int
    result: GenerationResult


class Failed(Message):
    """A request ended with an error."""

    number: int
    error: Error


class Answer(Message):
    """The result or the error of a call."""

    number: int
    value: str | None = None
    error: Error | None = None


class State(Message):
    """A new snapshot of the engine."""

    state: EngineState


ToEngine = Start | Submit | Follow | Cancel | Call | Close
FromEngine = Starting | Ready | CannotStart | Tokens | Finished | Failed | Answer | State


_ENCODER = msgspec.msgpack.Encoder(enc_hook=str)  # of paths
TO_ENGINE = msgspec.msgpack.Decoder(list[ToEngine], dec_hook=lambda kind, value: kind(value))
FROM_ENGINE = msgspec.msgpack.Decoder(list[FromEngine])


def frame(*messages: ToEngine | FromEngine) -> bytes:
    """Return messages as the bytes of one frame; raises `InvalidRequest` for a number of more than 64 bits."""
    try:
        content = _ENCODER.encode(messages)
    except OverflowError as error:
        raise InvalidRequest(str(error)) from error
    return _HEAD.pack(len(content)) + content


class Frames(Generic[T]):
    """The frames of a stream of bytes."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[list[T]]) -> None:
        self._decoder = decoder
        self._rest = bytearray()

    def feed(self, content: bytes) -> Iterator[T]:
        """Yield the messages of all frames that are complete with this content."""
        self._rest += content
        while len(self._rest) >= _HEAD.size:
            end = _HEAD.size + _HEAD.unpack_from(self._rest)[0]
            if len(self._rest) < end:
                return
            with memoryview(self._rest) as view:
                messages = self._decoder.decode(view[_HEAD.size : end])
            del self._rest[:end]
            yield from messages
