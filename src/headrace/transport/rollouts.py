"""The names of the files in `rollouts/`: one per training step, and one per evaluated version."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path


class RolloutKind(StrEnum):
    """How a file's name begins; the step, or the version that was evaluated, follows."""

    TRAIN = "step-"
    EVAL = "eval-step-"

    def path(self, directory: Path, step: int) -> Path:
        return directory / f"{self}{step:08d}.parquet"

    def files(self, directory: Path) -> dict[int, Path]:
        """Return those on disk by step, in order."""
        return {int(path.stem.removeprefix(self)): path for path in sorted(directory.glob(f"{self}*.parquet"))}

    def delete_old(self, directory: Path, keep_last: int) -> None:
        """Delete all but those of the newest `keep_last` steps."""
        for path in list(self.files(directory).values())[:-keep_last]:
            path.unlink()
