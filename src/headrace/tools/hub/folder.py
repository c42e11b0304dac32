"""The files of a folder that are uploaded as a dataset, and the search for secrets in what is uploaded.

Files that only concern this machine are left out and listed with the reason. A secret in a file is an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from headrace.config.base import ConfigError
from headrace.config.files import read_file
from headrace.errors import BadInput
from headrace.launch.run_directory import is_run
from headrace.runfile.reading import leaves
from headrace.tools.hub.layout import MANIFEST
from headrace.transport.endpoint import read_endpoints
from headrace.transport.run_dir import RunDir

PRIVATE_KEYS = ("*.pem", "*.key", "*.p12", "*.pfx", "id_rsa", "id_ecdsa", "id_ed25519")
OF_A_RUN = {"endpoints": "keys of servers", "driver.json": "the key of its launcher", "turns": "locks of this machine"}
"""Files and folders of a run directory that are not uploaded, with the reason."""
CHUNK_BYTES = 1 << 20
_SECRET_KEY = re.compile(
    r"(^|[_-])((api|access|auth|secret)[_-]?(key|token)|secret|password|authorization)$", re.IGNORECASE
)
_SECRET_VALUE = re.compile(r"\b(hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|Bearer\s+\S{8,})")
_SECRET_VARIABLE = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD)$")
SECTIONS_OF_VARIABLE_NAMES = ("env_from", "auth")
MIN_SECRET_CHARS = 8
"""Shorter values of variables occur everywhere."""


class Listing(NamedTuple):
    """The files of a folder by their path in it, and what is left out with the reason."""

    files: dict[str, Path]
    left_out: dict[str, str]


def list_folder(folder: Path, exclude: Sequence[str] = ()) -> Listing:
    """List the files to upload; `exclude` has patterns of paths in the folder, or of names."""
    listing = Listing({}, {})
    for parent, folders, names in os.walk(folder):
        for name in sorted([*folders, *names]):
            path = Path(parent, name)
            inner = path.relative_to(folder).as_posix()
            if (reason := _reason(path, inner, folder, exclude)) is not None:
                listing.left_out[inner] = reason
            elif name in names:
                listing.files[inner] = path
            elif not any(path.iterdir()):
                listing.left_out[inner] = "an empty folder, which the hub cannot have"
        folders[:] = [
            name for name in folders if Path(parent, name).relative_to(folder).as_posix() not in listing.left_out
        ]
    return listing


def _reason(path: Path, inner: str, folder: Path, exclude: Sequence[str]) -> str | None:
    """Return why a file or a folder is left out; None if it is uploaded."""
    name = path.name
    if name.startswith("."):
        return "hidden, as settings and tokens of a machine are"
    if any(fnmatchcase(inner, pattern) or fnmatchcase(name, pattern) for pattern in exclude):
        return "--exclude"
    if any(fnmatchcase(name, pattern) for pattern in PRIVATE_KEYS):
        return "a private key"
    if path.is_symlink() and (path.is_dir() or not path.resolve().is_relative_to(folder.resolve())):
        return "a link to a folder, or out of this one"
    if name in OF_A_RUN and is_run(path.parent):
        return OF_A_RUN[name]
    if path.is_dir():
        return None
    if not path.is_file():
        return "no file"
    if name.endswith(".sqlite-shm"):
        return "memory that processes of this machine share"
    return "the name of the hub's list of files" if inner == MANIFEST else None


def refuse_secrets_in(files: Mapping[str, Path], root: Path, environment: Mapping[str, str]) -> None:
    """Raise `BadInput` for a file that contains the value of a secret variable, a server's key, or a secret setting."""
    values = set(_secret_values(environment))
    for run in (path.parent for path in root.rglob("endpoints") if is_run(path.parent)):
        for endpoint in read_endpoints(RunDir(run).endpoints).values():
            values |= {key for key in (endpoint.api_key, endpoint.admin_key) if key}
    for path in files.values():
        if path.suffix in (".toml", ".yaml", ".yml"):
            try:
                tree = read_file(path)
            except ConfigError:  # not a configuration; its bytes are searched below
                tree = {}
            refuse_secrets(tree, path, environment)
        if _contains(path, [value.encode() for value in values]):
            fact = "holds a key or token of this machine, and everyone who may read the repository would have it"
            raise BadInput(fact, file=path, fix="Remove it from the file, or leave the file out with --exclude.")


def _contains(path: Path, values: Sequence[bytes]) -> bool:
    longest = max(map(len, values), default=0)
    with open(path, "rb") as file:
        before = b""
        while longest and (chunk := file.read(CHUNK_BYTES)):
            if any(value in before + chunk for value in values):
                return True
            before = (before + chunk)[-longest:]
    return False


def _secret_values(environment: Mapping[str, str]) -> list[str]:
    """Return the values of variables whose names are those of secrets."""
    pairs = environment.items()
    return [value for name, value in pairs if _SECRET_VARIABLE.search(name) and len(value) >= MIN_SECRET_CHARS]


def refuse_secrets(tree: dict[str, Any], where: Path, environment: Mapping[str, str]) -> None:
    """Raise `BadInput` with the key, but not the value, if the configuration `tree` has a secret."""
    values = _secret_values(environment)
    for key, value in leaves(tree).items():
        section, _, name = key.rpartition(".")
        is_secret_key = _SECRET_KEY.search(name) and section.rpartition(".")[2] not in SECTIONS_OF_VARIABLE_NAMES
        for text in filter(None, value if isinstance(value, list) else [value]):
            is_secret = isinstance(text, str) and (is_secret_key or _SECRET_VALUE.search(text))
            if is_secret or (isinstance(text, str) and any(value in text for value in values)):
                fact = "looks like a secret, and everyone who may read the repository would have it"
                raise BadInput(fact, key=key, file=where, fix="Name an environment variable there instead.")
