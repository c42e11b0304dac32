"""Messages to tokens and back, without torch or transformers."""

from __future__ import annotations

import sys
from types import ModuleType


def import_renderers() -> None:
    """Import the library `renderers` without `openai`, which takes 1.2 of the 2.7 seconds of a dry run.

    It imports `openai.AsyncOpenAI` for two annotations that are never evaluated, so a placeholder module replaces
    `openai` during the import. Later imports of `openai` get the real module. `httpx` comes without its command line,
    as if click and rich were not installed.
    """
    if "openai" in sys.modules or "renderers" in sys.modules:
        return
    placeholder = ModuleType("openai")
    placeholder.AsyncOpenAI = object  # type: ignore[attr-defined]
    replaced: dict[str, ModuleType | None] = {"openai": placeholder}
    if "httpx" not in sys.modules:
        replaced["httpx._main"] = None  # makes its import fail
    sys.modules.update(replaced)  # type: ignore[arg-type]
    try:
        import renderers  # noqa: F401
    finally:
        for name in replaced:
            del sys.modules[name]
