"""Short names for long paths, in tables and charts."""

from __future__ import annotations

from collections.abc import Sequence


def short_names(paths: Sequence[str]) -> list[str]:
    """Return the last parts of each path, as few as distinguish all of them."""
    parts = [path.split("/") for path in paths]
    for depth in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(each[-depth:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return list(paths)
