"""Batches from the orchestrator to the trainer: one file per step; its appearance is the announcement."""

from __future__ import annotations

from pathlib import Path

from headrace.rollout.batch import Batch, encode_batch, read_batch
from headrace.transport.files import write_atomically


class BatchStore:
    """The `batches/` directory of a run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}.safetensors"

    def write(self, batch: Batch) -> Path:
        """Make the batch durable and visible to the trainer."""
        path = self.path(batch.step)
        write_atomically(path, encode_batch(batch))
        return path

    def exists(self, step: int) -> bool:
        return self.path(step).exists()

    def read(self, step: int) -> Batch:
        batch = read_batch(str(self.path(step)))
        if batch.step != step:
            raise ValueError(f"{self.path(step)} holds the batch of step {batch.step}")
        return batch

    def steps(self) -> list[int]:
        """The steps that are on disk, in order."""
        return sorted(int(path.stem.removeprefix("step-")) for path in self.directory.glob("step-*.safetensors"))

    def delete_through(self, step: int) -> None:
        """Remove batches that a complete checkpoint of `step` has made unnecessary."""
        for covered in self.steps():
            if covered <= step:
                self.path(covered).unlink(missing_ok=True)

    def delete_after(self, step: int) -> None:
        """Remove batches of steps that a resume from `step` will make again."""
        for later in self.steps():
            if later > step:
                self.path(later).unlink(missing_ok=True)
