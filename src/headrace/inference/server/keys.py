"""API keys: one for clients, and one for admin calls such as weight updates.

Keys are sent as `Authorization: Bearer KEY`. Left out: several keys, expiry and quotas; use a gateway for those.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from collections.abc import Mapping

import msgspec

from headrace.config.base import ConfigError


class Unauthorized(Exception):
    """The key is missing or wrong."""


class Forbidden(Exception):
    """The server does not accept this call."""


class Keys(msgspec.Struct, frozen=True):
    """The keys of a server. `api` None: no key is needed; `admin` None: no admin calls are accepted."""

    api: str | None = None
    admin: str | None = None

    def check_client(self, authorization: str | None) -> None:
        """Raise `Unauthorized` unless the header has one of the keys, if a key is set."""
        if self.api is not None and not _has_key(authorization, (self.api, self.admin)):
            raise Unauthorized("an API key is required: send it as `Authorization: Bearer KEY`")

    def check_admin(self, authorization: str | None) -> None:
        """Raise `Unauthorized` unless the header has the admin key, `Forbidden` if there is none."""
        if self.admin is None:
            raise Forbidden(
                "this server does not accept admin calls: start it with an admin key (see inference.admin_key_var)"
            )
        if not _has_key(authorization, (self.admin,)):
            raise Unauthorized("the admin key is required: send it as `Authorization: Bearer KEY`")


def find_keys(environment: Mapping[str, str], api_var: str, admin_var: str, host: str, *, in_run: bool) -> Keys:
    """Return the keys of a server on this address. A run always has an admin key, random if it is not set."""
    api = _key(environment, api_var)
    admin = _key(environment, admin_var)
    if api is None and not is_loopback(host):
        raise ConfigError(
            "the address can be reached by others, and no key is set",
            key="inference.host",
            value=host,
            fix=f"Set the environment variable {api_var} to the key that clients must send, or listen on 127.0.0.1.",
        )
    if admin is None and in_run:
        admin = secrets.token_urlsafe(32)
    return Keys(api, admin)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address; of names, `localhost` only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _key(environment: Mapping[str, str], name: str) -> str | None:
    key = environment.get(name)
    if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError("a key must be printable ASCII without spaces", key=name)
    return key


def _has_key(authorization: str | None, keys: tuple[str | None, ...]) -> bool:
    scheme, _, key_sent = (authorization or "").partition(" ")
    # In constant time: all keys are compared.
    matches = [hmac.compare_digest(key_sent.strip().encode(), key.encode()) for key in keys if key is not None]
    return scheme.lower() == "bearer" and any(matches)
