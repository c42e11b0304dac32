"""Who may call what: a key for clients, and one for whoever moves weights.

Keys travel as `Authorization: Bearer KEY`. Left out: several keys, expiry and quotas; put a gateway in front for those.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from collections.abc import Mapping

import msgspec

from headrace.config.base import ConfigError


class Unauthorized(Exception):
    """No key, or a wrong one."""


class Forbidden(Exception):
    """Nobody may do this here."""


class Keys(msgspec.Struct, frozen=True):
    """What clients must show; None: nothing for `api`, and no admin calls at all for `admin`."""

    api: str | None = None
    admin: str | None = None

    def check_client(self, authorization: str | None) -> None:
        """Raises `Unauthorized` unless the header has a key of this server, where one is set."""
        if self.api is not None and not _shows(authorization, (self.api, self.admin)):
            raise Unauthorized("this server wants a key: send it as `Authorization: Bearer KEY`")

    def check_admin(self, authorization: str | None) -> None:
        """The same for calls that change what is served; `Forbidden` where there is no key for them."""
        if self.admin is None:
            raise Forbidden(
                "this server takes no admin calls: start it with a key for them (see inference.admin_key_var)"
            )
        if not _shows(authorization, (self.admin,)):
            raise Unauthorized("admin calls want the admin key: send it as `Authorization: Bearer KEY`")


def find_keys(environment: Mapping[str, str], api_var: str, admin_var: str, host: str, *, in_run: bool) -> Keys:
    """The keys of a server on this address. In a run there always is an admin key: whoever drives the run reads it."""
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
    """Whether only this machine reaches the address. Of names only `localhost` surely is."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _key(environment: Mapping[str, str], name: str) -> str | None:
    key = environment.get(name)
    if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError("a key must be printable ASCII without spaces", key=name)
    return key


def _shows(authorization: str | None, keys: tuple[str | None, ...]) -> bool:
    scheme, _, shown = (authorization or "").partition(" ")
    # Every key is compared, and each in the same time however much of it is right.
    fits = [hmac.compare_digest(shown.strip().encode(), key.encode()) for key in keys if key is not None]
    return scheme.lower() == "bearer" and any(fits)
