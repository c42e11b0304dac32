"""Rollouts as rows of an Arrow table, and back. A row is a rollout: its messages, the credit of each token, and more.

Columns are those of `SCHEMA`, described in docs/how-to/evaluation.md.

Tables are built in a thread next to the event loop, which must not hold the GIL for long: Arrow arrays are views of
numpy arrays, Python loops over rollouts and samples but not over tokens. `pa.array`, and before pyarrow 26
`to_pandas_dtype`, would import pandas if installed, which takes a third of a second and memory, so they are not called.

Only samples are saved, so turns are rebuilt: a turn's prompt is everything before it in its sample, and `obs_spans`
have the start and the index of each turn. Two turns without an observation between them are one in the sample; the
first gets all sampled tokens and an empty turn stands for the second, so that the number of turns is right.

Left out on purpose: the roles of a first prompt, and the turns of a failed rollout, which has no samples.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from headrace.rollout.merge import observed_roles
from headrace.rollout.types import (
    KNOWN_STREAMS,
    LATENTS,
    ROUTES,
    TOKEN_ARRAYS,
    TRUNCATED,
    Rollout,
    RolloutError,
    Sample,
    Turn,
)

_DTYPES = {
    pa.from_numpy_dtype(dtype): dtype for dtype in (np.bool_, np.int8, np.int32, np.int64, np.float32, np.float64)
}
_TOKEN_COLUMNS = {name: pa.from_numpy_dtype(dtype) for name, dtype in TOKEN_ARRAYS.items()}
_STREAM_COLUMNS = {
    name: pa.from_numpy_dtype(KNOWN_STREAMS[name])
    for name in ("advantages", "rl_weights", "ce_weights", "ref_kl_weights", "ref_logprobs")
}
_PLAIN_COLUMNS = (
    "env", "task_key", "group_id", "draw_id", "episode", "credited", "agent", "trainable", "truncated", "stop_reason",
)  # fmt: skip
"""Fields of a rollout that are stored as they are."""
_OBS_SPANS = pa.list_(pa.struct([(name, pa.int32()) for name in ("start", "turn", "prompt_start", "length")]))
_TEXTS = pa.list_(pa.string())
_NAMED_NUMBERS = pa.map_(pa.string(), pa.float64())
_OTHER_STREAMS = pa.map_(pa.string(), pa.list_(pa.float64()))
OTHER_VALUES = "samples.list.element.other_streams.key_value.value.list.element"
"""The Parquet column of the numbers of streams that have no column of their own."""

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


class SavedRollout(msgspec.Struct):
    """A rollout as read from a file."""

    rollout: Rollout
    drop_reason: str
    """Why it was not shipped; empty if it was."""


def table_of(step: int, rows: Sequence[tuple[Rollout, str | None]]) -> pa.Table:
    """Return a table of rollouts, each with the reason why it was dropped, if it was."""
    rollouts = [rollout for rollout, _ in rows]
    columns: dict[str, Any] = {
        "step": [step] * len(rows),
        **{name: [getattr(r, name) for r in rollouts] for name in _PLAIN_COLUMNS},
        # Null, not NaN: a failed rollout must not turn the average of a query into NaN.
        "reward": [None if math.isnan(r.reward) else r.reward for r in rollouts],
        "rewards": _maps([r.rewards for r in rollouts]),
        "metrics": _maps([r.metrics for r in rollouts]),
        "advantage_mean": [r.mean_advantage for r in rollouts],
        "messages": [msgspec.json.encode(r.messages).decode() for r in rollouts],
        "num_turns": [len(r.turns) for r in rollouts],
        "completion_tokens": [r.completion_tokens for r in rollouts],
        "version_min": [r.oldest_version for r in rollouts],
        "version_max": [r.newest_version for r in rollouts],
        "drop_reason": [reason for _, reason in rows],
        "error_reason": [r.error.reason if r.error else None for r in rollouts],
        "error": [r.error.detail if r.error else None for r in rollouts],
        "seconds": [r.timings.get("episode") for r in rollouts],
        "finish_reasons": pa.ListArray.from_arrays(
            _offsets([len(r.turns) for r in rollouts]),
            _strings([turn.finish_reason for r in rollouts for turn in r.turns]),
            type=_TEXTS,
        ),
        "samples": _sample_lists(rollouts),
    }
    arrays = []
    for field in SCHEMA:
        values = columns[field.name]
        if not isinstance(values, pa.Array):
            values = _strings(values) if field.type == pa.string() else number_array(values, field.type)
        arrays.append(values)
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def _sample_lists(rollouts: Sequence[Rollout]) -> pa.Array:
    """Return one list of sample structs per rollout."""
    samples = [sample for rollout in rollouts for sample in rollout.samples]
    roles = [observed_roles(s, rollout.turns) if s.obs_spans else None for rollout in rollouts for s in rollout.samples]
    spans = np.array([row for sample in samples for row in sample.obs_spans], np.int32).reshape(-1, 4)
    span_columns = [_array(np.ascontiguousarray(column), pa.int32()) for column in spans.T]
    span_structs = pa.StructArray.from_arrays(span_columns, fields=list(_OBS_SPANS.value_type))
    columns = {
        "prompt_length": number_array([sample.prompt_length for sample in samples], pa.int32()),
        "temperature": number_array([sample.temperature for sample in samples], pa.float64()),
        **{name: _lists([getattr(s, name) for s in samples], kind) for name, kind in _TOKEN_COLUMNS.items()},
        **{name: _lists([s.streams.get(name) for s in samples], kind) for name, kind in _STREAM_COLUMNS.items()},
        "other_streams": _other_streams(samples),
        "obs_spans": pa.ListArray.from_arrays(
            _offsets([len(s.obs_spans) for s in samples]), span_structs, type=_OBS_SPANS
        ),
        "roles": _lists(roles, pa.int8()),
    }
    structs = pa.StructArray.from_arrays(list(columns.values()), fields=list(_SAMPLES.value_type))
    return pa.ListArray.from_arrays(_offsets([len(rollout.samples) for rollout in rollouts]), structs, type=_SAMPLES)


def _other_streams(samples: Sequence[Sample]) -> pa.Array:
    """Return a map by name of the streams that have no column of their own, per sample.

    Without routes, which would be most of the file: only the trainer reads them, from its batch.
    """
    left_out = {*_STREAM_COLUMNS, ROUTES}
    others = [[item for item in sample.streams.items() if item[0] not in left_out] for sample in samples]
    names = _strings([name for items in others for name, _ in items])
    values = _lists([values.ravel() for items in others for _, values in items], pa.float64())
    return pa.MapArray.from_arrays(_offsets([len(items) for items in others]), names, values, type=_OTHER_STREAMS)


def _maps(maps: Sequence[dict[str, float]]) -> pa.Array:
    names = _strings([name for entries in maps for name in entries])
    values = number_array([value for entries in maps for value in entries.values()], pa.float64())
    return pa.MapArray.from_arrays(_offsets([len(entries) for entries in maps]), names, values, type=_NAMED_NUMBERS)


def _lists(arrays: Sequence[np.ndarray | None], kind: pa.DataType) -> pa.Array:
    """Return one list per array; null for None."""
    dtype = _DTYPES[kind]
    flat = np.concatenate([np.empty(0, dtype), *(array for array in arrays if array is not None)], dtype=dtype)
    offsets = _offsets([0 if array is None else len(array) for array in arrays])
    absent = _array(np.array([array is None for array in arrays], np.bool_), pa.bool_())
    return pa.ListArray.from_arrays(offsets, _array(flat, kind), type=pa.list_(kind), mask=absent)


def _strings(texts: Sequence[str | None]) -> pa.Array:
    encoded = [b"" if text is None else text.encode() for text in texts]
    offsets = _offsets([len(text) for text in encoded]).buffers()[1]
    return pa.Array.from_buffers(pa.string(), len(texts), [_validity(texts), offsets, pa.py_buffer(b"".join(encoded))])


def number_array(values: Sequence[float | None], kind: pa.DataType) -> pa.Array:
    """Return numbers or flags as an Arrow array; null for None."""
    filled = np.array([0 if value is None else value for value in values], _DTYPES[kind])
    return _array(filled, kind, _validity(values))


def _array(values: np.ndarray, kind: pa.DataType, validity: pa.Buffer | None = None) -> pa.Array:
    content = _bits(values) if kind == pa.bool_() else pa.py_buffer(values)
    return pa.Array.from_buffers(kind, len(values), [validity, content])


def _validity(values: Sequence[object]) -> pa.Buffer:
    """Return Arrow's bitmap of values that are not null."""
    return _bits(np.array([value is not None for value in values], np.bool_))


def _bits(flags: np.ndarray) -> pa.Buffer:
    return pa.py_buffer(np.packbits(flags, bitorder="little"))


def _offsets(lengths: Sequence[int]) -> pa.Array:
    return _array(np.cumsum([0, *lengths], dtype=np.int32), pa.int32())


def rollouts_of(table: pa.Table) -> list[SavedRollout]:
    """Return the rollouts of a table with the columns of `SCHEMA`."""
    column = table["samples"]
    lists = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    samples, roles = _read_samples(lists.values), _read_arrays(lists.values.field("roles"))
    of_rollout = [slice(*ends) for ends in pairwise(np.from_dlpack(lists.offsets))]
    rows = table.drop_columns(["samples"]).to_pylist()
    return [_read_rollout(row, samples[part], roles[part]) for row, part in zip(rows, of_rollout, strict=True)]


def _read_rollout(row: dict[str, Any], samples: list[Sample], roles: list[np.ndarray | None]) -> SavedRollout:
    rollout = Rollout(
        **{name: row[name] for name in _PLAIN_COLUMNS},
        reward=math.nan if row["reward"] is None else row["reward"],
        rewards=dict(row["rewards"]),
        metrics=dict(row["metrics"]),
        messages=json.loads(row["messages"]),
        turns=turns_of(samples, roles, row["num_turns"]),
        samples=samples,
        error=None if row["error_reason"] is None else RolloutError(row["error_reason"], row["error"] or ""),
        timings={} if row["seconds"] is None else {"episode": row["seconds"]},
    )
    for turn, reason in zip(rollout.turns, row["finish_reasons"], strict=False):
        turn.finish_reason = reason
    return SavedRollout(rollout, row["drop_reason"] or "")


def turns_of(samples: Sequence[Sample], roles: Sequence[np.ndarray | None], count: int) -> list[Turn]:
    """Return `count` turns that merge to these samples."""
    turns: dict[int, Turn] = {}
    firsts: list[Turn] = []
    for sample, sample_roles in zip(samples, roles, strict=True):
        first_end, *ends = [*(start for start, _, _, _ in sample.obs_spans), sample.completion_length]
        firsts.append(_build_turn(sample, sample_roles, 0, first_end))
        for (start, number, _, length), end in zip(sample.obs_spans, ends, strict=True):
            turns[number] = _build_turn(sample, sample_roles, start + length, end)
    # Samples are in the order in which they began, so their first turns take the free indices in order.
    free = [number for number in range(count + len(firsts)) if number not in turns]
    turns.update(zip(free, firsts, strict=False))
    if not turns:
        return []
    filled: list[Turn] = []
    for number in range(max(count, max(turns) + 1)):
        if number in turns:
            filled.append(turns[number])
        else:  # an empty turn that continues the one before it, and adds nothing to any sample
            last, empty = filled[-1], np.empty(0)
            prompt = np.concatenate([last.prompt_ids, last.completion_ids])
            filled.append(Turn(prompt, empty, empty, empty, last.temperature))
    return filled


def _build_turn(sample: Sample, roles: np.ndarray | None, start: int, end: int) -> Turn:
    """Return the turn that sampled the tokens from `start` to `end` of the sample's completion."""
    cut, end = sample.prompt_length + start, sample.prompt_length + end
    truncated, latents = sample.streams.get(TRUNCATED), sample.streams.get(LATENTS)
    mask = sample.mask[cut:end]
    return Turn(
        sample.token_ids[:cut],
        sample.token_ids[cut:end],
        sample.logprobs[cut:end],
        sample.versions[cut:end],
        sample.temperature,
        truncated_logprobs=None if truncated is None else truncated[cut:end],
        prompt_roles=None if roles is None else roles[:cut],
        latents=None if latents is None else latents[cut:end],
        mask=None if mask.all() else mask,
    )


def _read_samples(structs: pa.StructArray) -> list[Sample]:
    """Return all samples of a file."""
    arrays = [_read_arrays(structs.field(name)) for name in _TOKEN_COLUMNS]
    numbers = [structs.field(name).to_pylist() for name in ("prompt_length", "temperature")]
    spans = [[tuple(span.values()) for span in several] for several in structs.field("obs_spans").to_pylist()]
    samples = [Sample(*columns) for columns in zip(*arrays, *numbers, spans, strict=True)]
    for name in _STREAM_COLUMNS:
        for sample, values in zip(samples, _read_arrays(structs.field(name)), strict=True):
            if values is not None:
                sample.set_stream(name, values)
    for sample, others in zip(samples, structs.field("other_streams").to_pylist(), strict=True):
        for name, values in others:
            stream = np.array(values, np.float32 if name == TRUNCATED else np.float64)
            has_rows = len(stream) > len(sample) > 0  # rows of numbers are stored end to end
            sample.set_stream(name, stream.reshape(len(sample), -1) if has_rows else stream)
    return samples


def _read_arrays(lists: pa.ListArray) -> list[np.ndarray | None]:
    """Return one array per list as views of the file's memory; None for null."""
    is_bool = pa.types.is_boolean(lists.type.value_type)  # bits, which DLPack does not have
    # `to_numpy` would import pandas, which takes a third of a second.
    flat = np.from_dlpack(lists.values.cast(pa.uint8()) if is_bool else lists.values)
    flat = flat.view(np.bool_) if is_bool else flat
    parts = zip(lists.is_valid().to_pylist(), pairwise(np.from_dlpack(lists.offsets)), strict=True)
    return [flat[start:end] if is_valid else None for is_valid, (start, end) in parts]
