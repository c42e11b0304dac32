"""A step's rollouts as Parquet: every column as it was, readable by others, whole or absent, and not for ever."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from headrace.rollout.merge import merge_turns
from headrace.rollout.types import Rollout, RolloutError, Sample, Turn
from headrace.transport.rollout_files import ROW_GROUP_ROLLOUTS, dropped_files, write_dropped, write_rollouts
from headrace.transport.run_dir import RolloutKind

FILE = "step-00000003.parquet"


def two_turns() -> Rollout:
    """Sampled by versions 4 and 5, in two samples, one of them without credit."""
    credited = Sample([1, 2, 3], [False, True, True], [0.0, -1.0, -2.0], [-1, 4, 5], 1, 0.5)
    credited.set_stream("advantages", [0.0, 1.0, 3.0])
    credited.set_stream("ref_logprobs", [0.0, -0.5, -0.25])
    credited.set_stream("surprise", np.array([7, 8, 9]))
    return Rollout(
        env="reverse",
        task_key="t",
        group_id="3-1",
        draw_id=3,
        episode=2,
        credited=8,
        reward=0.75,
        rewards={"right": 1.0, "short": -0.25},
        metrics={"length": 2.0},
        messages=[{"role": "user", "content": "héllo"}],
        turns=[Turn([1], [2, 3], [-1.0, -2.0], [4, 5], 0.5), Turn([9], [8], [-1.0], [4], 0.5, "length")],
        samples=[credited, Sample([9, 8], [False, True], [0.0, -1.0], [-1, 4], 1, 0.5)],
        stop_reason="stop",
        timings={"episode": 1.5},
    )


def failed() -> Rollout:
    return Rollout(env="reverse", trainable=False, error=RolloutError("timeout", "after 60 s"))


def rows_of(directory: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(directory / FILE).to_pylist()
    return rows


def test_every_column_reads_back_as_it_was(tmp_path: Path) -> None:
    write_rollouts(tmp_path, 3, [two_turns()], [])
    (row,) = rows_of(tmp_path)
    samples = row.pop("samples")
    assert row == {
        "step": 3,
        "env": "reverse",
        "task_key": "t",
        "group_id": "3-1",
        "draw_id": 3,
        "episode": 2,
        "credited": 8,
        "agent": "policy",
        "trainable": True,
        "reward": 0.75,
        "rewards": [("right", 1.0), ("short", -0.25)],
        "metrics": [("length", 2.0)],
        "advantage_mean": 2.0,  # of 1 and 3
        "messages": '[{"role":"user","content":"héllo"}]',
        "num_turns": 2,
        "completion_tokens": 3,
        "version_min": 4,
        "version_max": 5,
        "truncated": False,
        "stop_reason": "stop",
        "drop_reason": None,
        "error_reason": None,
        "error": None,
        "seconds": 1.5,
        "finish_reasons": ["stop", "length"],
    }
    assert samples[0] == {
        "prompt_length": 1,
        "temperature": 0.5,
        "token_ids": [1, 2, 3],
        "mask": [False, True, True],
        "logprobs": [0.0, -1.0, -2.0],
        "versions": [-1, 4, 5],
        "advantages": [0.0, 1.0, 3.0],
        "rl_weights": None,
        "ce_weights": None,
        "ref_kl_weights": None,
        "ref_logprobs": [0.0, -0.5, -0.25],
        "other_streams": [("surprise", [7.0, 8.0, 9.0])],
        "obs_spans": [],
        "roles": None,
    }
    assert samples[1]["token_ids"] == [9, 8]
    assert samples[1]["advantages"] is None and samples[1]["other_streams"] == []


def test_observations_say_where_they_are_and_who_wrote_them(tmp_path: Path) -> None:
    turns = [
        Turn([1, 2], [3], [-1.0], [4], 1.0, prompt_roles=[0, 2]),
        Turn([1, 2, 3, 4, 5], [6], [-1.0], [4], 1.0, prompt_roles=[0, 2, 3, 0, 4]),
    ]
    unknown = [Turn([1], [2], [-1.0], [4], 1.0), Turn([1, 2, 3], [4], [-1.0], [4], 1.0)]
    write_rollouts(tmp_path, 3, [Rollout(turns=t, samples=merge_turns(t)) for t in (turns, unknown)], [])
    known, unknown = (row["samples"][0] for row in rows_of(tmp_path))
    assert known["obs_spans"] == [{"start": 1, "turn": 1, "prompt_start": 3, "length": 2}]
    assert known["roles"] == [0, 0, 0, 0, 4, 0]  # of the chat format, and of a tool
    assert unknown["obs_spans"] == [{"start": 1, "turn": 1, "prompt_start": 2, "length": 1}]
    assert unknown["roles"] is None


def test_a_dropped_rollout_says_why_and_has_no_reward(tmp_path: Path) -> None:
    write_rollouts(tmp_path, 3, [], [(failed(), "timeout"), (two_turns(), "zero_advantage")])
    error, filtered = rows_of(tmp_path)
    assert (error["drop_reason"], error["error_reason"], error["error"]) == ("timeout", "timeout", "after 60 s")
    assert (error["reward"], error["version_min"], error["version_max"]) == (None, None, None)
    assert error["samples"] == [] and not error["trainable"]
    assert (filtered["drop_reason"], filtered["error_reason"]) == ("zero_advantage", None)


def test_more_rollouts_than_are_written_at_once_keep_their_order(tmp_path: Path) -> None:
    count = 2 * ROW_GROUP_ROLLOUTS + 1
    rollouts = []
    for index in range(count):
        tokens = list(range(index % 5))
        sample = Sample(tokens, [True] * len(tokens), [0.0] * len(tokens), [0] * len(tokens), 0)
        rollouts.append(Rollout(draw_id=index, reward=0.0, samples=[sample] * (index % 3)))
    write_rollouts(tmp_path, 3, rollouts, [])
    rows = rows_of(tmp_path)
    assert [row["draw_id"] for row in rows] == list(range(count))
    assert all(len(row["samples"]) == row["draw_id"] % 3 for row in rows)
    assert all(s["token_ids"] == list(range(row["draw_id"] % 5)) for row in rows for s in row["samples"])


def test_a_step_of_nothing_has_the_same_columns(tmp_path: Path) -> None:
    write_rollouts(tmp_path, 3, [], [])
    write_rollouts(tmp_path, 4, [two_turns()], [])
    empty, full = (pq.read_schema(path) for path in sorted(tmp_path.iterdir()))
    assert empty == full


def test_the_newest_files_are_kept(tmp_path: Path) -> None:
    paths = [write_rollouts(tmp_path, step, [two_turns()], [])[0] for step in range(1, 5)]
    assert RolloutKind.TRAIN.old_files(tmp_path, keep_last=2) == paths[:2]


def test_a_steps_file_takes_over_the_rows_of_what_was_dropped_before_it_shipped(tmp_path: Path) -> None:
    for draw in range(3):
        write_dropped(tmp_path, 3, [(Rollout(draw_id=draw, reward=1.0), "gated")])
    write_dropped(tmp_path, 4, [(Rollout(draw_id=9), "gated")])
    _, parts = write_rollouts(tmp_path, 3, [two_turns()], [(failed(), "timeout")])
    assert parts == dropped_files(tmp_path, 3) and len(parts) == 3
    rows = rows_of(tmp_path)
    assert [row["drop_reason"] for row in rows] == [None, "timeout", "gated", "gated", "gated"]
    assert [row["draw_id"] for row in rows][2:] == [0, 1, 2]
    assert {row["step"] for row in rows} == {3}


def test_what_a_killed_process_had_half_written_is_removed(tmp_path: Path) -> None:
    (tmp_path / "step-00000002.tmp").write_bytes(b"PAR1 and then nothing")
    write_rollouts(tmp_path, 3, [two_turns()], [])
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_a_file_that_fails_half_way_is_not_seen(tmp_path: Path) -> None:
    broken = two_turns()
    broken.messages = [{"role": "user", "content": object()}]
    with pytest.raises(TypeError):
        write_rollouts(tmp_path, 3, [broken], [])
    assert not list(tmp_path.glob("*.parquet"))


def test_pandas_reads_it(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    write_rollouts(tmp_path, 3, [two_turns()], [(failed(), "timeout")])
    frame = pandas.read_parquet(tmp_path / FILE)
    assert frame.groupby("env").reward.mean().to_dict() == {"reverse": 0.75}
    assert frame.samples[0][0]["advantages"].tolist() == [0.0, 1.0, 3.0]


def test_duckdb_averages_and_unnests_it(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    write_rollouts(tmp_path, 3, [two_turns()], [(failed(), "timeout")])
    source = f"'{tmp_path}/*.parquet'"
    assert duckdb.sql(f"SELECT env, avg(reward) FROM {source} GROUP BY env").fetchall() == [("reverse", 0.75)]
    tokens = f"SELECT unnest(sample.token_ids) FROM (SELECT unnest(samples) AS sample FROM {source})"
    assert [token for (token,) in duckdb.sql(tokens).fetchall()] == [1, 2, 3, 9, 8]


def test_writing_and_reading_rollouts_do_not_load_pandas(tmp_path: Path) -> None:
    """It takes a third of a second."""
    code = f"""
import sys
from pathlib import Path
from headrace.transport.rollout_files import RolloutFiles, write_rollouts
from headrace.rollout.types import Rollout, Sample
sample = Sample([1, 2], [False, True], [0.0, -1.0], [0, 0], 1)
rollouts = [Rollout(reward=1.0, rewards={{"a": 1.0}}, samples=[sample]) for _ in range(3)]
write_rollouts(Path({str(tmp_path)!r}), 3, rollouts, [])
assert [row for row, _ in RolloutFiles(Path({str(tmp_path)!r})).stream(3, [0, 2])] == [0, 2]
sys.exit("pandas" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
