"""Where the engines of a run listen: a file each, written by the server once it does, read by whoever calls it."""

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


def read_endpoints(directory: Path) -> dict[str, Endpoint]:
    """Where every server listens that does, by its name."""
    found = {path.stem: read_endpoint(path) for path in sorted(directory.glob("*.json"))}
    return {name: endpoint for name, endpoint in found.items() if endpoint is not None}


def withdraw_endpoint(path: Path, pid: int) -> None:
    """Take down the endpoint of a process that has ended, unless another has put its own there."""
    endpoint = read_endpoint(path)
    if endpoint is not None and endpoint.pid == pid:
        path.unlink(missing_ok=True)


def read_endpoint(path: Path) -> Endpoint | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    return decode_versioned(content, Endpoint, str(path))
