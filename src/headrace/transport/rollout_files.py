"""Rollouts as Parquet files, `rollouts/step-N.parquet` and `rollouts/eval-step-N.parquet`: writer and reader.

Rows and columns: `rollout_tables`.

The rollouts of a draw are written before the commit that records its outcome. Draws that are dropped while step N is
collected are in `rollouts/dropped-N-NUMBER.parquet`, one file per commit, until `step-N.parquet` takes the rows over.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.errors import BadInput
from headrace.rollout.digest import NO_DIGEST
from headrace.rollout.merge import merge_turns
from headrace.rollout.schema import DamagedFile
from headrace.rollout.types import Rollout
from headrace.transport.digests import PARQUET_KEY, check_parquet, seal_parquet
from headrace.transport.files import draft_of, move, sync
from headrace.transport.rollout_tables import OTHER_VALUES, SCHEMA, SavedRollout, number_array, rollouts_of, table_of
from headrace.transport.run_dir import RolloutKind

log = logging.getLogger(__name__)

ROW_GROUP_ROLLOUTS = 64
"""Rollouts in a row group: bounds the time that Python runs between two writes, and the memory of long rollouts."""

STREAMED_ROLLOUTS = 4
"""Rollouts that a reader of single rows decodes at a time."""


def write_rollouts(
    directory: Path, step: int, kept: Sequence[Rollout], dropped: Iterable[tuple[Rollout, str]]
) -> tuple[Path, list[Path]]:
    """Write `step-N.parquet`; return its path, and the files of dropped rollouts whose rows it includes."""
    path, parts = RolloutKind.TRAIN.path(directory, step), dropped_files(directory, step)
    with _open_replacement(path) as writer:
        _write_rows(writer, step, [*((rollout, None) for rollout in kept), *dropped])
        for part in parts:
            for table in _read_tables(part):
                writer.write_table(table)
    return path, parts


def write_dropped(directory: Path, step: int, dropped: Sequence[tuple[Rollout, str]]) -> Path:
    """Write rollouts that were dropped while `step` is collected to a new file; return its path."""
    numbers = [int(path.stem.rpartition("-")[2]) for path in dropped_files(directory, step)]
    path = directory / f"dropped-{step:08d}-{max(numbers, default=0) + 1:06d}.parquet"
    with _open_replacement(path) as writer:
        _write_rows(writer, step, dropped)
    return path


def dropped_files(directory: Path, step: int | None = None) -> list[Path]:
    """Return the files of rollouts that were dropped while a step, or any step, is collected."""
    return sorted(directory.glob("dropped-*.parquet" if step is None else f"dropped-{step:08d}-*.parquet"))


def _write_rows(writer: pq.ParquetWriter, step: int, rows: Sequence[tuple[Rollout, str | None]]) -> None:
    for start in range(0, len(rows), ROW_GROUP_ROLLOUTS):
        writer.write_table(table_of(step, rows[start : start + ROW_GROUP_ROLLOUTS]))


def write_eval_rollouts(path: Path, step: int, rollouts: Sequence[Rollout], *, add: bool = False) -> None:
    """Write the rollouts of an evaluation of version `step` to `path`, turns merged into samples.

    Rows of other environments in the file are kept; with `add` also those of the same environment whose episodes (task
    key and episode) are not among `rollouts`. The file is replaced, so only one caller may write to it at a time.
    """
    rollouts = sorted(rollouts, key=lambda rollout: (rollout.task_key, rollout.episode))  # episodes end in any order
    identity = ("env", "task_key", "episode") if add else ("env",)
    replaced = {tuple(getattr(rollout, name) for name in identity) for rollout in rollouts}
    with _open_replacement(path) as writer:
        for table in _read_tables(path):
            rows = zip(*(table[name].to_pylist() for name in identity), strict=True)
            writer.write_table(table.filter(number_array([row not in replaced for row in rows], pa.bool_())))
        _write_rows(writer, step, [(_with_samples(rollout), None) for rollout in rollouts])


def _with_samples(rollout: Rollout) -> Rollout:
    """Return a rollout of an evaluation with merged turns; a failed one may have invalid turns and gets no samples."""
    samples = [] if rollout.error is not None else [sample for sample in merge_turns(rollout.turns) if len(sample)]
    ended = rollout.turns[-1].finish_reason if rollout.turns else ""
    return msgspec.structs.replace(rollout, samples=samples, stop_reason=rollout.stop_reason or ended)


@contextmanager
def _open_replacement(path: Path) -> Iterator[pq.ParquetWriter]:
    """Open a writer whose file replaces `path` once it is complete, durably."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = path.stem.partition("-")[0]
    for pattern in (f"{kind}-*.tmp", f".{kind}-*.tmp"):  # left by a killed process
        for leftover in path.parent.glob(pattern):
            leftover.unlink()
    draft = draft_of(path)
    # No dictionaries: nearly every logprob is distinct, and zstd alone is faster and smaller.
    # Byte stream split: latents are float16, and as float64 take no more space with it.
    split = {OTHER_VALUES: "BYTE_STREAM_SPLIT"}
    with pq.ParquetWriter(draft, SCHEMA, compression="zstd", use_dictionary=False, column_encoding=split) as writer:
        yield writer
        writer.add_key_value_metadata({PARQUET_KEY: NO_DIGEST})
    seal_parquet(draft)
    sync(draft)
    move(draft, path)
    sync(path.parent)


def _read_tables(path: Path) -> Iterator[pa.Table]:
    """Yield the row groups of a file; nothing if it is missing, damaged or of another version of Headrace."""
    if not path.exists():
        return
    try:
        _refuse_damage(path)
        file = pq.ParquetFile(path)
    except (pa.ArrowInvalid, DamagedFile) as error:
        log.warning("%s is not a readable Parquet file and is replaced: %s", path, error)
        return
    with file:
        if file.schema_arrow != SCHEMA:
            log.warning("%s has the columns of another version of Headrace and is replaced", path)
            return
        for number in range(file.num_row_groups):
            yield file.read_row_group(number)


def _refuse_damage(path: Path) -> None:
    if isinstance(damage := check_parquet(path), DamagedFile):
        raise damage


class RolloutFiles:
    """Reader of the `rollouts/` directory of a run: the files of training steps or, by `kind`, of evaluations."""

    def __init__(self, directory: Path, kind: RolloutKind = RolloutKind.TRAIN) -> None:
        self.directory = directory
        self._kind = kind

    def steps(self) -> list[int]:
        """Return the steps on disk, in order; for evaluations the versions."""
        return list(self._kind.files(self.directory))

    def read(self, step: int) -> list[SavedRollout]:
        path = self._kind.path(self.directory, step)
        table = _read_table(path)
        if table.schema != SCHEMA:
            raise _other_version_error(path)
        return rollouts_of(table)

    def stream(
        self, step: int, rows: Collection[int] | None = None, chunk_size: int = STREAMED_ROLLOUTS
    ) -> Iterator[tuple[int, SavedRollout]]:
        """Yield row number and rollout for some rows, or for all; `chunk_size` rollouts are in memory at a time.

        The digest of the file is not checked, which would read all of it.
        """
        path, start = self._kind.path(self.directory, step), 0
        with _reporting_unreadable(path), pq.ParquetFile(path) as file:
            if file.schema_arrow != SCHEMA:
                raise _other_version_error(path)
            for number in range(file.num_row_groups):
                end = start + file.metadata.row_group(number).num_rows
                if rows is not None and not any(start <= row < end for row in rows):
                    start = end
                    continue
                for batch in file.iter_batches(chunk_size, row_groups=[number], use_threads=False):
                    chosen = [row for row in range(start, start + len(batch)) if rows is None or row in rows]
                    # `take` of a list would import pandas, which takes a third of a second.
                    parts = [batch] if len(chosen) == len(batch) else [batch.slice(row - start, 1) for row in chosen]
                    if chosen:
                        yield from zip(chosen, rollouts_of(pa.Table.from_batches(parts)), strict=True)
                    start += len(batch)

    def columns(self, step: int, names: Sequence[str]) -> list[dict[str, Any]]:
        """Read some columns of every rollout; columns that an older file lacks are left out."""
        return read_columns(self._kind.path(self.directory, step), names)


def read_columns(path: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """Read some columns of a file; columns that it lacks are left out."""
    rows: list[dict[str, Any]] = _read_table(path, names).to_pylist()
    return rows


def _read_table(path: Path, names: Sequence[str] | None = None) -> pa.Table:
    with _reporting_unreadable(path):
        _refuse_damage(path)
        with pq.ParquetFile(path) as file:
            return file.read(columns=None if names is None else list(names))


def _other_version_error(path: Path) -> BadInput:
    return BadInput("has the columns of another version of Headrace", file=path, fix="Read it with that one.")


@contextmanager
def _reporting_unreadable(path: Path) -> Iterator[None]:
    """Raise `BadInput` for a file that does not exist or cannot be read."""
    try:
        yield
    except FileNotFoundError as error:
        fact = "the file does not exist: a run keeps the newest orchestrator.keep_rollouts steps"
        raise BadInput(fact, file=path) from error
    except (pa.ArrowException, OSError) as error:
        raise BadInput(f"not a readable Parquet file: {error}", file=path) from error
