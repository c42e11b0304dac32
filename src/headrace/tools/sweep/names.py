"""What points and folders are called: short, readable, never two alike, and fit for every file system."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from headrace.tools.names import short_names

BASE = "base"
"""A point that sets nothing."""
LONGEST_LABEL = 60
LONGEST = 100
"""Characters of a folder's name."""
RESERVED = frozenset({"eval", "logs"})
"""Folders of the sweep itself."""


def labels(points: Sequence[Mapping[str, Any]], names: Sequence[str | None]) -> list[str]:
    """`lr=0.001,batch_size=64`, keys by as few of their last parts as tell them apart; or the name that was given.

    Two that would read alike, as 1 and "1" do, are told apart by a few digits, and so is one that is cut.
    """
    keys = list(dict.fromkeys(key for point in points for key in point))
    shorter = [name.replace("/", ".") for name in short_names([key.replace(".", "/") for key in keys])]
    short = dict(zip(keys, shorter, strict=True))
    told = [
        name or ",".join(f"{short[key]}={_short(value)}" for key, value in point.items()) or BASE
        for point, name in zip(points, names, strict=True)
    ]
    return [
        label if len(label) <= LONGEST_LABEL and told.count(label) == 1 else f"{label[:51]}-{_digest(point)}"
        for label, point in zip(told, points, strict=True)
    ]


def folder_name(label: str, taken: Collection[str]) -> str:
    """A folder for what is called so, unlike those that are taken, on file systems that ignore case, too."""
    safe = re.sub(r"[^A-Za-z0-9._=,+-]+", "-", label).strip("-.") or BASE
    occupied = {name.lower() for name in (*taken, *RESERVED)}
    if len(safe) <= LONGEST and safe.lower() not in occupied:
        return safe
    return f"{safe[: LONGEST - 9]}-{_digest(label)}"


def shown(value: Any) -> str:
    """A value as one would type it."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), default=str)


def _short(value: Any) -> str:
    """A list without its brackets, which are awkward in a folder's name."""
    return "+".join(map(shown, value)) if isinstance(value, list) else shown(value)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:8]
