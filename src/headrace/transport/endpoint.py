"""Addresses of a run's inference servers: one file per server, written when it listens, read by its clients.

The file contains the server's API keys, so only its owner may read it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from headrace.errors import BadInput
from headrace.rollout.batch import SCHEMA, decode_versioned
from headrace.rollout.digest import seal
from headrace.transport.files import write_atomically


class Endpoint(msgspec.Struct, frozen=True):
    url: str
    pid: int
    api_key: str | None = None
    """The key that every request must send, unless None."""
    admin_key: str | None = None
    """The key for requests that change the engine."""
    schema: int = SCHEMA

    def __repr__(self) -> str:
        """Leave the keys out: representations end up in logs."""
        return f"Endpoint({self.url!r}, {self.pid})"


def write_endpoint(path: Path, endpoint: Endpoint) -> None:
    write_atomically(path, seal(endpoint), mode=0o600)


def read_endpoints(directory: Path) -> dict[str, Endpoint]:
    """Return the endpoints of all listening servers by name."""
    endpoints = {path.stem: read_endpoint(path) for path in sorted(directory.glob("*.json"))}
    return {name: endpoint for name, endpoint in endpoints.items() if endpoint is not None}


def withdraw_endpoint(path: Path, pid: int) -> None:
    """Delete the endpoint of a process that has ended, unless another process has replaced it."""
    endpoint = read_endpoint(path)
    if endpoint is not None and endpoint.pid == pid:
        path.unlink(missing_ok=True)


def read_endpoint(path: Path) -> Endpoint | None:
    """Return the endpoint, None if there is none. Raises `BadInput` for another user's file."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise BadInput("the server belongs to another user", file=path) from error
    return decode_versioned(content, Endpoint, str(path))
