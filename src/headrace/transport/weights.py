"""Weights from the trainer to the engine: `weights/v-INCARNATION-STEP/`, a Hugging Face directory plus a marker.

The marker is written last and has a checksum of the tensors, which the engine returns after loading. The orchestrator's
weight watcher acknowledges a version in `acknowledged.json` once every engine has it; older versions may be deleted.
The trainer does not stop for acknowledgements, since the orchestrator bounds how far batches run ahead of them. If they
fail to come, it warns, and after a timeout it raises.
"""

from __future__ import annotations

import fnmatch
import hashlib
import logging
import shutil
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

from headrace.errors import Failure
from headrace.rollout.digest import seal
from headrace.rollout.schema import SCHEMA, decode_versioned
from headrace.rollout.version import Version
from headrace.transport.announcements import announce, list_names
from headrace.transport.digests import write_digests
from headrace.transport.files import MARKER, draft_of, require_regular, write_atomically, write_directory
from headrace.transport.weights_link import MANIFEST

log = logging.getLogger(__name__)

ACKNOWLEDGED = "acknowledged.json"
GATES_FILE = "latent_gates.st"
"""The tensors of `headrace.inference.latents`. Not `*.safetensors`: engines without latents load all files of that
name."""
WEIGHTS = ("*.safetensors", MANIFEST, "adapter_config.json", GATES_FILE)
"""Files that the checksum covers: tensors, or the manifest in their place, the config of an adapter, and gates."""
READER_THREADS = 8
FIRST_WARNING_S = 60.0
"""Time without an acknowledgement until the first warning."""
POLL_INTERVAL_S = 1.0


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
    """Written by the weight watcher once every engine samples from a version."""

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
        """Return the path where a version is written before it is published."""
        return draft_of(self.path(version))

    def publish(self, version: Version, write: Callable[[Path], None], *, durable: bool = False) -> WeightsMarker:
        """Call `write` on a directory, then publish it atomically as `version`; `durable`: fsync it before."""

        def fill(draft: Path) -> None:
            write(draft)
            write_digests(draft)
            marker = WeightsMarker(version.incarnation, version.step, checksum(draft))
            (draft / MARKER).write_bytes(seal(marker))

        # Most versions need not be durable: after a power loss the trainer publishes its checkpoint's version again,
        # and an engine refuses files that do not match the marker's checksum.
        write_directory(self.path(version), fill, durable=durable)
        announce(self.path(version))
        return read_marker(self.path(version))

    def published(self) -> list[Version]:
        """Return complete versions, oldest first."""
        return sorted(
            Version.parse(name.removeprefix("v-"))
            for name in fnmatch.filter(list_names(self.directory), "v-*-*")
            if (self.directory / name / MARKER).exists()
        )

    def latest(self) -> Version | None:
        return max(self.published(), default=None)

    def delete_after(self, step: int) -> None:
        """Delete versions after `step`, which a trainer that starts from `step` publishes again.

        Otherwise engines could sample from them until the trainer is up, and then from its older version.
        """
        for version in self.published():
            if version.step > step:
                self._delete(version)

    def _delete(self, version: Version) -> None:
        (self.path(version) / MARKER).unlink()  # first, so that a partly deleted version is incomplete
        shutil.rmtree(self.path(version))

    def delete_incomplete(self) -> None:
        """Delete incomplete versions left by a trainer that was killed while publishing or deleting."""
        for path in (*self.directory.glob(".v-*"), *self.directory.glob("v-*")):
            if path.name.startswith(".") or not (path / MARKER).exists():
                shutil.rmtree(path)

    def acknowledge(self, version: Version) -> None:
        """Record that every engine samples from `version`. Only the weight watcher calls this."""
        path = self.directory / ACKNOWLEDGED
        write_atomically(path, seal(Acknowledgement(version.incarnation, version.step)))
        announce(path)

    def acknowledged(self) -> Version | None:
        path = self.directory / ACKNOWLEDGED
        if path.name not in list_names(self.directory):
            return None
        acknowledgement = decode_versioned(path.read_bytes(), Acknowledgement, str(path))
        return Version(acknowledgement.incarnation, acknowledgement.step)

    def unacknowledged(self) -> list[Version]:
        """Return complete versions newer than the acknowledged one, oldest first."""
        acknowledged = self.acknowledged()
        return [version for version in self.published() if acknowledged is None or version > acknowledged]

    def of_step(self, step: int) -> Version | None:
        """Return the newest published version of a step."""
        return max((version for version in self.published() if version.step == step), default=None)

    def retire(self, keep_last: int, kept_steps: Collection[int] = ()) -> None:
        """Delete versions older than the acknowledged one, except the newest `keep_last` and those of `kept_steps`."""
        acknowledged = self.acknowledged()
        if acknowledged is None:
            return
        kept = {self.of_step(step) for step in kept_steps}
        for version in self.published()[:-keep_last]:
            if version < acknowledged and version not in kept:
                self._delete(version)


class NotAcknowledged(Failure):
    """Published weights were not acknowledged in time."""


class AcknowledgementMonitor:
    """Warns and raises when published versions are not acknowledged; a timeout of None waits forever."""

    def __init__(
        self, weights: WeightStore, timeout_s: float | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._weights, self._timeout_s, self._clock = weights, timeout_s, clock
        self._last: Version | None = None
        self._since: float | None = None
        self._checked = -POLL_INTERVAL_S
        self._next_warning_s = FIRST_WARNING_S

    def check(self) -> None:
        """Warn at growing intervals, raise at the timeout. Called repeatedly while waiting for something else."""
        now = self._clock()
        if now - self._checked < POLL_INTERVAL_S:
            return
        self._checked = now
        waiting = self._weights.unacknowledged()
        acknowledged = self._weights.acknowledged()
        if not waiting or self._since is None or acknowledged != self._last:
            self._since, self._last, self._next_warning_s = (now if waiting else None), acknowledged, FIRST_WARNING_S
            return
        waited = now - self._since
        fact = f"the orchestrator has not acknowledged weights {waiting[0]} for {waited:.0f} s"
        if self._timeout_s is not None and waited > self._timeout_s:
            raise NotAcknowledged(
                f"{fact}. Check that it is running and that the inference server responds to it. If an evaluation "
                "pinned to one version takes this long, raise trainer.weights.ack_timeout"
            )
        if waited > self._next_warning_s:
            log.warning("%s: it waits for the inference server", fact)
            self._next_warning_s = 2 * waited


def read_marker(directory: Path) -> WeightsMarker:
    """Read the marker of a published directory; raise if it is absent or from a newer version of Headrace."""
    path = directory / MARKER
    if not path.is_file():
        raise FileNotFoundError(f"{directory} has no {MARKER}: it is not a published version, or not complete")
    return decode_versioned(path.read_bytes(), WeightsMarker, str(path))


def checksum(directory: Path) -> str:
    """Return a digest of the names and contents of the weight files, in name order."""

    def file_digest(path: Path) -> bytes:
        with open(require_regular(path), "rb") as file:
            return hashlib.file_digest(file, _new_digest).digest()

    paths = sorted(path for pattern in WEIGHTS for path in directory.glob(pattern))
    digest = _new_digest()
    with ThreadPoolExecutor(READER_THREADS) as readers:
        for path, content in zip(paths, readers.map(file_digest, paths), strict=True):
            digest.update(path.name.encode())
            digest.update(content)
    return digest.hexdigest()


_new_digest = partial(hashlib.blake2b, digest_size=16)
