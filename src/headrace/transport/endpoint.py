"""Where the engine of a run listens: written by the server once it does, read by whoever calls it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from headrace.rollout.batch import SCHEMA, decode_versioned
from headrace.transport.files import write_atomically


class Endpoint(msgspec.Struct):
    url: str
    pid: int
    schema: int = SCHEMA


def write_endpoint(path: Path, endpoint: Endpoint) -> None:
    write_atomically(path, msgspec.json.encode(endpoint))


def read_endpoint(path: Path) -> Endpoint | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    return decode_versioned(content, Endpoint, str(path))
