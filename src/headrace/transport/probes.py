"""A few sequences of each step and the trainer's logprobs of them, for the engine's opinion: `probes/v-INC-STEP`.

A probe is in the form of a batch whose samples have one stream, and a mask that says which tokens it is known of. It is
written before the weights of its version are published: whoever loads those finds it.
"""

from __future__ import annotations

from pathlib import Path

from headrace.rollout.batch import Batch, BatchSample, SchemaError, encode_batch, read_batch
from headrace.rollout.types import Sample
from headrace.rollout.version import Version
from headrace.transport.files import write_atomically

TRAINER_LOGPROBS = "trainer_logprobs"
"""The stream that a probe's samples have: what the trainer finds with the weights of the probe's version."""
KEPT = 4
"""Probes on disk. The engine is at one of the newest versions, or goes there next."""


class ProbeStore:
    """The `probes/` directory of a run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, version: Version) -> Path:
        return self.directory / f"v-{version}.safetensors"

    def write(self, version: Version, samples: list[BatchSample]) -> None:
        """Leave a version's probe, whole or not at all, and delete the oldest. Called by one process alone."""
        for unfinished in self.directory.glob(".v-*.tmp"):  # of one that was killed while it wrote
            unfinished.unlink()
        write_atomically(self.path(version), encode_batch(Batch(version.step, version.incarnation, samples)))
        for old in self.versions()[:-KEPT]:
            self.path(old).unlink(missing_ok=True)

    def read(self, version: Version) -> list[Sample]:
        """The samples of a version's probe; none if there is no probe."""
        path = self.path(version)
        if not path.exists():
            return []
        batch = read_batch(str(path))
        if Version(batch.incarnation, batch.step) != version:
            raise SchemaError(f"{path} holds a probe of version {batch.incarnation}-{batch.step}")
        samples = [entry.sample for entry in batch.samples]
        if any(TRAINER_LOGPROBS not in sample.streams for sample in samples):
            raise SchemaError(f"{path} is not a probe: it has no {TRAINER_LOGPROBS}")
        return samples

    def versions(self) -> list[Version]:
        """Those with a probe on disk, oldest first."""
        return sorted(Version.parse(path.stem.removeprefix("v-")) for path in self.directory.glob("v-*.safetensors"))
