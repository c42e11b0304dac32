"""A file with the API keys of a server, for the server and for clients: TOML with `api` and `admin`, lists of keys.

To rotate a key, put the new one first: the server accepts both, and clients send the first. Then remove the old one.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

from headrace.config.base import ConfigError


class KeysInFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys, those that clients send first."""

    api: tuple[str, ...] = ()
    admin: tuple[str, ...] = ()


def read_keys_file(path: Path) -> KeysInFile:
    """Read the keys. Raises `ConfigError`, which does not show any of them."""
    try:
        keys = msgspec.convert(tomllib.loads(path.read_text()), KeysInFile)
    except (OSError, ValueError, msgspec.ValidationError) as error:
        fix = 'Write a line such as `api = ["KEY", "OLD KEY"]`, and one for `admin`.'
        raise ConfigError(f"not a file of keys: {error}", key="keys_file", value=path, fix=fix) from error
    for name in ("api", "admin"):
        for key in getattr(keys, name):
            check_key(key, f"{path}: {name}")
    return keys


def check_key(key: str, name: str) -> str:
    """Return a key that can be sent; raises `ConfigError` with its name for another one."""
    if not (key and key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError("a key must be printable ASCII without spaces", key=name)
    return key
