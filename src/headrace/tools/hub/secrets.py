"""Keys that got into a run's settings by mistake: found before anything leaves the machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.errors import BadInput
from headrace.runfile.reading import leaves

_NAMES = re.compile(r"(^|[_-])((api|access|auth|secret)[_-]?(key|token)|secret|password|authorization)$", re.IGNORECASE)
_VALUES = re.compile(r"\b(hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|Bearer\s+\S{8,})")
_VARIABLES = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD)$")
NAMES_OF_VARIABLES = ("env_from", "auth")
"""Sections whose values are names of variables."""
SHORTEST = 8
"""Characters of a variable's value that is looked for; shorter ones are found everywhere."""


def secret_values(environment: Mapping[str, str]) -> list[str]:
    """Return the values of variables that are called as secrets are."""
    return [value for name, value in environment.items() if _VARIABLES.search(name) and len(value) >= SHORTEST]


def refuse_secrets(tree: dict[str, Any], where: Path, environment: Mapping[str, str]) -> None:
    """Raise `BadInput` if the configuration `tree` has a secret. It is named by its key, and never shown."""
    known = secret_values(environment)
    for key, value in leaves(tree).items():
        texts = value if isinstance(value, list) else [value]
        for text in texts:
            if isinstance(text, str) and text and _is_secret(key, text, known):
                raise BadInput(
                    "looks like a secret, and everyone who may read the repository would have it",
                    key=key,
                    file=where,
                    fix="Name an environment variable there instead.",
                )


def _is_secret(key: str, text: str, known: list[str]) -> bool:
    section, _, name = key.rpartition(".")
    named = _NAMES.search(name) and section.rpartition(".")[2] not in NAMES_OF_VARIABLES
    return bool(named or _VALUES.search(text)) or any(value in text for value in known)
