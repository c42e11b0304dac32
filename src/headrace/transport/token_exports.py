"""Token tables of selected steps for `headrace tokens`: one directory of Parquet files per step.

`trainer/token_table.py` writes them; the files contain descriptions of their columns.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from headrace.rollout.schema import SCHEMA, decode_versioned
from headrace.transport.files import STEP

HEADER_KEY = "headrace"
"""The key of the header in a file's metadata."""


class ExportHeader(msgspec.Struct):
    """Values of the whole step."""

    step: int
    incarnation: int
    """Of the batch."""
    counts: dict[str, int]
    """Member tokens of each loss component, by which its loss is divided."""
    gradient_sum: float | None
    """The sum of |dL/dt| over all tokens; null if it is not finite."""
    sequences: int | None = None
    """Number of sequences of the step if only those with the largest gradients were exported; null if all were."""
    schema: int = SCHEMA


def read_header(metadata: dict[bytes, bytes], source: str) -> ExportHeader:
    return decode_versioned(metadata[HEADER_KEY.encode()], ExportHeader, source)


class TokenExports:
    """The `tokens/` directory of a run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Return the steps on disk, in order."""
        return sorted(int(path.name.removeprefix("step-")) for path in self.directory.glob(STEP))
