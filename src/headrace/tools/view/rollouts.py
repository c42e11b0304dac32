"""The rollouts of a step or of an evaluation: the groups, one rollout with all its tokens, and a search over texts.

Per-token values travel as base64 of little-endian arrays: a rollout of 32,000 tokens has half a million of them.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.errors import BadInput
from headrace.rollout.routing import GradientShare, gradient_shares, token_gradients
from headrace.rollout.types import Rollout, Sample
from headrace.tools.view.charts import charted
from headrace.tools.view.runs import NotFound, ViewedRun, cached, identity, main_settings
from headrace.tools.view.token_text import find_token_texts
from headrace.transport.rollout_files import ROW_GROUP_ROLLOUTS, STREAMED_ROLLOUTS, RolloutFiles
from headrace.transport.rollout_tables import SavedRollout
from headrace.transport.run_dir import RolloutKind, read_header

LISTED = {
    "agent": "agent", "episode": "episode", "trainable": "trainable", "reward": "reward", "advantage_mean": "advantage",
    "completion_tokens": "tokens", "num_turns": "turns", "version_min": "version_min", "version_max": "version_max",
    "truncated": "truncated", "stop_reason": "stop_reason", "drop_reason": "drop_reason",
    "error_reason": "error_reason", "seconds": "seconds",
}  # fmt: skip
"""Columns of a rollout file that the list of a step has, with their names there."""
PREVIEW_CHARS = 200
SNIPPET_CHARS = 60
MAX_HITS = 500
SMALL_FILE_BYTES = 1 << 20
"""Size of a rollout file below which all of its rollouts are read when one is needed."""
EXPORTED = ("trainer_logprobs", "ratio", "entropy", "mismatch_kl", "gradient", "share")
COLUMNS = {
    "advantages": ("advantage", "credit of the token, as the trainer received it", "rollout", "diverging"),
    "logprobs": ("logprob", "log probability that the engine sampled it with", "rollout", "sequential"),
    "versions": ("version", "policy version that sampled it", "rollout", "category"),
    "mask": ("mask", "whether the policy sampled it", "rollout", "category"),
    "rl_weights": ("rl weight", "weight in the rl loss", "rollout", "sequential"),
    "ce_weights": ("ce weight", "weight in the cross-entropy", "rollout", "sequential"),
    "ref_kl_weights": ("ref_kl weight", "weight in the distillation loss", "rollout", "sequential"),
    "ref_logprobs": ("reference logprob", "log probability under the reference model", "rollout", "sequential"),
    "trainer_logprobs": ("trainer logprob", "under the weights before the step", "export", "sequential"),
    "ratio": ("ratio", "probability of the trainer over that of the engine", "export", "ratio"),
    "entropy": ("entropy", "of the trainer's distribution at this place, in nats", "export", "sequential"),
    "mismatch_kl": ("mismatch", "ratio - log ratio - 1", "export", "sequential"),
    "masked": ("masked", "whether a loss masked, clipped or capped it", "export", "category"),
    "gradient": ("gradient", "dL/dt of the step's loss, t its logprob", "export", "diverging"),
    "share": ("share of the gradient", "|dL/dt| over its sum over all tokens of the step", "export", "sequential"),
    "share_estimate": (
        "share, estimated", "|dL/dt| at the policy that sampled it, over its sum over the step", "estimate",
        "sequential",
    ),
}  # fmt: skip
"""Title, description, source and kind of colours of per-token values."""


def read_rows(path: Path, names: list[str]) -> list[dict[str, Any]]:
    """Read columns of a rollout file, those that it has, without checking its digest."""
    try:
        with pq.ParquetFile(path) as file:
            columns = [name for name in names if name in file.schema_arrow.names]
            rows: list[dict[str, Any]] = file.read(columns=columns).to_pylist()
            return rows
    except (pa.ArrowException, OSError) as error:
        raise BadInput(f"not a readable Parquet file: {error}", file=path) from error


def file_of(run: ViewedRun, kind: RolloutKind, step: int) -> Path:
    path = kind.path(run.dir.rollouts, step)
    if not path.is_file():
        fix = "A run keeps the newest orchestrator.keep_rollouts steps."
        raise NotFound("no rollouts are on disk", key="step", value=step, fix=fix)
    return path


def list_step(run: ViewedRun, step: int) -> dict[str, Any]:
    """Return the groups of a step, and its rollouts by column."""
    metrics = {}
    for name, (steps, values) in run.metrics.points(charted(run.metrics)).items():
        if len(place := np.flatnonzero(steps == step)):
            metrics[name] = float(values[place[0]])
    part = run.dir.tokens.path(step) / "part-0.parquet"
    exported = part.is_file()
    return {
        **step_list(run, RolloutKind.TRAIN, step),
        "step": step,
        "metrics": metrics,
        "exported": exported,
        "sequences": read_header(pq.read_schema(part).metadata, str(part)).sequences if exported else None,
    }


def step_list(run: ViewedRun, kind: RolloutKind, step: int) -> dict[str, Any]:
    """Return the groups and rollouts of a file, without what depends on other files."""
    path = file_of(run, kind, step)
    listed: dict[str, Any] = cached(path, "list", lambda: _list(path))
    return listed


def _list(path: Path) -> dict[str, Any]:
    rows = read_rows(path, ["env", "task_key", "group_id", "draw_id", "messages", *LISTED])
    groups: dict[str, dict[str, Any]] = {}
    numbers_of: list[int] = []
    for number, row in enumerate(rows):
        group = groups.setdefault(row["group_id"], {
            "index": len(groups), "id": row["group_id"], "env": row["env"], "task_key": row["task_key"],
            "draw": row["draw_id"], "rows": [],
        })  # fmt: skip
        group["rows"].append(number)
        numbers_of.append(group["index"])
    for group in groups.values():
        rewards = np.array([rows[number]["reward"] for number in group["rows"]], np.float64)
        finite = rewards[np.isfinite(rewards)]
        group["mean"], group["std"] = (float(finite.mean()), float(finite.std())) if len(finite) else (None, None)
        order = np.argsort(-np.nan_to_num(rewards, nan=-np.inf), kind="stable")
        group["rows"] = [group["rows"][place] for place in order]
    columns: dict[str, list[Any]] = {title: [row.get(name) for row in rows] for name, title in LISTED.items()}
    columns["drop_reason"] = [reason or "" for reason in columns["drop_reason"]]
    columns |= {"row": list(range(len(rows))), "group": numbers_of}
    columns["preview"] = [_preview(msgspec.json.decode(row["messages"])) for row in rows]
    return {"groups": list(groups.values()), "rollouts": columns}


def text_of(message: dict[str, Any]) -> str:
    """Return the text of a message of any form."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text", "") if isinstance(part, dict) else str(part) for part in content]
        return "\n".join(str(part) for part in parts)
    return content if isinstance(content, str) else ""


def _preview(messages: Any) -> str:
    """Return the beginning of the last message of the model."""
    answers = [m for m in messages if isinstance(m, dict) and m.get("role") == "assistant"]
    return text_of(answers[-1])[:PREVIEW_CHARS] if answers else ""


def rows_of_group(run: ViewedRun, kind: RolloutKind, step: int, row: int) -> tuple[int, ...]:
    """Return the rows of a rollout's group."""
    listed = step_list(run, kind, step)
    if row >= len(listed["rollouts"]["group"]):
        raise NotFound(f"step {step} has fewer rollouts", key="row", value=row)
    return tuple(sorted(listed["groups"][listed["rollouts"]["group"][row]]["rows"]))


def read_rollouts(
    run: ViewedRun, kind: RolloutKind, step: int, rows: tuple[int, ...] | None = None
) -> dict[int, SavedRollout]:
    """Return rollouts by row, or all. What was read last is kept: what explains a rollout needs those of its group."""
    path = file_of(run, kind, step)
    is_small = path.stat().st_size < SMALL_FILE_BYTES
    rollouts = _read_rollouts(run.dir.rollouts, kind, step, None if is_small else rows, identity(path))
    return rollouts if rows is None else {row: rollouts[row] for row in rows}


@lru_cache(maxsize=1)
def _read_rollouts(
    folder: Path, kind: RolloutKind, step: int, rows: tuple[int, ...] | None, file: object
) -> dict[int, SavedRollout]:
    return dict(
        RolloutFiles(folder, kind).stream(step, rows, ROW_GROUP_ROLLOUTS if rows is None else STREAMED_ROLLOUTS)
    )


def read_saved(run: ViewedRun, kind: RolloutKind, step: int, row: int) -> SavedRollout:
    return read_rollouts(run, kind, step, rows_of_group(run, kind, step, row))[row]


def describe_rollout(run: ViewedRun, step: int, row: int, kind: RolloutKind = RolloutKind.TRAIN) -> dict[str, Any]:
    """Return a rollout with its messages and every recorded value of each token."""
    saved = read_saved(run, kind, step, row)
    rollout, notes = saved.rollout, []
    texts = find_token_texts(run.dir, main_settings(run.settings())["model"])
    if texts is None:
        notes.append("The tokenizer of the model is not on this machine: tokens are shown by their numbers.")
    samples: list[dict[str, Any]] = []
    exported = read_export(run, step, row, rollout) if kind is RolloutKind.TRAIN else [{} for _ in rollout.samples]
    scale = None if saved.drop_reason or kind is RolloutKind.EVAL else step_scale(run, step)
    for sample, values in zip(rollout.samples, exported, strict=True):
        if scale:
            values["share_estimate"] = share_estimate(sample, scale)
        samples.append({
            "prompt_length": sample.prompt_length,
            "temperature": sample.temperature,
            "length": len(sample),
            "text": None if texts is None else texts.of(sample.token_ids.tolist()),
            "ids": compact(sample.token_ids),
            "values": {name: compact(array) for name, array in {**_recorded(sample), **values}.items()},
        })  # fmt: skip
    names = dict.fromkeys(name for sample in samples for name in sample["values"])
    plain = ("env", "task_key", "group_id", "episode", "agent", "trainable", "rewards", "metrics", "truncated")
    return {
        **{name: getattr(rollout, name) for name in plain},
        "step": step,
        "row": row,
        "group": step_list(run, kind, step)["rollouts"]["group"][row],
        "draw": rollout.draw_id,
        "reward": finite(rollout.reward),
        "advantage": rollout.mean_advantage,
        "stop_reason": rollout.stop_reason,
        "drop_reason": saved.drop_reason,
        "error_reason": rollout.error.reason if rollout.error else None,
        "error": rollout.error.detail if rollout.error else None,
        "seconds": rollout.timings.get("episode"),
        "finish_reasons": [turn.finish_reason for turn in rollout.turns],
        "messages": rollout.messages,
        "columns": {name: _column_info(name) for name in names},
        "samples": samples,
        "notes": notes,
    }  # fmt: skip


def _column_info(name: str) -> dict[str, str]:
    words = COLUMNS.get(name, (name.replace("_", " "), "a stream of the algorithm", "rollout", "sequential"))
    return dict(zip(("title", "description", "source", "scale"), words, strict=True))


def _recorded(sample: Sample) -> dict[str, np.ndarray]:
    """Return the values of a sample's tokens that its file has; logprobs only where a model sampled."""
    one_number = {name: values for name, values in sample.streams.items() if values.ndim == 1}
    logprobs = np.where(sample.mask, sample.logprobs, np.nan)
    return {"mask": sample.mask, "versions": sample.versions, "logprobs": logprobs, **one_number}


def compact(values: np.ndarray) -> dict[str, Any]:
    """Return an array for JSON: base64 of little-endian numbers, or one value and its count."""
    kind, dtype = ("u8", "u1") if values.dtype == np.bool_ else ("f32", "<f4")
    if np.issubdtype(values.dtype, np.integer):
        kind, dtype = "i32", "<i4"
    narrow = np.ascontiguousarray(values, dtype)
    if len(narrow) > 1 and np.all(narrow == narrow[0]):
        return {"type": kind, "fill": narrow[0].item(), "length": len(narrow)}
    return {"type": kind, "data": base64.b64encode(narrow.tobytes()).decode()}


def finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def read_export(run: ViewedRun, step: int, row: int, rollout: Rollout) -> list[dict[str, np.ndarray]]:
    """Return what the trainer exported of each sample of a rollout; empty for a sample that it did not."""
    values: list[dict[str, np.ndarray]] = [{} for _ in rollout.samples]
    path = run.dir.tokens.path(step)
    if not path.is_dir():
        return values
    table = _read_tokens(path, rows_of_group(run, RolloutKind.TRAIN, step, row), identity(path))
    table = table.filter(pc.equal(table["rollout"], row))
    masks = [name for name in table.column_names if name.endswith("_masked")]
    open_samples = list(range(len(rollout.samples)))
    for number in dict.fromkeys(table["sample"].to_pylist()):
        part = table.filter(pc.equal(table["sample"], number))
        tokens = part["token_id"].to_numpy()
        place = next((n for n in open_samples if np.array_equal(rollout.samples[n].token_ids, tokens)), None)
        if place is None:
            continue
        open_samples.remove(place)
        values[place] = {name: _as_float(part[name]) for name in EXPORTED}
        if masks:
            values[place]["masked"] = np.any([np.nan_to_num(_as_float(part[name])) for name in masks], axis=0)
    return values


@lru_cache(maxsize=1)
def _read_tokens(path: Path, rows: tuple[int, ...], folder: object) -> pa.Table:
    """Return the exported tokens of rollouts in their order; those of the last group are kept."""
    table = pq.read_table(path, filters=[("rollout", "in", rows)])
    return table.sort_by([("rollout", "ascending"), ("sample", "ascending"), ("position", "ascending")])


def _as_float(column: pa.ChunkedArray) -> np.ndarray:
    """Return a column as float32, NaN for null."""
    numbers = column.cast(pa.uint8()) if pa.types.is_boolean(column.type) else column
    return np.asarray(numbers.cast(pa.float32()).to_numpy())


class StepScale(msgspec.Struct):
    """Sums of gradients and members of the trained rollouts of a step, by loss component."""

    components: dict[str, GradientShare]

    @property
    def total(self) -> float:
        return sum(total / members for total, members in self.components.values() if members)


def step_scale(run: ViewedRun, step: int) -> StepScale:
    """Return what shares of the step's gradient are measured against."""
    path, files = file_of(run, RolloutKind.TRAIN, step), RolloutFiles(run.dir.rollouts)

    def add_up() -> StepScale:
        components: dict[str, GradientShare] = {}
        is_small = path.stat().st_size < SMALL_FILE_BYTES
        rows = iter(read_rollouts(run, RolloutKind.TRAIN, step).items()) if is_small else files.stream(step)
        for _, saved in rows:
            if saved.drop_reason or saved.rollout.error is not None or not saved.rollout.trainable:
                continue
            for name, share in gradient_shares(saved.rollout).items():
                before = components.get(name, GradientShare(0.0, 0))
                components[name] = GradientShare(before.total + share.total, before.members + share.members)
        return StepScale(components)

    scale: StepScale = cached(path, "scale", add_up)
    return scale


def share_estimate(sample: Sample, scale: StepScale) -> np.ndarray:
    """Return each token's share of the step's gradient at the policy that sampled it; the step's sum is 1."""
    shares = np.zeros(len(sample))
    for component, (members, sizes) in token_gradients(sample).items():
        if component in scale.components and scale.total > 0:
            shares[members] += sizes / scale.components[component].members / scale.total
    return shares


def search(run: ViewedRun, text: str, limit: int) -> dict[str, Any]:
    """Return the places of a text in the messages of the saved rollouts, the newest step first."""
    if not text:
        raise BadInput("empty", key="text", fix="Give a text to look for.")
    hits: list[dict[str, Any]] = []
    for hit in _hits(run, text):
        if len(hits) == min(limit, MAX_HITS):
            return {"hits": hits, "more": True}
        hits.append(hit)
    return {"hits": hits, "more": False}


def _hits(run: ViewedRun, text: str) -> Iterator[dict[str, Any]]:
    pattern = re.compile(re.escape(text), re.IGNORECASE)
    files = [(step, kind, path) for kind in RolloutKind for step, path in kind.files(run.dir.rollouts).items()]
    for step, kind, path in sorted(files, key=lambda file: -file[0]):
        for number, row in enumerate(read_rows(path, ["env", "reward", "messages"])):
            for message in msgspec.json.decode(row["messages"]):
                content = text_of(message)
                if match := pattern.search(content):
                    place, end = match.span()
                    yield {
                        "step": step, "row": number, "kind": "train" if kind is RolloutKind.TRAIN else "eval",
                        "env": row["env"], "role": str(message.get("role", "")), "reward": row["reward"],
                        "before": content[max(0, place - SNIPPET_CHARS) : place], "match": content[place:end],
                        "after": content[end : end + SNIPPET_CHARS],
                    }  # fmt: skip
                    break
