"""Environments of other libraries behind our interface: one module per library.

`id = "LIBRARY:NAME"` in a run file names one (`registry.ADAPTERS` lists the libraries). Each library is an optional
dependency, imported by its adapter only, when an environment of it is loaded.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from headrace.errors import BadInput


def import_library(module: str, extra: str) -> ModuleType:
    """Import a module of an optional library; raise `BadInput` with the `extra` to install if it is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:  # a dependency of the library is missing
            raise
        fact = f"the library {error.name} is not installed"
        raise BadInput(fact, fix=f"Run pip install 'headrace[{extra}]'.") from error


def import_verifiers(module: str = "") -> ModuleType:
    """Import `verifiers.v1`, or a module of it. The library is untyped, so its objects are `Any` in the adapter."""
    return import_library(f"verifiers.v1.{module}" if module else "verifiers.v1", "verifiers")
