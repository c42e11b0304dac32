"""Where Headrace keeps what it makes once and uses again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """`$HEADRACE_CACHE`, else the user's cache directory."""
    if chosen := os.environ.get("HEADRACE_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "headrace"
