"""Weights from the trainer to the engine: `weights/v-INCARNATION-STEP/`, a Hugging Face directory plus a marker.

The marker is written last and carries a checksum of the tensors; the engine returns it when it has loaded them. The
watcher's acknowledgement file tells the trainer which versions nobody will ask for again.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from headrace.rollout.batch import SCHEMA, decode_versioned
from headrace.rollout.version import Version
from headrace.transport.files import MARKER, draft_of, write_atomically, write_directory
from headrace.transport.weights_link import MANIFEST

ACKNOWLEDGED = "acknowledged.json"
WEIGHTS = ("*.safetensors", MANIFEST, "adapter_config.json")
"""What makes a version: tensors, the manifest in their place, what an adapter's tensors mean."""
READERS = 8
"""Tensor files that are read at once."""


class WeightsMarker(msgspec.Struct):
    """The completion marker of a published version."""

    incarnation: int
    step: int
    checksum: str
    schema: int = SCHEMA

    @property
    def version(self) -> Version:
        return Version(self.incarnation, self.step)


class Acknowledgement(msgspec.Struct):
    """What the watcher writes once every engine samples from a version."""

    incarnation: int
    step: int
    schema: int = SCHEMA


class WeightStore:
    """The `weights/` directory of a run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, version: Version) -> Path:
        return self.directory / f"v-{version}"

    def draft(self, version: Version) -> Path:
        """Where a version is written before it is published."""
        return draft_of(self.path(version))

    def publish(self, version: Version, write: Callable[[Path], None]) -> WeightsMarker:
        """Let `write` fill a directory with a model, then make it visible as `version`, whole or not at all."""

        def fill(draft: Path) -> None:
            write(draft)
            marker = WeightsMarker(version.incarnation, version.step, checksum(draft))
            (draft / MARKER).write_bytes(msgspec.json.encode(marker))

        # Not durable: after a power loss the trainer publishes its checkpoint's version anew, and an engine refuses
        # files that do not match the marker's checksum.
        write_directory(self.path(version), fill, durable=False)
        return read_marker(self.path(version))

    def published(self) -> list[Version]:
        """Complete versions, oldest first."""
        return sorted(
            Version.parse(path.name.removeprefix("v-"))
            for path in self.directory.glob("v-*-*")
            if (path / MARKER).exists()
        )

    def latest(self) -> Version | None:
        return max(self.published(), default=None)

    def sweep(self) -> None:
        """Remove what a trainer left behind that was killed while publishing or retiring."""
        for path in (*self.directory.glob(".v-*"), *self.directory.glob("v-*")):
            if path.name.startswith(".") or not (path / MARKER).exists():
                shutil.rmtree(path)

    def acknowledge(self, version: Version) -> None:
        """Record that every engine samples from `version`: called by the watcher alone."""
        content = msgspec.json.encode(Acknowledgement(version.incarnation, version.step))
        write_atomically(self.directory / ACKNOWLEDGED, content)

    def acknowledged(self) -> Version | None:
        path = self.directory / ACKNOWLEDGED
        if not path.exists():
            return None
        found = decode_versioned(path.read_bytes(), Acknowledgement, str(path))
        return Version(found.incarnation, found.step)

    def unacknowledged(self) -> list[Version]:
        """Complete versions, oldest first, that are newer than what the engines are known to sample from."""
        acknowledged = self.acknowledged()
        return [version for version in self.published() if acknowledged is None or version > acknowledged]

    def retire(self, keep_last: int) -> None:
        """Delete versions that every engine has moved past, keeping the newest few."""
        acknowledged = self.acknowledged()
        if acknowledged is None:
            return
        for version in self.published()[:-keep_last]:
            if version < acknowledged:
                (self.path(version) / MARKER).unlink()  # first, so that a half-deleted one is not taken for complete
                shutil.rmtree(self.path(version))


def read_marker(directory: Path) -> WeightsMarker:
    """The marker of a published directory; a clear error where it is absent or from a newer version."""
    path = directory / MARKER
    if not path.exists():
        raise FileNotFoundError(f"{directory} has no {MARKER}: it is not a published version, or not complete")
    return decode_versioned(path.read_bytes(), WeightsMarker, str(path))


def checksum(directory: Path) -> str:
    """A digest of the files that make the weights, in name order; several are read at once."""
    paths = sorted(path for pattern in WEIGHTS for path in directory.glob(pattern))
    digest = _new_digest()
    with ThreadPoolExecutor(READERS) as readers:
        for path, content in zip(paths, readers.map(_file_digest, paths), strict=True):
            digest.update(path.name.encode())
            digest.update(content)
    return digest.hexdigest()


def _file_digest(path: Path) -> bytes:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, _new_digest).digest()


def _new_digest() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=16)
