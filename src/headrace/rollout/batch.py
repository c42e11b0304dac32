"""The batch file: one columnar safetensors file with a JSON header.

Samples are stored unpacked, streams concatenated with offsets, so that a batch stays valid when the number of trainer
ranks changes. An optional stream is stored only for the samples that have it. The header has a digest of the whole
file, so that a reader needs nothing else to find damage.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from headrace.rollout.digest import NO_DIGEST, digest_of
from headrace.rollout.schema import SCHEMA, DamagedFile, decode_versioned
from headrace.rollout.types import TOKEN_ARRAYS, Rollout, Sample

_HEADER_KEY = "headrace"
_STREAM = "stream."
_PRESENT = "present."
_DIGEST = re.compile(rb'\\"file_digest\\":\\"(.{32})\\"', re.DOTALL)
"""The digest in the header, which is JSON in a string of JSON. It is computed with zeros in its own place."""


class BatchSample(msgspec.Struct):
    """A sample with its environment and the index of its rollout, by which the trainer reports metrics."""

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


def batch_of(step: int, incarnation: int, kept: Sequence[Rollout]) -> Batch:
    """Return a batch of all samples of the kept rollouts, in order."""
    samples = [
        BatchSample(sample, rollout.env, index) for index, rollout in enumerate(kept) for sample in rollout.samples
    ]
    draws = list(dict.fromkeys(rollout.draw_id for rollout in kept))
    return Batch(step, incarnation, samples, draws, {"rollouts": len(kept), "samples": len(samples)})


class _Header(msgspec.Struct):
    """The batch's entry in the metadata of the safetensors file."""

    schema: int
    step: int
    incarnation: int
    envs: list[str]
    counts: dict[str, int]
    draw_ids: list[int]
    file_digest: str = ""
    """Digest of the whole file; empty in files of older versions."""


class _SafetensorsHeader(msgspec.Struct):
    """The JSON header of a safetensors file, of which only the metadata is decoded."""

    metadata: dict[str, str] = msgspec.field(name="__metadata__", default_factory=dict)


def encode_batch(batch: Batch) -> bytes:
    """Return the batch file's bytes, after checking that every stream is aligned with its tokens."""
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
    header = _Header(SCHEMA, batch.step, batch.incarnation, envs, batch.counts, batch.draw_ids, NO_DIGEST.decode())
    content: bytes = save(columns, metadata={_HEADER_KEY: msgspec.json.encode(header).decode()})
    place = _DIGEST.search(content)
    assert place is not None
    return b"".join((content[: place.start(1)], digest_of(content).encode(), content[place.end(1) :]))


def read_batch(path: Path) -> Batch:
    """Read a batch file, checking its digest, if any; unknown streams are kept as they are. Raises `DamagedFile`."""
    content = path.read_bytes()
    head = memoryview(content)[8 : 8 + int.from_bytes(content[:8], "little")]
    if (place := _DIGEST.search(head)) is not None:
        start, end = 8 + place.start(1), 8 + place.end(1)
        parts = content[:start], NO_DIGEST, memoryview(content)[end:]
        if digest_of(*parts) != content[start:end].decode(errors="replace"):
            raise DamagedFile("the batch is damaged: its content does not match its digest", file=path)
    try:
        metadata = msgspec.json.decode(head, type=_SafetensorsHeader).metadata
        if _HEADER_KEY not in metadata:
            raise DamagedFile("not a Headrace batch: its header is missing", file=path)
        return _assemble(decode_versioned(metadata[_HEADER_KEY], _Header, str(path)), load(content))
    except (SafetensorError, msgspec.DecodeError, KeyError, IndexError, ValueError, TypeError, OverflowError) as error:
        raise DamagedFile(f"not a readable batch: {type(error).__name__}: {error}", file=path) from error


def _assemble(header: _Header, columns: dict[str, np.ndarray]) -> Batch:
    """Cut the columns into samples."""
    offsets, obs_offsets = columns["offsets"], columns["obs_offsets"]
    samples = []
    for index in range(len(offsets) - 1):
        span = slice(offsets[index], offsets[index + 1])
        obs = columns["obs_spans"][obs_offsets[index] : obs_offsets[index + 1]]
        arrays: dict[str, Any] = {name: columns[name][span] for name in TOKEN_ARRAYS}
        spans = [(int(a), int(b), int(c), int(d)) for a, b, c, d in obs]
        prompt_length, temperature = int(columns["prompt_lengths"][index]), float(columns["temperatures"][index])
        samples.append(Sample(**arrays, prompt_length=prompt_length, temperature=temperature, obs_spans=spans))
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
