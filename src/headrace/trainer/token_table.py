"""The tokens of one optimizer step as a Parquet table, with the values behind their gradients.

A row is a token, in the order of samples and positions. Tokens that no component trains are rows too, with nulls for
values that were not computed. Summed over the rows, `gradient` times the gradient of `trainer_logprobs` is the gradient
of the step's loss before clipping.

A step is a directory with one file per rank, which pyarrow reads as one table; it is published atomically. Left out on
purpose: text, which `headrace tokens` adds, and the share of each loss component in a token's gradient.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from headrace.rollout.batch import Batch
from headrace.rollout.digest import NO_DIGEST
from headrace.rollout.packing import NO_SAMPLE, STREAM_DEFAULTS
from headrace.rollout.types import NOT_SAMPLED
from headrace.trainer.ranks import Ranks
from headrace.trainer.tokens import COMPONENTS, StepTokens, TokenTrace
from headrace.transport.digests import PARQUET_KEY, seal_parquet
from headrace.transport.files import discard
from headrace.transport.run_dir import HEADER_KEY, ExportHeader, TokenExports, read_header

_NUMBER, _FLAG, _INTEGER, _NAME = pa.float32(), pa.bool_(), pa.int32(), pa.string()

COLUMNS: dict[str, tuple[pa.DataType, str]] = {
    "sample": (_INTEGER, "number of the sample in the batch"),
    "env": (_NAME, "environment"),
    "rollout": (_INTEGER, "number of the rollout in the batch, which is its row in rollouts/step-N.parquet"),
    "position": (_INTEGER, "place in the sample, from 0"),
    "token_id": (_INTEGER, "the token"),
    "loss_mask": (_FLAG, "whether the policy sampled it and its environment lets it train"),
    "temperature": (_NUMBER, "temperature of sampling, at which both logprobs are"),
    "version": (_INTEGER, "policy version that sampled it; null: none did"),
    "advantages": (_NUMBER, "credit; null: the sample has none, which counts as 0"),
    "rl_weights": (_NUMBER, "weight in the rl loss; null: the sample has none, which counts as 1"),
    "ce_weights": (_NUMBER, "weight in the ce loss; null: the sample has none, which counts as 0"),
    "ref_kl_weights": (_NUMBER, "weight in the ref_kl loss; null: the sample has none, which counts as 0"),
    "ref_logprobs": (_NUMBER, "logprob under the reference model; null: the sample has none"),
    "k2_weights": (_NUMBER, "weight of the k2 penalty; null: the sample has none, which counts as 0"),
    "k3_weights": (_NUMBER, "weight of the k3 penalty; null: the sample has none, which counts as 0"),
    "kl_logprobs": (_NUMBER, "logprob under the reference of the penalty; null: no penalty trains the token"),
    "trainer_logprobs": (_NUMBER, "t, the logprob under the weights before this step; null: no loss trains the token"),
    "inference_logprobs": (_NUMBER, "i, the logprob it was sampled with; null: it was not, and no loss asks for it"),
    "log_ratio": (_NUMBER, "l = t - i"),
    "ratio": (_NUMBER, "rho = exp(l)"),
    "mismatch_kl": (_NUMBER, "rho - l - 1"),
    "entropy": (_NUMBER, "of the trainer's distribution at this place, in nats"),
    **{f"in_{name}": (_FLAG, f"whether the {name} loss trains it") for name in COMPONENTS},
    **{
        f"{name}_masked": (_FLAG, f"whether the {name} loss masked, clipped or capped it; null: no member, or not said")
        for name in COMPONENTS
    },
    "gradient": (_NUMBER, "dL/dt, of the loss of the whole step"),
    "share": (_NUMBER, "|dL/dt| over its sum over all tokens of the step; null: that sum is 0 or not finite"),
}
"""Type and meaning of each column."""

SCHEMA = pa.schema([pa.field(name, kind, metadata={"description": words}) for name, (kind, words) in COLUMNS.items()])

ROW_GROUP_ROWS = 1 << 16
"""Rows of a row group: readers of one sample skip the others."""

_Column = tuple[np.ndarray, np.ndarray]
"""A value for each token of the step, and whether it is valid."""


def write_token_table(directory: Path, trace: TokenTrace, batch: Batch, ranks: Ranks, limit: int | None = None) -> None:
    """Write a traced step, or the `limit` sequences of each rank with the largest gradients.

    Every rank must call this, with its own trace and the whole batch.
    """
    gradient_sum = ranks.all_reduce(torch.tensor(np.abs(trace.gradients).sum(dtype=np.float64))).item()
    table = token_table(trace, batch, gradient_sum, limit)

    def fill(draft: Path) -> None:
        part = draft / f"part-{ranks.index}.parquet"
        # No dictionaries of numbers: zstd alone is faster and smaller.
        with pq.ParquetWriter(part, table.schema, compression="zstd", use_dictionary=["env"]) as writer:
            writer.write_table(table, row_group_size=ROW_GROUP_ROWS)
            writer.add_key_value_metadata({PARQUET_KEY: NO_DIGEST})
        seal_parquet(part)

    ranks.write_directory(directory, fill)


def delete_sampled_exports(exports: TokenExports, keep: Collection[int]) -> None:
    """Delete exports with only some sequences of a step, except those of the steps in `keep`."""
    for step in exports.steps():
        part = exports.path(step) / "part-0.parquet"
        if step not in keep and read_header(pq.read_schema(part).metadata, str(part)).sequences is not None:
            discard(exports.path(step))


def token_table(trace: TokenTrace, batch: Batch, gradient_sum: float, limit: int | None = None) -> pa.Table:
    """Return the rows of one rank's tokens; `gradient_sum` is the sum of |dL/dt| over all ranks."""
    tokens = trace.tokens
    sources = np.repeat(tokens.sources, tokens.lengths)
    chosen = _with_largest_gradients(trace, limit) if limit is not None else tokens.sources != NO_SAMPLE
    rows = np.argsort(sources, kind="stable")
    rows = rows[np.repeat(chosen, tokens.lengths)[rows]]
    columns = {**_batch_columns(tokens, sources, batch), **_model_columns(trace), **_loss_columns(trace, gradient_sum)}
    arrays = {}
    for name, (values, valid) in columns.items():
        kind = SCHEMA.field(name).type
        with np.errstate(over="ignore"):
            narrow = values[rows].astype(kind.to_pandas_dtype())
        arrays[name] = pa.array(narrow, kind, mask=~valid[rows])
    for name, kind in (("env", _NAME), ("rollout", _INTEGER)):
        arrays[name] = pa.array([getattr(entry, name) for entry in batch.samples], kind).take(arrays["sample"])
    finite = gradient_sum if math.isfinite(gradient_sum) else None
    sequences = len(batch.samples) if limit is not None else None
    header = ExportHeader(batch.step, batch.incarnation, trace.counts, finite, sequences)
    schema = SCHEMA.with_metadata({HEADER_KEY: msgspec.json.encode(header)})
    return pa.Table.from_arrays([arrays[name] for name in SCHEMA.names], schema=schema)


def _with_largest_gradients(trace: TokenTrace, limit: int) -> np.ndarray:
    """Return which sequences are the `limit` with the largest |gradient| of a token; NaN is larger than any number.

    They contain the `limit` tokens with the largest gradients of all.
    """
    sizes = np.maximum.reduceat(np.nan_to_num(np.abs(trace.gradients), nan=np.inf), trace.tokens.starts)
    sizes[trace.tokens.sources == NO_SAMPLE] = -1.0
    chosen = np.zeros(len(sizes), np.bool_)
    chosen[np.argsort(-sizes, kind="stable")[:limit]] = True
    return chosen & (sizes >= 0)


def _batch_columns(tokens: StepTokens, sources: np.ndarray, batch: Batch) -> dict[str, _Column]:
    """Return the columns that come with the batch."""
    always = np.ones(len(tokens), np.bool_)
    streams: dict[str, _Column] = {}
    for name in STREAM_DEFAULTS:
        shipped = np.array([name in entry.sample.streams for entry in batch.samples], np.bool_)[sources]
        streams[name] = tokens.streams.get(name, np.zeros(len(tokens))), shipped
    reference = tokens.streams.get("kl_logprobs", np.full(len(tokens), np.nan))  # the trainer's own, too
    streams["kl_logprobs"] = reference, ~np.isnan(reference)
    return {
        "sample": (sources, always),
        "position": (np.arange(len(tokens)) - np.repeat(tokens.starts, tokens.lengths), always),
        "token_id": (tokens.token_ids, always),
        "loss_mask": (tokens.mask, always),
        "temperature": (tokens.temperatures, always),
        "version": (tokens.versions, tokens.versions != NOT_SAMPLED),
        **streams,
    }


def _model_columns(trace: TokenTrace) -> dict[str, _Column]:
    """Return logprobs and entropy of the model, and the difference to the engine's logprobs."""
    tokens = trace.tokens
    comparable = (tokens.versions != NOT_SAMPLED) | tokens.members["rl"] | tokens.members["ref_kl"]
    compared = comparable & tokens.scored
    log_ratio = np.where(compared, trace.logprobs - tokens.logprobs, 0.0).astype(np.float64)
    with np.errstate(over="ignore"):  # infinite, as in the loss
        ratio, mismatch = np.exp(log_ratio), np.expm1(log_ratio) - log_ratio
    return {
        "trainer_logprobs": (trace.logprobs, tokens.scored),
        "inference_logprobs": (tokens.logprobs, comparable),
        "log_ratio": (log_ratio, compared),
        "ratio": (ratio, compared),
        "mismatch_kl": (mismatch, compared),
        "entropy": (trace.entropy, tokens.scored),
    }


def _loss_columns(trace: TokenTrace, gradient_sum: float) -> dict[str, _Column]:
    """Return membership, masks and gradients by the losses."""
    tokens, zeros, always = trace.tokens, np.zeros(len(trace.tokens)), np.ones(len(trace.tokens), np.bool_)
    usable = 0 < gradient_sum < math.inf
    return {
        **{f"in_{name}": (members, always) for name, members in tokens.members.items()},
        **{
            f"{name}_masked": (trace.masked.get(name, zeros), members & (name in trace.masked))
            for name, members in tokens.members.items()
        },
        "gradient": (trace.gradients, tokens.scored),
        "share": (np.abs(trace.gradients) / gradient_sum if usable else zeros, tokens.scored & usable),
    }
