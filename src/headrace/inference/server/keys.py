"""API keys: of clients, and of admin calls such as weight updates.

Keys are sent as `Authorization: Bearer KEY`. Those in a file can be replaced while the server runs: an old key is valid
until it is removed. Left out: users, expiry and quotas; use a gateway for those.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import secrets
from collections.abc import Mapping

import msgspec

from headrace.config.base import ConfigError
from headrace.config.inference import InferenceConfig
from headrace.inference.keys_file import KeysInFile, check_key, read_keys_file


class Unauthorized(Exception):
    """The key is missing or wrong."""


class Forbidden(Exception):
    """The server does not accept this call."""


class Keys(msgspec.Struct, frozen=True):
    """The keys of a server, newest first. No `api`: none is needed; no `admin`: no admin calls are accepted."""

    api: tuple[str, ...] = ()
    admin: tuple[str, ...] = ()

    def is_client(self, authorization: str | None) -> bool:
        """Whether the header has one of the keys, or none is needed."""
        return not self.api or _has_key(authorization, self.api + self.admin)

    def check_client(self, authorization: str | None) -> None:
        """Raise `Unauthorized` unless the header has one of the keys, if a key is set."""
        if not self.is_client(authorization):
            raise Unauthorized("an API key is required: send it as `Authorization: Bearer KEY`")

    def check_admin(self, authorization: str | None) -> None:
        """Raise `Unauthorized` unless the header has an admin key, `Forbidden` if there is none."""
        if not self.admin:
            raise Forbidden(
                "this server does not accept admin calls: start it with an admin key (see inference.admin_key_var)"
            )
        if not _has_key(authorization, self.admin):
            raise Unauthorized("the admin key is required: send it as `Authorization: Bearer KEY`")


class KeySource:
    """The keys of a server at an address, from the environment or from `inference.http.keys_file`.

    A run always has an admin key, a random one if none is set.
    """

    def __init__(self, config: InferenceConfig, environment: Mapping[str, str], *, in_run: bool) -> None:
        self._config, self._environment, self._in_run = config, environment, in_run
        self._stamp = self._read_stamp()

    def read(self) -> Keys:
        config = self._config
        if config.http.keys_file is not None:
            keys = read_keys_file(config.http.keys_file)
            fix = f"Add `api`, a list of keys, to {config.http.keys_file}"
        else:
            keys = KeysInFile(self._variable(config.api_key_var), self._variable(config.admin_key_var))
            fix = f"Set the environment variable {config.api_key_var} to the key that clients must send"
        if not keys.api and not is_loopback(config.host):
            raise ConfigError(
                "the address can be reached by others, and no key is set",
                key="inference.host",
                value=config.host,
                fix=f"{fix}, or listen on 127.0.0.1.",
            )
        return Keys(keys.api, keys.admin or ((secrets.token_urlsafe(32),) if self._in_run else ()))

    def has_changed(self) -> bool:
        """Whether the file has changed since the last call."""
        before, self._stamp = self._stamp, self._read_stamp()
        return self._stamp != before

    def _read_stamp(self) -> tuple[int, int] | None:
        if self._config.http.keys_file is None:
            return None
        with contextlib.suppress(FileNotFoundError):
            status = self._config.http.keys_file.stat()
            return status.st_ino, status.st_mtime_ns
        return None

    def _variable(self, name: str) -> tuple[str, ...]:
        key = self._environment.get(name)
        return () if key is None else (check_key(key, name),)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address; of names, `localhost` only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _has_key(authorization: str | None, keys: tuple[str, ...]) -> bool:
    scheme, _, key_sent = (authorization or "").partition(" ")
    # In constant time: all keys are compared.
    matches = [hmac.compare_digest(key_sent.strip().encode(), key.encode()) for key in keys]
    return scheme.lower() == "bearer" and any(matches)
