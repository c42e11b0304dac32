"""Where the engines of a run listen: a file each, written by the server once it does, read by whoever calls it.

It holds the server's keys, too, so only its owner may read it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from headrace.errors import BadInput
from headrace.rollout.batch import SCHEMA, decode_versioned
from headrace.transport.files import write_atomically

OWNER_ALONE = 0o600


class Endpoint(msgspec.Struct, frozen=True):
    url: str
    pid: int
    api_key: str | None = None
    """What every request must carry, unless None."""
    admin_key: str | None = None
    """The same for those that change the engine."""
    schema: int = SCHEMA

    def __repr__(self) -> str:
        """Without the keys, which belong in no message."""
        return f"Endpoint({self.url!r}, {self.pid})"


def write_endpoint(path: Path, endpoint: Endpoint) -> None:
    write_atomically(path, msgspec.json.encode(endpoint), OWNER_ALONE)


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
    """None where no server listens. Raises `BadInput` for another user's."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise BadInput("has the keys of a server: only its owner may call that server", file=path) from error
    return decode_versioned(content, Endpoint, str(path))
