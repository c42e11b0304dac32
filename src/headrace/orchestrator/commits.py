"""Files and journal of a run, written in an order in which a kill at any time is harmless.

The batch (hidden) and the rollouts of a commit are written first, then the journal records the outcomes and the files
in one transaction, then the batch is announced and old files are deleted. What a killed process had written without its
commit is deleted at the next start, and the draws are sampled again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from headrace.rollout.batch import Batch
from headrace.rollout.types import Rollout
from headrace.transport.files import discard
from headrace.transport.journal import Journal
from headrace.transport.journal_entries import Entries, FileRecord
from headrace.transport.rollout_files import dropped_files, write_dropped, write_rollouts
from headrace.transport.run_dir import RolloutKind, RunDir


class PreparedStep(msgspec.Struct):
    """The files of a step before its commit."""

    step: int
    files: list[FileRecord]
    outdated: list[Path]
    """Files that are deleted after the commit: those of dropped rollouts, which the step's file has taken over, and
    those of old steps."""


class Commits:
    """Writes the commits of a run; used from one thread at a time."""

    def __init__(self, run: RunDir, journal: Journal, keep_rollouts: int) -> None:
        self._run, self._journal, self._keep_rollouts = run, journal, keep_rollouts

    def prepare(self, batch: Batch, kept: Sequence[Rollout], dropped: Sequence[tuple[Rollout, str]]) -> PreparedStep:
        """Write the files of a step, before its commit."""
        directory = self._run.rollouts
        record = self._run.batches.prepare(batch)
        path, parts = write_rollouts(directory, batch.step, kept, dropped)
        old = RolloutKind.TRAIN.old_files(directory, self._keep_rollouts)
        return PreparedStep(batch.step, [record, FileRecord.of(self._run.root, path)], [*parts, *old])

    def ship(self, prepared: PreparedStep, entries: Entries) -> None:
        """Commit a prepared step and announce its batch."""
        deleted = [self._name(path) for path in prepared.outdated]
        self._journal.commit(entries, prepared.step, prepared.files, deleted)
        self._run.batches.announce(prepared.step)
        for path in prepared.outdated:
            discard(path)

    def commit(self, entries: Entries) -> None:
        """Commit outcomes that belong to no batch."""
        files = []
        if entries.dropped:
            path = write_dropped(self._run.rollouts, self._journal.last_step() + 1, entries.dropped)
            files.append(FileRecord.of(self._run.root, path))
        self._journal.commit(entries, files=files)

    def delete_uncommitted(self) -> None:
        """Delete rollout files whose commit is missing or was taken back, and what a commit was about to delete."""
        directory, recorded = self._run.rollouts, self._journal.files()
        outdated = [*dropped_files(directory), *RolloutKind.TRAIN.old_files(directory, self._keep_rollouts)]
        unrecorded = [path for path in outdated if self._name(path) not in recorded]
        last = self._journal.last_step()
        steps = [path for step, path in RolloutKind.TRAIN.files(directory).items() if step > last]
        for path in {*unrecorded, *steps}:
            path.unlink()

    def _name(self, path: Path) -> str:
        return path.relative_to(self._run.root).as_posix()
