"""API keys of a server, for the server and its clients: of clients, and of admin calls such as weight updates.

Keys are sent as `Authorization: Bearer KEY`. They are in environment variables, or in a TOML file with `api` and
`admin`, lists of keys, that can be replaced while the server runs. To rotate a key, put the new one first: the server
accepts both, and clients send the first. Then remove the old one. Left out: users, expiry and quotas; use a gateway for
those.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import secrets
import tomllib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from headrace.config.base import ConfigError
from headrace.config.inference import InferenceConfig


class Unauthorized(Exception):
    """The key is missing or wrong."""


class Forbidden(Exception):
    """The server does not accept this call."""


class Keys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of a server, newest first. No `api`: none is needed; no `admin`: no admin calls are accepted."""

    api: tuple[str, ...] = ()
    admin: tuple[str, ...] = ()

    def is_client(self, authorization: str | None) -> bool:
        """Whether the header has one of the keys, or none is needed."""
        return not self.api or _has_key(authorization, self.api + self.admin)

    def check(self, authorization: str | None, *, admin: bool) -> None:
        """Raise `Unauthorized` unless the header has a key for this kind of call, `Forbidden` if there is none."""
        if admin and not self.admin:
            raise Forbidden(
                "this server does not accept admin calls: start it with an admin key (see inference.admin_key_var)"
            )
        if not (_has_key(authorization, self.admin) if admin else self.is_client(authorization)):
            key = "the admin key" if admin else "an API key"
            raise Unauthorized(f"{key} is required: send it as `Authorization: Bearer KEY`")


def read_keys_file(path: Path) -> Keys:
    """Read the keys. Raises `ConfigError`, which does not show any of them."""
    try:
        keys = msgspec.convert(tomllib.loads(path.read_text()), Keys)
    except (OSError, ValueError, msgspec.ValidationError) as error:
        fix = 'Write a line such as `api = ["KEY", "OLD KEY"]`, and one for `admin`.'
        raise ConfigError(f"not a file of keys: {error}", key="keys_file", value=path, fix=fix) from error
    for name in ("api", "admin"):
        for key in getattr(keys, name):
            _check_key(key, f"{path}: {name}")
    return keys


def _check_key(key: str, name: str) -> None:
    """Raise `ConfigError` for a key that cannot be sent; its message has the name alone."""
    if not (key and key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError("a key must be printable ASCII without spaces", key=name)


class KeySource:
    """The keys of a server at an address, from the environment or from `inference.http.keys_file`.

    A run always has an admin key, a random one if none is set.
    """

    def __init__(self, config: InferenceConfig, environment: Mapping[str, str], *, in_run: bool) -> None:
        self._config, self._environment, self._in_run = config, environment, in_run
        self._stamp = self._read_stamp()

    def read(self) -> Keys:
        """Return the current keys. Raises `ConfigError`, also if other machines reach a server without keys."""
        config = self._config
        if config.http.keys_file is not None:
            keys = read_keys_file(config.http.keys_file)
            fix = f"Add `api`, a list of keys, to {config.http.keys_file}"
        else:
            keys = Keys(self._keys_in(config.api_key_var), self._keys_in(config.admin_key_var))
            fix = f"Set the environment variable {config.api_key_var} to the key that clients must send"
        if not keys.api and not is_loopback(config.host):
            fact, fix = "the address can be reached by others, and no key is set", f"{fix}, or listen on 127.0.0.1."
            raise ConfigError(fact, key="inference.host", value=config.host, fix=fix)
        return Keys(keys.api, keys.admin or ((secrets.token_urlsafe(32),) if self._in_run else ()))

    def has_changed(self) -> bool:
        """Whether the file has changed since the last call."""
        before, self._stamp = self._stamp, self._read_stamp()
        return self._stamp != before

    def _read_stamp(self) -> tuple[int, int] | None:
        """Return what changes when the file of keys is replaced."""
        if self._config.http.keys_file is None:
            return None
        with contextlib.suppress(FileNotFoundError):
            status = self._config.http.keys_file.stat()
            return status.st_ino, status.st_mtime_ns
        return None

    def _keys_in(self, name: str) -> tuple[str, ...]:
        """Return the key in an environment variable, if it is set."""
        key = self._environment.get(name)
        if key is not None:
            _check_key(key, name)
        return () if key is None else (key,)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address; of names, `localhost` only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _has_key(authorization: str | None, keys: tuple[str, ...]) -> bool:
    """Return whether a header `Bearer KEY` has one of the keys."""
    scheme, _, key_sent = (authorization or "").partition(" ")
    # In constant time: all keys are compared.
    matches = [hmac.compare_digest(key_sent.strip().encode(), key.encode()) for key in keys]
    return scheme.lower() == "bearer" and any(matches)
