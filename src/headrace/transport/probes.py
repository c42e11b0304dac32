"""Probes: a few sequences of each step with the trainer's logprobs, to compare with the engine's: `probes/v-INC-STEP`.

A probe has the format of a batch whose samples have one stream; the mask marks the tokens that have a logprob. It is
written before the weights of its version are published, so that it exists when an engine has loaded them.
"""

from __future__ import annotations

from pathlib import Path

from headrace.rollout.batch import Batch, BatchSample, SchemaError, encode_batch, read_batch
from headrace.rollout.types import Sample
from headrace.rollout.version import Version
from headrace.transport.files import write_atomically

TRAINER_LOGPROBS = "trainer_logprobs"
"""The stream of a probe's samples: logprobs by the trainer with the weights of the probe's version."""
KEEP_LAST = 4
"""Probes on disk: the engine has one of the newest versions or loads it next."""


class ProbeStore:
    """The `probes/` directory of a run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, version: Version) -> Path:
        return self.directory / f"v-{version}.safetensors"

    def write(self, version: Version, samples: list[BatchSample]) -> None:
        """Write a version's probe atomically and delete old ones. Only one process may call this."""
        for unfinished in self.directory.glob(".v-*.tmp"):  # left by a killed process
            unfinished.unlink()
        write_atomically(self.path(version), encode_batch(Batch(version.step, version.incarnation, samples)))
        for old in self.versions()[:-KEEP_LAST]:
            self.path(old).unlink(missing_ok=True)

    def read(self, version: Version) -> list[Sample]:
        """Return the samples of a version's probe; empty if there is no probe."""
        path = self.path(version)
        if not path.exists():
            return []
        batch = read_batch(str(path))
        if Version(batch.incarnation, batch.step) != version:
            raise SchemaError(f"{path} contains the probe of version {batch.incarnation}-{batch.step}")
        samples = [entry.sample for entry in batch.samples]
        if any(TRAINER_LOGPROBS not in sample.streams for sample in samples):
            raise SchemaError(f"{path} is not a probe: it has no {TRAINER_LOGPROBS}")
        return samples

    def versions(self) -> list[Version]:
        """Return the versions that have a probe on disk, oldest first."""
        return sorted(Version.parse(path.stem.removeprefix("v-")) for path in self.directory.glob("v-*.safetensors"))
