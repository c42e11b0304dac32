"""Keys that got into a run's settings by mistake: found before anything leaves the machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from headrace.config.leaves import leaves
from headrace.errors import BadInput

_NAMES = re.compile(r"(^|[_-])((api|access|auth|secret)[_-]?(key|token)|secret|password|authorization)$", re.IGNORECASE)
_VALUES = re.compile(r"\b(hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|Bearer\s+\S{8,})")
_VARIABLES = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD)$")
SHORTEST = 8
"""Characters of a variable's value that is looked for; shorter ones are found everywhere."""


def refuse_secrets(tree: dict[str, Any], where: str, environment: Mapping[str, str]) -> None:
    """`tree` is a configuration. What is found is named by its key, and never shown."""
    known = [value for name, value in environment.items() if _VARIABLES.search(name) and len(value) >= SHORTEST]
    for key, value in leaves(tree).items():
        texts = value if isinstance(value, list) else [value]
        for text in texts:
            if isinstance(text, str) and text and _is_secret(key.rpartition(".")[2], text, known):
                raise BadInput(
                    f"{where}: {key} looks like a secret, and everybody who may read the repository would have it: "
                    "name an environment variable there instead, and start the run anew"
                )


def _is_secret(name: str, text: str, known: list[str]) -> bool:
    return bool(_NAMES.search(name) or _VALUES.search(text)) or any(value in text for value in known)
