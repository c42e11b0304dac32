"""Import and set-up of the verifiers library."""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

from headrace.environments.adapters import library


def verifiers(module: str = "") -> ModuleType:
    """Import `verifiers.v1`, or a module of it."""
    return library(f"verifiers.v1.{module}" if module else "verifiers.v1", "verifiers")


def prepare() -> None:
    """Prepare the library for many episodes on one event loop."""
    verifiers("utils.version").verifiers_commit()  # runs git once, before the first episodes
    logging.getLogger("verifiers").setLevel(logging.WARNING)  # it logs every episode
    for field in verifiers("graph").MessageNode.model_fields.values():
        if field.default_factory is list:  # pydantic inspects its signature for every message: half of the cost
            field.default_factory = _empty_list


def _empty_list() -> list[Any]:
    return []
