"""A process of a sandbox: it imports functions and calls them, one at a time, as long as its parent asks.

`sandbox.py` starts it with two inherited descriptors, whose numbers are its arguments: the socket on which the parent
speaks, and the read end of a pipe to which nobody writes. Every request has one answer, and the next request comes
after it, so this program is a plain loop: a function that runs here may well start an event loop of its own.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import msgspec

from headrace import imports
from headrace.environments.channel import HEADER, encode, printable
from headrace.environments.child import parents_end
from headrace.environments.fault import fault_of

SCHEMA = 1
NOT_UNICODE = 2
"""The code, among msgpack's extension types, of a text with lone surrogates."""

PR_SET_CHILD_SUBREAPER = 36
LONGEST_TEXT = 1000
"""Characters of an exception's text that are sent; it may quote a whole answer."""


class Begin(msgspec.Struct, tag=True, array_like=True):
    """Comes first: where the parent finds modules, and how much memory the process may have."""

    schema: int
    module_path: list[str]
    memory_mb: int | None


class Import(msgspec.Struct, tag=True, array_like=True):
    """Have a function ready, so that the time of its calls is its own."""

    function: str


class Call(msgspec.Struct, tag=True, array_like=True):
    function: str
    arguments: msgspec.Raw
    """Packed on their own, so that what cannot be read costs this call alone."""


class Done(msgspec.Struct, tag=True, array_like=True):
    value: msgspec.Raw


class Raised(msgspec.Struct, tag=True, array_like=True):
    kind: str
    text: str
    traceback: str


Request = Begin | Import | Call
Outcome = Done | Raised


def pack(value: Any) -> bytes:
    """Any msgpack value; its texts, if not its keys, may have lone surrogates, which UTF-8 has no place for."""
    try:
        return encode(value)
    except UnicodeEncodeError:
        return encode(_wrap_texts(value))


def unpack(content: bytes | msgspec.Raw) -> Any:
    return _decoder.decode(content)


def _wrap_texts(value: Any) -> Any:
    if isinstance(value, str):
        return value if _is_unicode(value) else msgspec.msgpack.Ext(NOT_UNICODE, value.encode(errors="surrogatepass"))
    if isinstance(value, dict):
        return {key: _wrap_texts(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_wrap_texts(entry) for entry in value]
    return value


def _is_unicode(text: str) -> bool:
    return printable(text) == text


def _unwrap_text(code: int, content: memoryview) -> str:
    if code != NOT_UNICODE:
        raise ValueError(f"an array cannot be passed here: pass a list (msgpack extension type {code})")
    return bytes(content).decode(errors="surrogatepass")


_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ext_hook=_unwrap_text)
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)


@cache
def _function(path: str) -> Callable[..., Any]:
    function: Callable[..., Any] = imports.load(path, "function")
    return function


def _limit_memory(megabytes: int) -> None:
    """What the process writes to counts, not the files that it maps. Linux holds this limit, macOS does not."""
    limit = megabytes << 20
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    if most == resource.RLIM_INFINITY or limit < most:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def adopt_orphans() -> None:
    """Processes that a function has started, and whose parent ends, become children of this one. Only on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_descendants() -> None:
    """Kill, and bury, all that this process has started. Only on Linux: elsewhere nobody says what that is."""
    while sys.platform == "linux":
        kill_descendants(os.getpid())
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def kill_descendants(pid: int) -> None:
    """All processes below this one, where the system can list them."""
    for descendant in _descendants(pid):
        with suppress(ProcessLookupError):
            os.kill(descendant, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    found = [pid]
    for parent in found:  # which grows meanwhile
        with suppress(OSError):  # it has just ended, or the system does not say
            for task in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{task}/children") as file:
                    found += map(int, file.read().split())
    return found[1:]


def _obey(request: Request) -> Any:
    match request:
        case Begin(schema, module_path, memory_mb):
            if schema != SCHEMA:
                raise RuntimeError(f"the parent speaks schema {schema}, this process {SCHEMA}: restart the run")
            sys.path[:] = module_path
            if memory_mb is not None:
                _limit_memory(memory_mb)
        case Import(function):
            _function(function)
        case Call(function, arguments):
            return _function(function)(*unpack(arguments))
    return None


def _answer(content: bytes) -> bytes:
    try:
        return encode(Done(msgspec.Raw(pack(_obey(_requests.decode(content))))))
    except BaseException as error:  # whatever it is, sys.exit() included: it costs its call, not the process
        fault = fault_of(error)
        return encode(Raised(fault.kind, fault.message[:LONGEST_TEXT], fault.traceback))


def serve(end: socket.socket) -> None:
    """Until the parent closes the channel."""
    with end, end.makefile("rwb") as stream:
        while header := stream.read(HEADER):
            answer = _answer(stream.read(int.from_bytes(header, "big")))
            stream.write(len(answer).to_bytes(HEADER, "big") + answer)
            stream.flush()


def main() -> None:
    serve(parents_end())
