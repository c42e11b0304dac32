"""Import of the `renderers` library without `openai`, which takes 1.2 of the 2.7 seconds of a dry run.

The package imports `openai.AsyncOpenAI` for two annotations in `renderers.client`. A lazy import of `openai` would be
resolved at once by that `from` import, so a placeholder module replaces it until `renderers` has been imported.
`renderers.client`, which Headrace does not use, keeps working: it never evaluates the annotations.
"""

from __future__ import annotations

import sys
from types import ModuleType


def import_renderers() -> None:
    """Import `renderers` unless it is already imported. Later imports of `openai` get the real module."""
    if "openai" in sys.modules or "renderers" in sys.modules:
        return
    placeholder = ModuleType("openai")
    placeholder.AsyncOpenAI = object  # type: ignore[attr-defined]
    sys.modules["openai"] = placeholder
    try:
        import renderers  # noqa: F401
    finally:
        del sys.modules["openai"]
