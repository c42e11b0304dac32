"""Addresses of a run's inference servers: one file per start of a server, written when it listens, read by its clients.

A restarted server has a new file, `NAME.NONCE.json`, so that clients on other hosts see a new name in the directory,
not a change of a file that they may have cached. The file contains the server's API keys: only its owner may read it.
"""

from __future__ import annotations

import os
import uuid
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

from headrace.errors import BadInput
from headrace.rollout.digest import seal
from headrace.rollout.schema import SCHEMA, decode_versioned
from headrace.transport.announcements import announce, list_names
from headrace.transport.files import write_atomically

PAST_SERVER = "past-1"
"""The server that scores with the run's past policy, in a run that has one; the others sample."""


class Endpoint(msgspec.Struct, frozen=True):
    """Address, process and keys of an inference server."""

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


def new_endpoint_path(directory: Path, server: str) -> Path:
    """Return the path of the endpoint file for a new start of a server."""
    return directory / f"{server}.{uuid.uuid4().hex[:8]}.json"


def write_endpoint(path: Path, endpoint: Endpoint) -> None:
    write_atomically(path, seal(endpoint), mode=0o600)
    announce(path)


def read_endpoints(directory: Path) -> dict[str, Endpoint]:
    """Return the endpoints of all listening servers by the name of their file."""
    return EndpointReader(directory).read()


class EndpointReader:
    """Reads the endpoints of a run repeatedly, but only files that have changed: there may be hundreds."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._cached: dict[str, tuple[tuple[int, int], Endpoint]] = {}
        """By file name: inode and time of the file, and its content. Every write replaces the file."""

    def read(self) -> dict[str, Endpoint]:
        cached, self._cached = self._cached, {}
        for name in list_names(self._directory):
            if name.endswith(".json") and not name.startswith("."):
                path = self._directory / name
                try:
                    stat = os.stat(path)
                except FileNotFoundError:
                    continue
                written = (stat.st_ino, stat.st_mtime_ns)
                if name in cached and cached[name][0] == written:
                    self._cached[name] = cached[name]
                elif (endpoint := read_endpoint(path)) is not None:
                    self._cached[name] = (written, endpoint)
        return {name.removesuffix(".json"): endpoint for name, (_, endpoint) in self._cached.items()}


def is_past_server(name: str) -> bool:
    """Return whether an endpoint, by the name of its file, is that of the run's past policy."""
    return name.partition(".")[0] == PAST_SERVER


def withdraw_endpoints(directory: Path, server: str) -> None:
    """Delete the endpoints of a server that has ended."""
    for name in list_names(directory):
        if name == f"{server}.json" or fnmatchcase(name, f"{server}.*.json"):
            withdraw_endpoint(directory / name)


def withdraw_endpoint(path: Path) -> None:
    path.unlink(missing_ok=True)
    announce(path, withdrawn=True)


def read_endpoint(path: Path) -> Endpoint | None:
    """Return the endpoint in a file; None if it does not exist. Raises `BadInput` for another user's file."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise BadInput("the server belongs to another user", file=path) from error
    return decode_versioned(content, Endpoint, str(path))
