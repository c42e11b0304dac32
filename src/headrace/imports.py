"""A user's own code by import path: `package.module:name`."""

from __future__ import annotations

import importlib
from typing import Any

from headrace.errors import BadInput


def load(path: str, what: str) -> Any:
    """The object that `path` names; `what` it is supposed to be is for the message."""
    module, separator, name = path.partition(":")
    if not (module and separator and name):
        raise BadInput(f"{what} {path!r} is not an import path: write package.module:Name")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise BadInput(f"{what} {path!r} cannot be imported: {error}") from error
