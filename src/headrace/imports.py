"""Loading of a user's own code by import path, `package.module:name`."""

from __future__ import annotations

import importlib
from typing import Any

from headrace.errors import BadInput


def load(path: str, key: str | None) -> Any:
    """Return the object at `path`; errors name the run file's `key` that was set to it, if there is one."""
    module, separator, name = path.partition(":")
    if not (module and separator and name):
        raise BadInput("not an import path", key=key, value=path, fix="Write package.module:Name.")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise BadInput(f"cannot be imported: {error}", key=key, value=path) from error
