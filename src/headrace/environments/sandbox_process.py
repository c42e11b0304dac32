"""The process of a sandbox: a loop that executes one call at a time for its parent (`sandbox.py`).

A function of an untrusted sandbox is called in a forked process, which has limits, no socket to the parent, and only
one pipe for its result.
"""

from __future__ import annotations

import os
import resource
import select
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import msgspec

from headrace import imports
from headrace.environments import code_runner
from headrace.environments.channel import HEADER_BYTES, Call, Failed, Outcome, Result, encode, frame_message
from headrace.environments.child_process import adopt_orphans, connect_to_parent
from headrace.environments.fault import Fault, fault_of
from headrace.safe_text import encodable

SCHEMA = 3
NOT_UNICODE = 2
"""The msgpack extension type of a text with lone surrogates."""
MAX_ERROR_CHARS = 1000
"""Characters of an exception's text that are sent; it may quote a whole answer."""

Limits = dict[str, Any]
"""The limits of untrusted functions, as a job of `code_runner` has them."""


def pack(value: Any) -> bytes:
    """Encode a msgpack value whose texts, except for keys, may have lone surrogates, which UTF-8 cannot encode."""
    try:
        return encode(value)
    except UnicodeEncodeError:
        return encode(_wrap_texts(value))


def _wrap_texts(value: Any) -> Any:
    if isinstance(value, str) and encodable(value) != value:
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
_outcomes = msgspec.msgpack.Decoder(Outcome)


@cache
def import_function(path: str) -> Callable[..., Any]:
    function: Callable[..., Any] = imports.load(path, "function")
    return function


_confinement: Limits | None = None


def apply_limits(schema: int, memory_mb: int | None, limits: Limits | None) -> None:
    """Apply the limits of a sandbox to this process, which its first call requests."""
    global _confinement
    if schema != SCHEMA:
        raise RuntimeError(f"the parent uses schema {schema}, this process {SCHEMA}: restart the run")
    _confinement = limits
    if limits is not None and limits["contained"]:
        code_runner.enter_container(limits["user"])
    elif limits is not None:
        adopt_orphans()
        code_runner.hide_memory()
    elif memory_mb is not None:  # written memory counts, mapped files do not; only Linux enforces the limit
        limit, (_, maximum) = memory_mb << 20, resource.getrlimit(resource.RLIMIT_DATA)
        if maximum == resource.RLIM_INFINITY or limit < maximum:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def prepare(function: str) -> None:
    """Import a function in advance, so that its import time does not count as call time."""
    import_function(function)


def main() -> None:
    """Execute calls in a process of a sandbox until the parent closes the socket."""
    with connect_to_parent() as parent, parent.makefile("rwb") as stream:
        while header := stream.read(HEADER_BYTES):
            call = _calls.decode(stream.read(int.from_bytes(header, "big")))
            if _confinement is None or call.method.startswith(f"{__name__}:"):
                response = _execute(call)
            else:
                response = _execute_confined(call, _confinement)
            stream.write(response)
            stream.flush()


def _execute(call: Call) -> bytes:
    """Return the framed outcome of a call."""
    try:
        value = import_function(call.method)(*unpack(call.arguments))
        return frame_message(Result(call.number, msgspec.Raw(pack(value))))
    except BaseException as error:  # sys.exit() included: it fails its call, not the process
        fault = fault_of(error)
        short = msgspec.structs.replace(fault, message=fault.message[:MAX_ERROR_CHARS])
        return frame_message(Failed(call.number, short))


def _execute_confined(call: Call, limits: Limits) -> bytes:
    """Return the framed outcome of a call in a forked process, after ending all that this one has started.

    A function's attribute `before_fork` is called before with the same arguments, for what later calls can share; it
    must not execute what a model wrote.
    """
    if (before_fork := getattr(import_function(call.method), "before_fork", None)) is not None:
        with suppress(Exception):  # the call itself raises the same exception
            before_fork(*unpack(call.arguments))
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            os.setsid()
            devnull = os.open(os.devnull, os.O_RDWR)
            for target, source in enumerate((devnull, devnull, devnull, writing)):
                os.dup2(source, target)
            os.closerange(4, 1 << 16)  # most importantly the socket to the parent
            code_runner.drop_privileges(limits)
            with os.fdopen(3, "wb") as report:
                report.write(_execute(call))
        finally:
            os._exit(0)
    os.close(writing)
    try:
        frame = _read_frame(reading, limits)
    finally:
        os.close(reading)
        code_runner.end_descendants()
    try:
        outcome = _outcomes.decode(frame[HEADER_BYTES:])
    except (msgspec.DecodeError, RecursionError):
        outcome = Failed(call.number, Fault("process", "the process of the call ended without a result", "process", ""))
    return frame_message(msgspec.structs.replace(outcome, number=call.number))


def _read_frame(reading: int, limits: Limits) -> bytes:
    """Return the frame that a call's process writes; an incomplete one if the process ends, or exceeds its limits."""
    frame = bytearray()
    while len(frame) < HEADER_BYTES + int.from_bytes(frame[:HEADER_BYTES], "big"):
        if select.select([reading], [], [], code_runner.MAX_POLL_S)[0]:
            content = os.read(reading, 1 << 16)
            if not content or len(frame) > limits["max_output"]:
                break
            frame += content
        elif code_runner.exceeds_limits(code_runner.measure_descendants(os.getpid()), limits):
            break
    return bytes(frame)
