"""The batch file: one columnar safetensors file with a JSON header.

Samples are stored unpacked, streams concatenated with offsets, so that a batch stays valid when the number of trainer
ranks changes. An optional stream is stored only for the samples that have it.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from headrace.errors import Failure
from headrace.rollout.types import TOKEN_ARRAYS, Sample

T = TypeVar("T", bound=msgspec.Struct)

SCHEMA = 1
_HEADER_KEY = "headrace"
_STREAM = "stream."
_PRESENT = "present."


class SchemaError(Failure):
    """A file or message that is malformed or was written by a newer Headrace."""


class BatchSample(msgspec.Struct):
    """A sample with its environment and its rollout within the batch, by which the trainer reports metrics."""

    sample: Sample
    env: str
    rollout: int
    """Index of the rollout in the batch; shared by the samples of one rollout."""


class Batch(msgspec.Struct):
    """The samples of one optimizer step: whole groups."""

    step: int
    incarnation: int
    samples: list[BatchSample]
    draw_ids: list[int] = msgspec.field(default_factory=list)
    counts: dict[str, int] = msgspec.field(default_factory=dict)


class _Header(msgspec.Struct):
    schema: int
    step: int
    incarnation: int
    envs: list[str]
    counts: dict[str, int]
    draw_ids: list[int]


class _SchemaOnly(msgspec.Struct):
    schema: int


def check_schema(schema: int, source: str, newest: int = SCHEMA) -> None:
    """Raise SchemaError if `schema` is newer than this Headrace reads."""
    if schema > newest:
        raise SchemaError(
            f"{source} has schema {schema}, but this Headrace reads up to {newest}: "
            "it was written by a newer version; upgrade this process"
        )


def decode_versioned(content: bytes | str, kind: type[T], source: str) -> T:
    """Decode a JSON document with a `schema` field, checking the schema before the other fields."""
    try:
        check_schema(msgspec.json.decode(content, type=_SchemaOnly).schema, source)
        return msgspec.json.decode(content, type=kind)
    except msgspec.DecodeError as error:
        raise SchemaError(f"{source} is not readable: {error}") from error


def encode_batch(batch: Batch) -> bytes:
    """Serialize a batch after checking that every stream is aligned with its tokens."""
    samples = [entry.sample for entry in batch.samples]
    for sample in samples:
        sample.check()
    envs = sorted({entry.env for entry in batch.samples})
    spans = [sample.obs_spans for sample in samples]
    columns: dict[str, np.ndarray] = {
        "offsets": _offsets([len(sample) for sample in samples]),
        **{name: _concatenate([getattr(s, name) for s in samples], dtype) for name, dtype in TOKEN_ARRAYS.items()},
        "prompt_lengths": np.array([s.prompt_length for s in samples], np.int32),
        "temperatures": np.array([s.temperature for s in samples], np.float64),
        "envs": np.array([envs.index(entry.env) for entry in batch.samples], np.int32),
        "rollouts": np.array([entry.rollout for entry in batch.samples], np.int32),
        "obs_offsets": _offsets([len(rows) for rows in spans]),
        "obs_spans": np.array([row for rows in spans for row in rows], np.int32).reshape(-1, 4),
    }
    for name in sorted({name for sample in samples for name in sample.streams}):
        owners = [sample for sample in samples if name in sample.streams]
        columns[_STREAM + name] = _concatenate([s.streams[name] for s in owners], owners[0].streams[name].dtype)
        columns[_PRESENT + name] = np.array([name in s.streams for s in samples], np.bool_)
    header = _Header(SCHEMA, batch.step, batch.incarnation, envs, batch.counts, batch.draw_ids)
    content: bytes = save(columns, metadata={_HEADER_KEY: msgspec.json.encode(header).decode()})
    return content


def read_batch(path: str) -> Batch:
    """Read a batch file; unknown streams are kept as they are."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata: dict[str, str] = file.metadata() or {}
            if _HEADER_KEY not in metadata:
                raise SchemaError(f"{path} is not a Headrace batch: its header is missing")
            header = decode_versioned(metadata[_HEADER_KEY], _Header, path)
            columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except SafetensorError as error:
        raise SchemaError(f"{path} is not a readable batch file: {error}") from error
    try:
        return _assemble(header, columns)
    except KeyError as error:
        raise SchemaError(f"{path} is not a whole batch: it has no column {error}") from error


def _assemble(header: _Header, columns: dict[str, np.ndarray]) -> Batch:
    """Cut the columns into samples."""
    offsets, obs_offsets = columns["offsets"], columns["obs_offsets"]
    samples = []
    for index in range(len(offsets) - 1):
        span = slice(offsets[index], offsets[index + 1])
        obs = columns["obs_spans"][obs_offsets[index] : obs_offsets[index + 1]]
        arrays: dict[str, Any] = {name: columns[name][span] for name in TOKEN_ARRAYS}
        samples.append(
            Sample(
                **arrays,
                prompt_length=int(columns["prompt_lengths"][index]),
                temperature=float(columns["temperatures"][index]),
                obs_spans=[(int(a), int(b), int(c), int(d)) for a, b, c, d in obs],
            )
        )
    for column in columns:
        if column.startswith(_STREAM):
            name, start = column.removeprefix(_STREAM), 0
            for sample, present in zip(samples, columns[_PRESENT + name], strict=True):
                if present:
                    sample.streams[name] = columns[column][start : start + len(sample)]
                    sample.check()
                    start += len(sample)
    entries = [
        BatchSample(sample, header.envs[int(env)], int(rollout))
        for sample, env, rollout in zip(samples, columns["envs"], columns["rollouts"], strict=True)
    ]
    return Batch(header.step, header.incarnation, entries, header.draw_ids, header.counts)


def _offsets(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


def _concatenate(arrays: list[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.zeros(0, dtype)
