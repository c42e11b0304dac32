"""The `renderers` library without `openai`, which it imports for an annotation and which takes longer than all else."""

from __future__ import annotations

import sys
from types import ModuleType


def import_renderers() -> None:
    """Import `renderers`, unless it is there. Whatever imports `openai` later gets the real one."""
    if "openai" in sys.modules or "renderers" in sys.modules:
        return
    stand_in = ModuleType("openai")
    stand_in.AsyncOpenAI = object  # type: ignore[attr-defined]
    sys.modules["openai"] = stand_in
    try:
        import renderers  # noqa: F401
    finally:
        del sys.modules["openai"]
