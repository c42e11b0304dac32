"""Batches from the orchestrator to the trainer: one file per step.

A batch is prepared (durable, hidden), then recorded in the journal, then announced (renamed). So journal and files
agree after `recover`, whenever a process was killed.
"""

from __future__ import annotations

import os
from pathlib import Path

from headrace.rollout.batch import Batch, encode_batch, read_batch
from headrace.transport.files import sync, write_atomically


class BatchStore:
    """The `batches/` directory of a run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}.safetensors"

    def _prepared_path(self, step: int) -> Path:
        return self.directory / f".step-{step:08d}.prepared"

    def prepare(self, batch: Batch) -> None:
        """Write the batch durably under a hidden name, before the journal records it."""
        write_atomically(self._prepared_path(batch.step), encode_batch(batch))

    def announce(self, step: int) -> Path:
        """Make a prepared batch visible to the trainer."""
        os.replace(self._prepared_path(step), self.path(step))
        sync(self.directory)
        return self.path(step)

    def recover(self, committed_through: int) -> None:
        """After a crash: announce prepared batches that the journal has, delete those that it does not have."""
        for unfinished in self.directory.glob("..step-*.tmp"):
            unfinished.unlink()
        for path in self.directory.glob(".step-*.prepared"):
            step = int(path.stem.removeprefix(".step-"))
            if step <= committed_through:
                self.announce(step)
            else:
                path.unlink()

    def exists(self, step: int) -> bool:
        return self.path(step).exists()

    def read(self, step: int) -> Batch:
        batch = read_batch(str(self.path(step)))
        if batch.step != step:
            raise ValueError(f"{self.path(step)} contains the batch of step {batch.step}")
        return batch

    def steps(self) -> list[int]:
        """Return the steps on disk, in order."""
        return sorted(int(path.stem.removeprefix("step-")) for path in self.directory.glob("step-*.safetensors"))

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
