"""The library itself, when it is needed."""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

from headrace.environments.adapters import library


def verifiers(module: str = "") -> ModuleType:
    """`verifiers.v1`, or a module of it; one line that says what to install if it is not there."""
    return library(f"verifiers.v1.{module}" if module else "verifiers.v1", "verifiers")


def prepare() -> None:
    """Have it ready for many episodes on one event loop."""
    verifiers("utils.version").verifiers_commit()  # asks git, once: not in the middle of the first episodes
    logging.getLogger("verifiers").setLevel(logging.WARNING)  # else it tells of every episode
    for field in verifiers("graph").MessageNode.model_fields.values():
        if field.default_factory is list:  # whose signature pydantic reads anew for every message: half of all costs
            field.default_factory = _nothing


def _nothing() -> list[Any]:
    return []
