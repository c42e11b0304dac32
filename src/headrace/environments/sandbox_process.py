"""A process of a sandbox: imports functions and calls them, one at a time, until its parent closes the socket.

`sandbox.py` starts it with the two descriptors of `child_process.py`. The method of a call is the import path of a
function. It is a plain loop over calls, so that a function may start an event loop of its own.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec

from headrace import imports
from headrace.environments.channel import HEADER_BYTES, Call, Failed, Result, encode, framed
from headrace.environments.child_process import connect_to_parent
from headrace.environments.fault import fault_of
from headrace.rollout.types import printable

SCHEMA = 2
NOT_UNICODE = 2
"""The msgpack extension type of a text with lone surrogates."""
MAX_ERROR_CHARS = 1000
"""Characters of an exception's text that are sent; it may quote a whole answer."""


def pack(value: Any) -> bytes:
    """Encode a msgpack value whose texts, except for keys, may have lone surrogates, which UTF-8 cannot encode."""
    try:
        return encode(value)
    except UnicodeEncodeError:
        return encode(_wrap_texts(value))


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


unpack = msgspec.msgpack.Decoder(ext_hook=_unwrap_text).decode
_calls = msgspec.msgpack.Decoder(Call)


@cache
def import_function(path: str) -> Callable[..., Any]:
    function: Callable[..., Any] = imports.load(path, "function")
    return function


def begin(schema: int, module_path: list[str], memory_mb: int | None) -> None:
    """Take the parent's `sys.path` and the memory limit: the first call."""
    if schema != SCHEMA:
        raise RuntimeError(f"the parent uses schema {schema}, this process {SCHEMA}: restart the run")
    sys.path[:] = module_path
    if memory_mb is not None:  # written memory counts, mapped files do not; only Linux enforces the limit
        limit, (_, maximum) = memory_mb << 20, resource.getrlimit(resource.RLIMIT_DATA)
        if maximum == resource.RLIM_INFINITY or limit < maximum:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def prepare(function: str) -> None:
    """Import a function in advance, so that its import time does not count as call time."""
    import_function(function)


def main() -> None:
    """Execute calls until the parent closes the socket."""
    with connect_to_parent() as parent, parent.makefile("rwb") as stream:
        while header := stream.read(HEADER_BYTES):
            call = _calls.decode(stream.read(int.from_bytes(header, "big")))
            try:
                value = import_function(call.method)(*unpack(call.arguments))
                response = framed(Result(call.number, msgspec.Raw(pack(value))))
            except BaseException as error:  # sys.exit() included: it fails its call, not the process
                fault = fault_of(error)
                short = msgspec.structs.replace(fault, message=fault.message[:MAX_ERROR_CHARS])
                response = framed(Failed(call.number, short))
            stream.write(response)
            stream.flush()
