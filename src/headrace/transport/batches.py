"""Files in the batch format: batches from the orchestrator to the trainer, one per step, and probes.

A batch is prepared (durable, hidden), then recorded in the journal, then announced (renamed). So journal and files
agree after `recover`, whenever a process was killed. `adopt` comes before the journal is read: it takes the prepared
batches from an orchestrator that was only paused, so that it cannot announce what the journal does not have.
"""

from __future__ import annotations

import fnmatch
import os
from contextlib import suppress
from pathlib import Path

from headrace.rollout.batch import Batch, BatchSample, encode_batch, read_batch
from headrace.rollout.digest import digest_of
from headrace.rollout.schema import DamagedFile, SchemaError
from headrace.rollout.types import Sample
from headrace.rollout.version import Version
from headrace.transport.announcements import announce, list_names
from headrace.transport.files import STEP, check_regular, sync, write_atomically
from headrace.transport.journal_entries import FileRecord

TRAINER_LOGPROBS, REPLAYED_LOGPROBS = "trainer_logprobs", "replayed_logprobs"
"""Streams of a probe's samples: the trainer's logprobs with the weights of the probe's version, the second with the
experts that the engine chose."""
KEEP_LAST_PROBES = 4
"""Probes that stay on disk: the engine has one of the newest versions or loads it next."""


class BatchStore:
    """The `batches/` directory of a run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}.safetensors"

    def _prepared_path(self, step: int) -> Path:
        return self.directory / f".step-{step:08d}.prepared"

    def prepare(self, batch: Batch) -> FileRecord:
        """Write the batch durably under a hidden name; return the record for the journal's commit."""
        content = encode_batch(batch)
        write_atomically(self._prepared_path(batch.step), content)
        path = self.path(batch.step)
        return FileRecord(f"{path.parent.name}/{path.name}", len(content), digest_of(content))

    def announce(self, step: int, prepared: Path | None = None) -> Path:
        """Rename a prepared batch, so that the trainer sees it; `prepared`: its path, if it was adopted."""
        path = self.path(step)
        os.replace(prepared or self._prepared_path(step), path)
        sync(self.directory)
        announce(path)
        return path

    def adopt(self, epoch: int) -> None:
        """Rename prepared batches of older epochs: no process of those can announce them any more."""
        for step, path in self._prepared().items():
            with suppress(FileNotFoundError):  # it has just been announced
                os.replace(path, self.directory / f".{epoch}.step-{step:08d}.prepared")

    def recover(self, committed_through: int) -> None:
        """After a crash: announce prepared batches that the journal has, delete those that it does not have."""
        for unfinished in self.directory.glob("..step-*.tmp"):
            unfinished.unlink()
        for step, path in self._prepared().items():
            if step <= committed_through:
                self.announce(step, path)
            else:
                path.unlink()

    def _prepared(self) -> dict[int, Path]:
        paths = self.directory.glob(f".*{STEP}.prepared")
        return {int(path.stem.rpartition("step-")[2]): path for path in paths}

    def exists(self, step: int) -> bool:
        return self.path(step).name in list_names(self.directory)

    def is_committed(self, step: int) -> bool:
        """Return whether the batch of a committed step exists, announced or prepared; it may be renamed meanwhile."""
        return self.exists(step) or step in self._prepared() or self.exists(step)

    def read(self, step: int) -> Batch:
        """Read a batch; raises `DamagedFile` if it is not the one that was written for this step."""
        path = self.path(step)
        check_regular(path)
        batch = read_batch(path)
        if batch.step != step:
            raise DamagedFile(f"contains the batch of step {batch.step}", file=path)
        return batch

    def set_aside(self, step: int) -> Path:
        """Rename a damaged batch, so that it counts as missing; return the new path."""
        kept = self.path(step).with_name(f"damaged-{self.path(step).name}")
        os.replace(self.path(step), kept)
        sync(self.directory)
        return kept

    def steps(self) -> list[int]:
        """Return the steps on disk, in order."""
        files = fnmatch.filter(list_names(self.directory), f"{STEP}.safetensors")
        return sorted(int(name.removeprefix("step-").partition(".")[0]) for name in files)

    def delete_through(self, step: int) -> None:
        """Delete batches that a complete checkpoint of `step` covers."""
        for covered in self.steps():
            if covered <= step:
                self.path(covered).unlink(missing_ok=True)

    def delete_after(self, step: int) -> None:
        """Delete batches that will be collected again."""
        for later in self.steps():
            if later > step:
                self.path(later).unlink(missing_ok=True)


class ProbeStore:
    """The `probes/` directory of a run: a few sequences of each step with the trainer's logprobs, to measure drift.

    A probe is a batch whose samples have the trainer's logprobs as a stream, and for models with experts those with
    replayed experts as a second one; the mask marks the tokens that have a logprob. It is written before the weights of
    its version are published, so that it exists when an engine has loaded them.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, version: Version) -> Path:
        return self.directory / f"v-{version}.safetensors"

    def write(self, version: Version, samples: list[BatchSample]) -> None:
        """Write a version's probe atomically and delete old ones. Only one process may call this."""
        for unfinished in self.directory.glob(".v-*.tmp"):  # left by a killed process
            unfinished.unlink()
        write_atomically(self.path(version), encode_batch(Batch(version.step, version.incarnation, samples)))
        for old in self.versions()[:-KEEP_LAST_PROBES]:
            self.path(old).unlink(missing_ok=True)

    def read(self, version: Version) -> list[Sample]:
        """Return the samples of a version's probe; empty if there is no probe."""
        path = self.path(version)
        if not path.exists():
            return []
        check_regular(path)
        batch = read_batch(path)
        if Version(batch.incarnation, batch.step) != version:
            raise SchemaError(f"{path} contains the probe of version {batch.incarnation}-{batch.step}")
        samples = [entry.sample for entry in batch.samples]
        if any(TRAINER_LOGPROBS not in sample.streams for sample in samples):
            raise SchemaError(f"{path} is not a probe: it has no {TRAINER_LOGPROBS}")
        return samples

    def versions(self) -> list[Version]:
        """Return the versions that have a probe on disk, oldest first."""
        return sorted(Version.parse(path.stem.removeprefix("v-")) for path in self.directory.glob("v-*.safetensors"))
