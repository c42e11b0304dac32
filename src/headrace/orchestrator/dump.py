"""Every rollout of a step as one Parquet file: what was said, which token got which credit, and why it was dropped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.rollout.types import Rollout

_SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("env", pa.string()),
        ("task_key", pa.string()),
        ("group_id", pa.string()),
        ("draw_id", pa.int64()),
        ("agent", pa.string()),
        ("reward", pa.float64()),
        ("rewards", pa.map_(pa.string(), pa.float64())),
        ("metrics", pa.map_(pa.string(), pa.float64())),
        ("messages", pa.string()),
        ("num_turns", pa.int32()),
        ("completion_tokens", pa.int32()),
        ("truncated", pa.bool_()),
        ("stop_reason", pa.string()),
        ("drop_reason", pa.string()),
        ("error", pa.string()),
        ("seconds", pa.float64()),
        (
            "samples",
            pa.list_(
                pa.struct(
                    [
                        ("token_ids", pa.list_(pa.int32())),
                        ("mask", pa.list_(pa.bool_())),
                        ("logprobs", pa.list_(pa.float32())),
                        ("versions", pa.list_(pa.int32())),
                        ("advantages", pa.list_(pa.float32())),
                    ]
                )
            ),
        ),
    ]
)


def write_rollouts(
    directory: Path, step: int, kept: Sequence[Rollout], dropped: Iterable[tuple[Rollout, str]], keep_last: int
) -> None:
    """Write `step-N.parquet`, and delete files older than the newest `keep_last`."""
    rows = [_row(step, rollout, None) for rollout in kept] + [_row(step, r, reason) for r, reason in dropped]
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"step-{step:08d}.parquet"
    temporary = path.with_suffix(".tmp")
    pq.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA), temporary, compression="zstd")
    temporary.replace(path)
    for old in sorted(directory.glob("step-*.parquet"))[:-keep_last]:
        old.unlink()


def _row(step: int, rollout: Rollout, drop_reason: str | None) -> dict[str, object]:
    return {
        "step": step,
        "env": rollout.env,
        "task_key": rollout.task_key,
        "group_id": rollout.group_id,
        "draw_id": rollout.draw_id,
        "agent": rollout.agent,
        "reward": rollout.reward,
        "rewards": list(rollout.rewards.items()),
        "metrics": list(rollout.metrics.items()),
        "messages": msgspec.json.encode(rollout.messages).decode(),
        "num_turns": len(rollout.turns),
        "completion_tokens": rollout.completion_tokens,
        "truncated": rollout.truncated,
        "stop_reason": rollout.stop_reason,
        "drop_reason": drop_reason,
        "error": rollout.error.detail if rollout.error else None,
        "seconds": rollout.timings.get("episode"),
        "samples": [
            {
                "token_ids": sample.token_ids,
                "mask": sample.mask,
                "logprobs": sample.logprobs,
                "versions": sample.versions,
                "advantages": sample.streams.get("advantages"),
            }
            for sample in rollout.samples
        ],
    }
