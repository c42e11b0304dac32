"""Where Headrace keeps what it makes once and uses again."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "HEADRACE_CACHE"
"""The variable that holds the cache directory; in a run, its storage root."""


def cache_directory() -> Path:
    """Return `$HEADRACE_CACHE`, else the user's cache directory."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "headrace"
