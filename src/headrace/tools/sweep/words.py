"""Overrides as words of a command line: what `headrace rl` reads back is the same value, whatever it looks like."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from headrace.config.base import ConfigError


def words(overrides: Mapping[str, Any]) -> list[str]:
    """`--key=value` for each."""
    return [f"--{key}={_toml(key, value)}" for key, value in overrides.items()]


def _toml(key: str, value: Any) -> str:
    """On one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)} = {_toml(key, inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(key, inner) for inner in value) + "]"
    if isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return repr(value)
    raise ConfigError("must be a text, number, boolean, list or table", key=key, value=value)
