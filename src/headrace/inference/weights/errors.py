"""Errors of weight updates, and the check of a published directory's marker; without torch."""

from __future__ import annotations

from pathlib import Path

from headrace.errors import Failure
from headrace.rollout.schema import SchemaError
from headrace.rollout.version import Version
from headrace.transport.weights import WeightsMarker, read_marker

MAX_NAMES = 3
"""Tensors that an error message names."""


class WeightsError(Failure):
    """A published directory cannot become the engine's weights; the model is unchanged."""


class WeightsUnreachable(WeightsError):
    """A version did not arrive: its trainer is gone, silent or has a newer one, or the bytes are damaged.

    The model is unchanged, and a retry may succeed.
    """


def abbreviate(names: list[str]) -> str:
    """Return the first few names, and how many more there are."""
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def read_checked_marker(directory: Path, version: Version) -> WeightsMarker:
    """Read the marker of a published directory; raises `WeightsError` unless it is complete and of this version."""
    try:
        marker = read_marker(directory)
    except (OSError, SchemaError) as error:
        raise WeightsError(str(error)) from error
    if marker.version != version:
        raise WeightsError(f"{directory} has version {marker.version}, but version {version} was requested")
    return marker
