"""The rollouts that a run saved, read back from what `dump.py` wrote: samples, and turns that merge to these samples.

Turns are rebuilt, since only samples are saved: a turn's prompt is all of its sample before it, and `obs_spans` say
where a turn begins and which one it was. Two turns with nothing to read between them are one in the sample; the first
takes all that was sampled, and an empty one stands for the second, so that turns are as many as they were.

Left out on purpose: the roles of a first prompt, and the turns of a rollout that failed, which has no samples. Files
of an older version have neither spans nor roles: there observations are where nothing was sampled, written by nobody
knows whom, and the samples of a rollout are taken to have been played one after another.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.errors import BadInput
from headrace.rollout.types import KNOWN_STREAMS, TRUNCATED, Rollout, RolloutError, Sample, Turn
from headrace.transport.rollouts import RolloutKind


class SavedRollout(msgspec.Struct):
    """A rollout as a step's file has it."""

    rollout: Rollout
    drop_reason: str
    """Why it was not shipped; empty: it was."""


class RolloutFiles:
    """The `rollouts/` directory of a run: the files of its training steps, or (`kind`) of its evaluations."""

    def __init__(self, directory: Path, kind: RolloutKind = RolloutKind.TRAIN) -> None:
        self.directory = directory
        self._kind = kind

    def steps(self) -> list[int]:
        """Return the steps that are on disk, in order; of an evaluation, its version."""
        return list(self._kind.files(self.directory))

    def read(self, step: int) -> list[SavedRollout]:
        return _rollouts(self._table(step))

    def columns(self, step: int, names: Sequence[str]) -> list[dict[str, Any]]:
        """A few columns of every rollout, without the rest being read; those that an older file lacks are left out."""
        rows: list[dict[str, Any]] = self._table(step, names).to_pylist()
        return rows

    def _table(self, step: int, names: Sequence[str] | None = None) -> pa.Table:
        path = self._kind.path(self.directory, step)
        try:
            with pq.ParquetFile(path) as file:
                return file.read(columns=None if names is None else list(names))
        except FileNotFoundError as error:
            fact = "the file is gone: a run keeps the newest orchestrator.keep_rollouts steps"
            raise BadInput(fact, file=path) from error
        except pa.ArrowInvalid as error:
            raise BadInput(f"not a readable Parquet file: {error}", file=path) from error


def _rollouts(table: pa.Table) -> list[SavedRollout]:
    lists = _joined(table["samples"])
    samples, roles = _samples(lists.values), _roles(lists.values)
    of_rollout = [slice(*ends) for ends in pairwise(lists.offsets.to_numpy())]
    if "obs_spans" in _names(lists.values):
        for sample, spans in zip(samples, lists.values.field("obs_spans").to_pylist(), strict=True):
            sample.obs_spans = [(s["start"], s["turn"], s["prompt_start"], s["length"]) for s in spans]
    else:
        for part in of_rollout:
            _find_spans(samples[part])
    rows = table.drop_columns(["samples"]).to_pylist()
    return [_rollout(row, samples[part], roles[part]) for row, part in zip(rows, of_rollout, strict=True)]


def _rollout(row: dict[str, Any], samples: list[Sample], roles: list[np.ndarray | None]) -> SavedRollout:
    rollout = Rollout(
        env=row["env"],
        task_key=row["task_key"],
        group_id=row["group_id"],
        draw_id=row["draw_id"],
        episode=row.get("episode", -1),
        credited=row.get("credited", 0),
        agent=row["agent"],
        trainable=row["trainable"],
        reward=math.nan if row["reward"] is None else row["reward"],
        rewards=dict(row["rewards"]),
        metrics=dict(row["metrics"]),
        messages=json.loads(row["messages"]),
        turns=turns_of(samples, roles, row["num_turns"]),
        samples=samples,
        truncated=row["truncated"],
        stop_reason=row["stop_reason"],
        error=None if row["error_reason"] is None else RolloutError(row["error_reason"], row["error"] or ""),
        timings={} if row["seconds"] is None else {"episode": row["seconds"]},
    )
    for turn, reason in zip(rollout.turns, row.get("finish_reasons") or [], strict=False):
        turn.finish_reason = reason
    return SavedRollout(rollout, row["drop_reason"] or "")


def turns_of(samples: Sequence[Sample], roles: Sequence[np.ndarray | None], count: int) -> list[Turn]:
    """`count` turns that merge to these samples."""
    turns: dict[int, Turn] = {}
    firsts: list[Turn] = []
    for sample, known in zip(samples, roles, strict=True):
        first_end, *ends = [*(start for start, _, _, _ in sample.obs_spans), sample.completion_length]
        firsts.append(_turn(sample, known, 0, first_end))
        for (start, number, _, length), end in zip(sample.obs_spans, ends, strict=True):
            turns[number] = _turn(sample, known, start + length, end)
    # Samples stand in the order in which they began, so the first turns fill what is free in order.
    free = [number for number in range(count + len(firsts)) if number not in turns]
    turns.update(zip(free, firsts, strict=False))
    return _without_gaps(turns, count) if turns else []


def _turn(sample: Sample, roles: np.ndarray | None, start: int, end: int) -> Turn:
    """Of which the tokens from `start` to `end` of the sample's completion were sampled."""
    cut, end = sample.prompt_length + start, sample.prompt_length + end
    truncated = sample.streams.get(TRUNCATED)
    return Turn(
        sample.token_ids[:cut],
        sample.token_ids[cut:end],
        sample.logprobs[cut:end],
        sample.versions[cut:end],
        sample.temperature,
        truncated_logprobs=None if truncated is None else truncated[cut:end],
        prompt_roles=None if roles is None else roles[:cut],
    )


def _without_gaps(turns: dict[int, Turn], count: int) -> list[Turn]:
    """In a gap stands an empty turn that goes on where the one before it ended: it adds nothing to any sample."""
    found: list[Turn] = []
    for number in range(max(count, max(turns) + 1)):
        found.append(turns[number] if number in turns else _nothing_after(found[-1]))
    return found


def _nothing_after(turn: Turn) -> Turn:
    nothing = np.empty(0)
    prompt = np.concatenate([turn.prompt_ids, turn.completion_ids])
    return Turn(prompt, nothing, nothing, nothing, turn.temperature)


def _samples(structs: pa.StructArray) -> list[Sample]:
    """All samples of a file, end to end; without their spans."""
    arrays = [_arrays(structs.field(name)) for name in ("token_ids", "mask", "logprobs", "versions")]
    numbers = [structs.field(name).to_pylist() for name in ("prompt_length", "temperature")]
    samples = [Sample(*columns) for columns in zip(*arrays, *numbers, strict=True)]
    for name in KNOWN_STREAMS:
        for sample, values in zip(samples, _arrays(structs.field(name)), strict=True):
            if values is not None:
                sample.set_stream(name, values)
    for sample, others in zip(samples, structs.field("other_streams").to_pylist(), strict=True):
        for name, values in others:
            sample.set_stream(name, np.array(values, np.float32 if name == TRUNCATED else np.float64))
    return samples


def _roles(structs: pa.StructArray) -> list[np.ndarray | None]:
    return _arrays(structs.field("roles")) if "roles" in _names(structs) else [None] * len(structs)


def _find_spans(samples: Sequence[Sample]) -> None:
    """The spans of a rollout's samples by their masks: whatever was not sampled was observed."""
    turn = 0
    for sample in samples:
        turn += 1
        observed = ~sample.mask[sample.prompt_length :]
        edges = np.flatnonzero(np.diff(observed, prepend=False, append=False)).tolist()
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            sample.obs_spans.append((start, turn, sample.prompt_length + start, end - start))
            turn += 1


def _arrays(lists: pa.ListArray) -> list[np.ndarray | None]:
    """One array per list, laid over the file's own memory; None for null."""
    flat = lists.values.to_numpy(zero_copy_only=False)
    known = lists.is_valid().to_numpy(zero_copy_only=False)
    parts = zip(known, pairwise(lists.offsets.to_numpy()), strict=True)
    return [flat[start:end] if there else None for there, (start, end) in parts]


def _joined(column: pa.ChunkedArray) -> pa.ListArray:
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)


def _names(structs: pa.StructArray) -> set[str]:
    return {field.name for field in structs.type}
