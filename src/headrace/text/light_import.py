"""The `renderers` library without `openai`, whose import takes longer than everything else before a run starts.

Every module of `renderers` imports the package, whose `client` imports `openai.AsyncOpenAI` for two annotations: 1.2 of
2.7 seconds of a dry run. Rendering cannot do without the package, since prompts are measured as the model gets them,
and a lazy import of `openai` would be resolved at once by that `from` import. So a stand-in takes its place until
`renderers` has been imported. `renderers.client`, which Headrace does not use, keeps working: it never evaluates the
annotations.
"""

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
