"""Python's collections of garbage, kept short in processes that answer others."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def settled() -> Iterator[None]:
    """In this block nobody looks for garbage in what exists by now.

    To be entered once everything is loaded. What torch and transformers consist of takes a third of a second or more to
    look through, and all that a process does stands still meanwhile, about every thousand requests.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
