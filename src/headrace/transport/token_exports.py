"""The tokens of chosen steps, for `headrace tokens`: one directory of Parquet files per step.

What the columns mean is said by the files themselves; `trainer/token_table.py` writes them.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from headrace.rollout.batch import SCHEMA, decode_versioned

HEADER_KEY = "headrace"
"""Where a file's metadata has the header."""


class ExportHeader(msgspec.Struct):
    """What is true of the whole step."""

    step: int
    incarnation: int
    """Of the batch."""
    counts: dict[str, int]
    """Member tokens of each component, by which its loss is divided."""
    gradient_sum: float | None
    """The sum of |dL/dt| over all tokens; null if it is no finite number."""
    sequences: int | None = None
    """Sequences of the step, where only those with the largest gradients were exported; null: all were."""
    schema: int = SCHEMA


def read_header(metadata: dict[bytes, bytes], what: str) -> ExportHeader:
    return decode_versioned(metadata[HEADER_KEY.encode()], ExportHeader, what)


class TokenExports:
    """The `tokens/` directory of a run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """The steps that are on disk, in order."""
        return sorted(int(path.name.removeprefix("step-")) for path in self.directory.glob("step-*"))
