"""Every rollout of a step, or of an evaluation, as one Parquet file: what was said, which token got which credit, and
why it was dropped. Both have the columns of `SCHEMA`, described in docs/evaluation.md; `rollout_files.py` reads them.

The writer is a thread beside the event loop, so it must not hold the interpreter. Arrow arrays are laid over numpy
arrays: Python touches rollouts and samples, never tokens. `pa.array`, and before pyarrow 26 `to_pandas_dtype`, would
import pandas where that is installed, which takes a third of a second or more and stays in memory, so nothing
here calls them.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.rollout.merge import merge_turns, observed_roles
from headrace.rollout.types import KNOWN_STREAMS, Rollout, Sample
from headrace.transport.rollouts import RolloutKind

log = logging.getLogger(__name__)

ROLLOUTS_AT_ONCE = 64
"""Rollouts in a row group: bounds how long Python runs between two writes, and the memory of long rollouts."""

_DTYPES = {
    pa.from_numpy_dtype(dtype): dtype for dtype in (np.bool_, np.int8, np.int32, np.int64, np.float32, np.float64)
}
_TOKEN_COLUMNS = {"token_ids": pa.int32(), "mask": pa.bool_(), "logprobs": pa.float32(), "versions": pa.int32()}
_STREAM_COLUMNS = {name: pa.from_numpy_dtype(dtype) for name, dtype in KNOWN_STREAMS.items()}
_OBS_SPANS = pa.list_(pa.struct([(name, pa.int32()) for name in ("start", "turn", "prompt_start", "length")]))
_TEXTS = pa.list_(pa.string())
_NAMED_NUMBERS = pa.map_(pa.string(), pa.float64())
_OTHER_STREAMS = pa.map_(pa.string(), pa.list_(pa.float64()))

_SAMPLES = pa.list_(
    pa.struct(
        [
            ("prompt_length", pa.int32()),
            ("temperature", pa.float64()),
            *((name, pa.list_(kind)) for name, kind in {**_TOKEN_COLUMNS, **_STREAM_COLUMNS}.items()),
            ("other_streams", _OTHER_STREAMS),
            ("obs_spans", _OBS_SPANS),
            ("roles", pa.list_(pa.int8())),
        ]
    )
)

SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("env", pa.string()),
        ("task_key", pa.string()),
        ("group_id", pa.string()),
        ("draw_id", pa.int64()),
        ("episode", pa.int32()),
        ("credited", pa.int32()),
        ("agent", pa.string()),
        ("trainable", pa.bool_()),
        ("reward", pa.float64()),
        ("rewards", _NAMED_NUMBERS),
        ("metrics", _NAMED_NUMBERS),
        ("advantage_mean", pa.float64()),
        ("messages", pa.string()),
        ("num_turns", pa.int32()),
        ("completion_tokens", pa.int32()),
        ("version_min", pa.int32()),
        ("version_max", pa.int32()),
        ("truncated", pa.bool_()),
        ("stop_reason", pa.string()),
        ("drop_reason", pa.string()),
        ("error_reason", pa.string()),
        ("error", pa.string()),
        ("seconds", pa.float64()),
        ("finish_reasons", _TEXTS),
        ("samples", _SAMPLES),
    ]
)


def write_rollouts(
    directory: Path, step: int, kept: Sequence[Rollout], dropped: Iterable[tuple[Rollout, str]], keep_last: int
) -> None:
    """Write `step-N.parquet`, and delete files older than the newest `keep_last`."""
    rows = [*((rollout, None) for rollout in kept), *dropped]
    with _replacing(RolloutKind.TRAIN.path(directory, step)) as writer:
        for start in range(0, len(rows), ROLLOUTS_AT_ONCE):
            writer.write_table(_table(step, rows[start : start + ROLLOUTS_AT_ONCE]))
    RolloutKind.TRAIN.delete_old(directory, keep_last)


def write_eval_rollouts(path: Path, step: int, rollouts: Sequence[Rollout], *, add: bool = False) -> None:
    """Write what an evaluation of version `step` played, turns merged into samples, to `path`.

    Rows that the file already has stay if they are of other environments; with `add` also those of the same
    environment whose episodes (task key and episode) are not among `rollouts`. The file is replaced as a whole, so
    that one caller at a time may write to it.
    """
    rollouts = sorted(rollouts, key=lambda rollout: (rollout.task_key, rollout.episode))  # they end in any order
    identity = ("env", "task_key", "episode") if add else ("env",)
    replaced = {tuple(getattr(rollout, name) for name in identity) for rollout in rollouts}
    with _replacing(path) as writer:
        for table in _tables_in(path):
            rows = zip(*(table[name].to_pylist() for name in identity), strict=True)
            writer.write_table(table.filter(_numbers([row not in replaced for row in rows], pa.bool_())))
        for start in range(0, len(rollouts), ROLLOUTS_AT_ONCE):
            part = rollouts[start : start + ROLLOUTS_AT_ONCE]
            writer.write_table(_table(step, [(_with_samples(rollout), None) for rollout in part]))


@contextmanager
def _replacing(path: Path) -> Iterator[pq.ParquetWriter]:
    """Open a writer whose file takes the place of `path` once it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = path.stem.rstrip("0123456789")
    for leftover in path.parent.glob(f"{kind}*.tmp"):  # of a process that was killed while it wrote
        leftover.unlink()
    temporary = path.with_suffix(".tmp")
    # No dictionaries: one of logprobs has as many entries as tokens, and zstd alone is faster and smaller.
    with pq.ParquetWriter(temporary, SCHEMA, compression="zstd", use_dictionary=False) as writer:
        yield writer
    os.replace(temporary, path)


def _tables_in(path: Path) -> Iterator[pa.Table]:
    """Yield the row groups of a file; nothing where there is none, or one that power loss or another version left."""
    if not path.exists():
        return
    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        log.warning("%s is not a readable Parquet file, and is replaced: %s", path, error)
        return
    with file:
        if file.schema_arrow != SCHEMA:
            log.warning("%s has the columns of another version of Headrace, and is replaced", path)
            return
        for number in range(file.num_row_groups):
            yield file.read_row_group(number)


def _with_samples(rollout: Rollout) -> Rollout:
    """Evaluation gives no credit, so its turns are merged for the file alone. What failed may not fit together."""
    samples = [] if rollout.error is not None else [sample for sample in merge_turns(rollout.turns) if len(sample)]
    ended = rollout.turns[-1].finish_reason if rollout.turns else ""
    return msgspec.structs.replace(rollout, samples=samples, stop_reason=rollout.stop_reason or ended)


def _table(step: int, rows: Sequence[tuple[Rollout, str | None]]) -> pa.Table:
    rollouts = [rollout for rollout, _ in rows]
    columns: dict[str, Any] = {
        "step": [step] * len(rows),
        "env": [r.env for r in rollouts],
        "task_key": [r.task_key for r in rollouts],
        "group_id": [r.group_id for r in rollouts],
        "draw_id": [r.draw_id for r in rollouts],
        "episode": [r.episode for r in rollouts],
        "credited": [r.credited for r in rollouts],
        "agent": [r.agent for r in rollouts],
        "trainable": [r.trainable for r in rollouts],
        # Null, not NaN: a rollout that failed must not turn the average of a query into NaN.
        "reward": [None if math.isnan(r.reward) else r.reward for r in rollouts],
        "rewards": _maps([r.rewards for r in rollouts]),
        "metrics": _maps([r.metrics for r in rollouts]),
        "advantage_mean": [r.mean_advantage for r in rollouts],
        "messages": [msgspec.json.encode(r.messages).decode() for r in rollouts],
        "num_turns": [len(r.turns) for r in rollouts],
        "completion_tokens": [r.completion_tokens for r in rollouts],
        "version_min": [r.oldest_version for r in rollouts],
        "version_max": [r.newest_version for r in rollouts],
        "truncated": [r.truncated for r in rollouts],
        "stop_reason": [r.stop_reason for r in rollouts],
        "drop_reason": [reason for _, reason in rows],
        "error_reason": [r.error.reason if r.error else None for r in rollouts],
        "error": [r.error.detail if r.error else None for r in rollouts],
        "seconds": [r.timings.get("episode") for r in rollouts],
        "finish_reasons": _texts([[turn.finish_reason for turn in r.turns] for r in rollouts]),
        "samples": _samples(rollouts),
    }
    return pa.Table.from_arrays([_column(columns[field.name], field.type) for field in SCHEMA], schema=SCHEMA)


def _samples(rollouts: Sequence[Rollout]) -> pa.Array:
    samples = [sample for rollout in rollouts for sample in rollout.samples]
    roles = [_roles(rollout, sample) for rollout in rollouts for sample in rollout.samples]
    columns = {
        "prompt_length": _numbers([sample.prompt_length for sample in samples], pa.int32()),
        "temperature": _numbers([sample.temperature for sample in samples], pa.float64()),
        **{name: _lists([getattr(s, name) for s in samples], kind) for name, kind in _TOKEN_COLUMNS.items()},
        **{name: _lists([s.streams.get(name) for s in samples], kind) for name, kind in _STREAM_COLUMNS.items()},
        "other_streams": _other_streams(samples),
        "obs_spans": _obs_spans(samples),
        "roles": _lists(roles, pa.int8()),
    }
    structs = pa.StructArray.from_arrays(list(columns.values()), fields=list(_SAMPLES.value_type))
    return pa.ListArray.from_arrays(_offsets([len(rollout.samples) for rollout in rollouts]), structs, type=_SAMPLES)


def _other_streams(samples: Sequence[Sample]) -> pa.Array:
    """Streams that only some algorithm knows, by name."""
    others = [[item for item in sample.streams.items() if item[0] not in KNOWN_STREAMS] for sample in samples]
    names = _strings([name for items in others for name, _ in items])
    values = _lists([values for items in others for _, values in items], pa.float64())
    return pa.MapArray.from_arrays(_offsets([len(items) for items in others]), names, values, type=_OTHER_STREAMS)


def _obs_spans(samples: Sequence[Sample]) -> pa.Array:
    rows = np.array([row for sample in samples for row in sample.obs_spans], np.int32).reshape(-1, 4)
    columns = [_array(np.ascontiguousarray(column), pa.int32()) for column in rows.T]
    structs = pa.StructArray.from_arrays(columns, fields=list(_OBS_SPANS.value_type))
    return pa.ListArray.from_arrays(_offsets([len(s.obs_spans) for s in samples]), structs, type=_OBS_SPANS)


def _roles(rollout: Rollout, sample: Sample) -> np.ndarray | None:
    """Most samples have no observation, and pay nothing."""
    return observed_roles(sample, rollout.turns) if sample.obs_spans else None


def _texts(lists: Sequence[Sequence[str]]) -> pa.Array:
    flat = _strings([text for texts in lists for text in texts])
    return pa.ListArray.from_arrays(_offsets([len(texts) for texts in lists]), flat, type=_TEXTS)


def _maps(maps: Sequence[dict[str, float]]) -> pa.Array:
    names = _strings([name for entries in maps for name in entries])
    values = _numbers([value for entries in maps for value in entries.values()], pa.float64())
    return pa.MapArray.from_arrays(_offsets([len(entries) for entries in maps]), names, values, type=_NAMED_NUMBERS)


def _lists(arrays: Sequence[np.ndarray | None], kind: pa.DataType) -> pa.Array:
    """One list per array; null for None."""
    dtype = _DTYPES[kind]
    flat = np.concatenate([np.empty(0, dtype), *(array for array in arrays if array is not None)], dtype=dtype)
    offsets = _offsets([0 if array is None else len(array) for array in arrays])
    absent = _array(np.array([array is None for array in arrays], np.bool_), pa.bool_())
    return pa.ListArray.from_arrays(offsets, _array(flat, kind), type=pa.list_(kind), mask=absent)


def _column(values: Any, kind: pa.DataType) -> pa.Array:
    if isinstance(values, pa.Array):
        return values
    return _strings(values) if kind == pa.string() else _numbers(values, kind)


def _strings(texts: Sequence[str | None]) -> pa.Array:
    encoded = [b"" if text is None else text.encode() for text in texts]
    offsets = _offsets([len(text) for text in encoded]).buffers()[1]
    return pa.Array.from_buffers(pa.string(), len(texts), [_known(texts), offsets, pa.py_buffer(b"".join(encoded))])


def _numbers(values: Sequence[float | None], kind: pa.DataType) -> pa.Array:
    filled = np.array([0 if value is None else value for value in values], _DTYPES[kind])
    return _array(filled, kind, _known(values))


def _array(values: np.ndarray, kind: pa.DataType, known: pa.Buffer | None = None) -> pa.Array:
    content = _bits(values) if kind == pa.bool_() else pa.py_buffer(values)
    return pa.Array.from_buffers(kind, len(values), [known, content])


def _known(values: Sequence[object]) -> pa.Buffer:
    """Arrow's map of what is not null."""
    return _bits(np.array([value is not None for value in values], np.bool_))


def _bits(flags: np.ndarray) -> pa.Buffer:
    return pa.py_buffer(np.packbits(flags, bitorder="little"))


def _offsets(lengths: Sequence[int]) -> pa.Array:
    return _array(np.cumsum([0, *lengths], dtype=np.int32), pa.int32())
