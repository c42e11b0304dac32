"""A process of a sandbox: imports functions and calls them, one at a time, until its parent closes the socket.

`sandbox.py` starts it with the two descriptors of `child_process.py`. It is a plain loop over requests, so that a
function may start an event loop of its own.
"""

from __future__ import annotations

import resource
import socket
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec

from headrace import imports
from headrace.environments.channel import HEADER_BYTES, Message, encode
from headrace.environments.child_process import connect_to_parent
from headrace.environments.fault import fault_of
from headrace.rollout.types import printable

SCHEMA = 1
NOT_UNICODE = 2
"""The msgpack extension type of a text with lone surrogates."""
MAX_ERROR_CHARS = 1000
"""Characters of an exception's text that are sent; it may quote a whole answer."""


class Begin(Message):
    """The first request: the parent's `sys.path`, and the memory limit."""

    schema: int
    module_path: list[str]
    memory_mb: int | None


class Import(Message):
    """Import a function in advance, so that its import time does not count as call time."""

    function: str


class Call(Message):
    function: str
    arguments: msgspec.Raw
    """Encoded separately, so that an undecodable value fails this call only."""


class Done(Message):
    value: msgspec.Raw


class Raised(Message):
    kind: str
    text: str
    traceback: str


Request = Begin | Import | Call
Outcome = Done | Raised


def pack(value: Any) -> bytes:
    """Encode a msgpack value whose texts, except for keys, may have lone surrogates, which UTF-8 cannot encode."""
    try:
        return encode(value)
    except UnicodeEncodeError:
        return encode(_wrap_texts(value))


def unpack(content: bytes | msgspec.Raw) -> Any:
    return _decoder.decode(content)


def _wrap_texts(value: Any) -> Any:
    if isinstance(value, str) and printable(value) != value:
        return msgspec.msgpack.Ext(NOT_UNICODE, value.encode(errors="surrogatepass"))
    if isinstance(value, dict):
        return {key: _wrap_texts(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_wrap_texts(entry) for entry in value]
    return value


def _unwrap_text(code: int, content: memoryview) -> str:
    if code != NOT_UNICODE:
        raise ValueError(f"an array cannot be passed here: pass a list (msgpack extension type {code})")
    return bytes(content).decode(errors="surrogatepass")


_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ext_hook=_unwrap_text)
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)


@cache
def _import(path: str) -> Callable[..., Any]:
    function: Callable[..., Any] = imports.load(path, "function")
    return function


def _execute(request: Request) -> Any:
    match request:
        case Begin(schema, module_path, memory_mb):
            if schema != SCHEMA:
                raise RuntimeError(f"the parent uses schema {schema}, this process {SCHEMA}: restart the run")
            sys.path[:] = module_path
            if memory_mb is not None:  # written memory counts, mapped files do not; only Linux enforces the limit
                limit, (_, maximum) = memory_mb << 20, resource.getrlimit(resource.RLIMIT_DATA)
                if maximum == resource.RLIM_INFINITY or limit < maximum:
                    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        case Import(function):
            _import(function)
        case Call(function, arguments):
            return _import(function)(*unpack(arguments))
    return None


def serve(parent: socket.socket) -> None:
    """Execute requests until the parent closes the socket."""
    with parent, parent.makefile("rwb") as stream:
        while header := stream.read(HEADER_BYTES):
            content = stream.read(int.from_bytes(header, "big"))
            try:
                response = encode(Done(msgspec.Raw(pack(_execute(_requests.decode(content))))))
            except BaseException as error:  # sys.exit() included: it fails its call, not the process
                fault = fault_of(error)
                response = encode(Raised(fault.kind, fault.message[:MAX_ERROR_CHARS], fault.traceback))
            stream.write(len(response).to_bytes(HEADER_BYTES, "big") + response)
            stream.flush()


def main() -> None:
    serve(connect_to_parent())
