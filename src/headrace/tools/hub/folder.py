"""Which files of a folder go up as a dataset: all of them, apart from secrets and what belongs to this machine alone.

What is left out is listed with its reason. A secret in a file that would go up is an error: a snapshot that lacks the
file without a word would not be whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from headrace.config.base import ConfigError
from headrace.config.files import read_file
from headrace.errors import BadInput
from headrace.launch.run_directory import in_use, is_run
from headrace.tools.hub.places import MANIFEST
from headrace.tools.hub.secrets import refuse_secrets, secret_values
from headrace.transport.endpoint import read_endpoints
from headrace.transport.run_dir import RunDir

PRIVATE_KEYS = ("*.pem", "*.key", "*.p12", "*.pfx", "id_rsa", "id_ecdsa", "id_ed25519")
OF_A_RUN = {"endpoints": "keys of servers", "turns": "locks of this machine"}
"""Folders of a run directory that stay here."""
CHUNK_BYTES = 1 << 20


class Listing(NamedTuple):
    """The files of a folder, by their path in it."""

    files: dict[str, Path]
    left_out: dict[str, str]
    """Files and folders that stay here, each with the reason."""


def list_folder(folder: Path, exclude: Sequence[str] = ()) -> Listing:
    """List what goes up. `exclude` has patterns of paths in the folder, or of names."""
    found = Listing({}, {})
    for parent, folders, names in os.walk(folder):
        for name in sorted([*folders, *names]):
            path = Path(parent, name)
            inner = path.relative_to(folder).as_posix()
            if (reason := _reason(path, inner, folder, exclude)) is not None:
                found.left_out[inner] = reason
            elif name in names:
                found.files[inner] = path
            elif not any(path.iterdir()):
                found.left_out[inner] = "an empty folder, which the hub cannot have"
        folders[:] = [
            name for name in folders if Path(parent, name).relative_to(folder).as_posix() not in found.left_out
        ]
    return found


def _reason(path: Path, inner: str, folder: Path, exclude: Sequence[str]) -> str | None:
    """Return why a file or a folder stays here; None if it goes up."""
    name = path.name
    if name.startswith("."):
        return "hidden, as settings and tokens of a machine are"
    if any(fnmatchcase(inner, pattern) or fnmatchcase(name, pattern) for pattern in exclude):
        return "--exclude"
    if any(fnmatchcase(name, pattern) for pattern in PRIVATE_KEYS):
        return "a private key"
    if path.is_symlink() and (path.is_dir() or not path.resolve().is_relative_to(folder.resolve())):
        return "a link to a folder, or out of this one"
    if path.is_dir():
        return OF_A_RUN.get(name) if is_run(path.parent) else None
    if not path.is_file():
        return "no file"
    if name.endswith(".sqlite-shm"):
        return "memory that processes of this machine share"
    return "the name of the hub's list of files" if inner == MANIFEST else None


def refuse_running(folder: Path) -> None:
    """Raise `BadInput` if a sweep or a run in the folder is at work: its files would be of different moments."""
    for place in (folder, *(path.parent for path in folder.rglob("config.toml"))):
        if in_use(place):
            raise BadInput("a run is at work there", key="PATH", value=str(place), fix="Stop it, or wait for its end.")


def refuse_secrets_in(files: Mapping[str, Path], root: Path, environment: Mapping[str, str]) -> None:
    """Raise `BadInput` for a file with the value of a secret variable, a server's key, or a secret setting."""
    values = {*secret_values(environment), *_server_keys(root)}
    for path in files.values():
        if path.suffix in (".toml", ".yaml", ".yml"):
            try:
                tree = read_file(path)
            except ConfigError:  # not a configuration, so it has no settings; its bytes are searched below
                tree = {}
            refuse_secrets(tree, path, environment)
        if _contains(path, [value.encode() for value in values]):
            raise BadInput(
                "holds a key or token of this machine, and everyone who may read the repository would have it",
                file=path,
                fix="Remove it from the file, or leave the file out with --exclude.",
            )


def _server_keys(root: Path) -> Iterable[str]:
    for folder in root.rglob("endpoints") if root.is_dir() else ():
        for endpoint in read_endpoints(RunDir(folder.parent).endpoints).values() if is_run(folder.parent) else ():
            yield from (key for key in (endpoint.api_key, endpoint.admin_key) if key)


def _contains(path: Path, values: Sequence[bytes]) -> bool:
    longest = max(map(len, values), default=0)
    with open(path, "rb") as file:
        before = b""
        while longest and (chunk := file.read(CHUNK_BYTES)):
            if any(value in before + chunk for value in values):
                return True
            before = (before + chunk)[-longest:]
    return False
