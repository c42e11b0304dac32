"""HTTP headers that somebody wrote down: can they be sent at all?

Checked before anything is sent, since what refuses them later shows them, and a value may be a secret.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""What HTTP takes for one (RFC 9110, section 5.1)."""


def why_not_sent(headers: Mapping[Any, Any]) -> str | None:
    """Return what is wrong with the first header that cannot be sent, without its value; None if all can."""
    for number, (name, value) in enumerate(headers.items(), 1):
        if not isinstance(name, str) or not NAME.fullmatch(name):
            # A whole header may stand here by mistake.
            return f"header {number} has no valid name: use letters, digits and hyphens, without spaces or colons"
        if not isinstance(value, str):
            return f"the value of header {name} is not a text: put it in quotes"
        if not (value.isascii() and value.isprintable() and value == value.strip()):
            return (
                f"the value of header {name} cannot be sent: it has a line break or a character beyond ASCII, or a "
                "space at an end"
            )
    return None
