"""Validation of HTTP headers. Environment workers import it, so that it needs no pydantic."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""A token of RFC 9110, section 5.1."""


def find_invalid_header(headers: Mapping[Any, Any]) -> str | None:
    """Describe the first header that cannot be sent, without its value; None if all are valid.

    To be called before a request is made: an HTTP client that rejects a header shows its value, perhaps a secret.
    """
    for number, (name, value) in enumerate(headers.items(), 1):
        if not isinstance(name, str) or not HEADER_NAME.fullmatch(name):
            # The name is not shown: it may be a whole header, with its value, by mistake.
            return f"header {number} has no valid name: use letters, digits and hyphens, without spaces or colons"
        if not isinstance(value, str):
            return f"the value of header {name} is not a text: put it in quotes"
        if not (value.isascii() and value.isprintable() and value == value.strip()):
            return (
                f"the value of header {name} cannot be sent: it has a line break, a character beyond ASCII, or a "
                "space at its start or end"
            )
    return None
