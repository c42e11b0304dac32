"""Directories that are either whole or absent, whatever is killed when."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from headrace.transport.files import sync_directory


def write_directory(final: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write into a hidden directory beside, make it durable, then put it in the place of `final`."""
    final.parent.mkdir(parents=True, exist_ok=True)
    draft = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    fill(draft)
    for path in draft.rglob("*"):
        _sync(path)
    sync_directory(draft)
    discarded = draft.with_suffix(".old")
    shutil.rmtree(discarded, ignore_errors=True)
    if final.exists():
        os.replace(final, discarded)
    os.replace(draft, final)
    sync_directory(final.parent)
    shutil.rmtree(discarded, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
