"""A tree of settings as one table: each value under its dotted key, `train.env.0.id`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    """A list is a value, unless it has tables in it: then its places are keys."""
    if isinstance(tree, Mapping):
        items = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, list) and any(isinstance(value, Mapping) for value in tree):
        items = [(str(index), value) for index, value in enumerate(tree)]
    else:
        return {prefix: tree}
    return {
        path: leaf for key, value in items for path, leaf in leaves(value, f"{prefix}.{key}" if prefix else key).items()
    }
