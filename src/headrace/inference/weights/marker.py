"""The marker of a published directory, as an engine must find it. No torch: a server that has none reads it, too."""

from __future__ import annotations

from pathlib import Path

from headrace.inference.weights.errors import WeightsError
from headrace.rollout.batch import SchemaError
from headrace.rollout.version import Version
from headrace.transport.weights import WeightsMarker, read_marker


def marker_of(directory: Path, version: Version) -> WeightsMarker:
    """Of a directory that must be complete, and of this version. Raises `WeightsError`."""
    try:
        marker = read_marker(directory)
    except (OSError, SchemaError) as error:
        raise WeightsError(str(error)) from error
    if marker.version != version:
        raise WeightsError(f"{directory} holds version {marker.version}, but {version} was asked for")
    return marker
