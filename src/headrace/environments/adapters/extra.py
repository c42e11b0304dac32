"""A library that is installed on demand."""

from __future__ import annotations

import importlib
from types import ModuleType

from headrace.errors import BadInput


def library(module: str, extra: str) -> ModuleType:
    """The module, or one line that says what to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:  # it is there, and something that it needs is not
            raise
        fact = f"the library {error.name} is not installed"
        raise BadInput(fact, fix=f"Run pip install 'headrace[{extra}]'.") from error
