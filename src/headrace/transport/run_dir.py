"""Paths of a run directory, and its rollout files and token tables by step."""

from __future__ import annotations

from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headrace.rollout.schema import SCHEMA, decode_versioned
from headrace.transport.files import DIGITS, MARKER, STEP
from headrace.transport.journal_files import newest_journal
from headrace.transport.weights import WeightStore

if TYPE_CHECKING:
    from headrace.transport.batches import BatchStore, ProbeStore


HEADER_KEY = "headrace"
"""The key of the header in the metadata of a token table."""


class RunDir:
    """The paths of one run: no other module builds them. The package docstring describes each."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.toml"
        self.code_folders = root / "code_folders.json"
        self.platform = root / "platform.json"
        self.logs = root / "logs"
        self.status = root / "status"
        self.metrics = root / "metrics.jsonl"
        self.routers = root / "routers.jsonl"
        self.heartbeat = root / "heartbeat.json"
        self.rollouts = root / "rollouts"
        self.checkpoints = root / "checkpoints"
        self.endpoints = root / "endpoints"
        self.prometheus_targets = root / "prometheus" / "targets"
        self.grafana_dashboard = root / "prometheus" / "dashboard.json"
        self.driver = root / "driver.json"
        self.device_lock = root / "turns"
        self.summary = root / "summary.md"
        self.plot = root / "reward.svg"
        self.reference = root / "reference"
        self.final_model = root / "model"
        self.final_adapter = root / "adapter"
        self.weights = WeightStore(root / "weights")
        self.tokens = TokenExports(root / "tokens")

    @cached_property
    def batches(self) -> BatchStore:
        from headrace.transport.batches import BatchStore  # with numpy, which takes longer than all other imports

        return BatchStore(self.root / "batches")

    @cached_property
    def probes(self) -> ProbeStore:
        from headrace.transport.batches import ProbeStore

        return ProbeStore(self.root / "probes")

    def create_directories(self) -> None:
        """Create the directories in which processes wait for each other, before one of them looks for one.

        A host may remember for half a minute that a directory did not exist.
        """
        exchanged = (self.batches.directory, self.weights.directory, self.endpoints, self.checkpoints, self.rollouts)
        for directory in exchanged:
            directory.mkdir(parents=True, exist_ok=True)

    @property
    def journal(self) -> Path:
        """The newest journal, which need not exist."""
        return newest_journal(self.root)

    def latest_checkpoint_step(self) -> int:
        """Return the step of the newest complete checkpoint; 0 if there is none."""
        complete = self.checkpoints.glob(f"{STEP}/{MARKER}")
        return max((int(marker.parent.name.removeprefix("step-")) for marker in complete), default=0)

    def newest_step(self) -> int:
        """Return the newest step of which there is a batch or a checkpoint, both of which follow a commit."""
        return max([self.latest_checkpoint_step(), *self.batches.steps()])


class RolloutKind(StrEnum):
    """Prefix of the file names in `rollouts/`; the step, or the evaluated version, follows."""

    TRAIN = "step-"
    EVAL = "eval-step-"

    def path(self, directory: Path, step: int) -> Path:
        return directory / f"{self}{step:08d}.parquet"

    def files(self, directory: Path) -> dict[int, Path]:
        """Return the files on disk by step, in order."""
        return {int(path.stem.removeprefix(self)): path for path in sorted(directory.glob(f"{self}{DIGITS}.parquet"))}

    def old_files(self, directory: Path, keep_last: int) -> list[Path]:
        """Return all but the files of the newest `keep_last` steps."""
        return list(self.files(directory).values())[:-keep_last]


class TokenExports:
    """The `tokens/` directory of a run: token tables of selected steps, one directory of Parquet files per step.

    `trainer/token_table.py` writes them; the files contain descriptions of their columns.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Return the steps on disk, in order."""
        return sorted(int(path.name.removeprefix("step-")) for path in self.directory.glob(STEP))


class ExportHeader(msgspec.Struct):
    """The header of a token table: values of the whole step."""

    step: int
    incarnation: int
    """Incarnation of the batch."""
    counts: dict[str, int]
    """Member tokens of each loss component, by which its loss is divided."""
    gradient_sum: float | None
    """The sum of |dL/dt| over all tokens; null if it is not finite."""
    sequences: int | None = None
    """Number of sequences of the step if only those with the largest gradients were exported; null if all were."""
    schema: int = SCHEMA


def read_header(metadata: dict[bytes, bytes], source: str) -> ExportHeader:
    return decode_versioned(metadata[HEADER_KEY.encode()], ExportHeader, source)
