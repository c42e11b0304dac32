"""A check of an ended run that shares no code with `headrace audit`: own SQL, own reading of the Parquet files."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pyarrow.parquet as pq

from headrace.transport.run_dir import RunDir


def check_journal(run: RunDir, max_steps: int) -> int:
    """Every draw is in one batch and in its Parquet file, or dropped with a reason; returns the number of draws."""
    with closing(sqlite3.connect(f"file:{run.journal}?mode=ro", uri=True)) as database:
        draws = database.execute("SELECT id, state, step, reason FROM draws ORDER BY id").fetchall()
        steps = [step for (step,) in database.execute("SELECT step FROM steps ORDER BY step")]
        ((covered,),) = database.execute("SELECT step FROM covered")
    assert steps == list(range(1, max_steps + 1)) and covered == max_steps
    assert [draw for draw, *_ in draws] == list(range(len(draws)))
    assert {state for _, state, _, _ in draws} <= {"shipped", "dropped"}
    assert all(reason for _, state, _, reason in draws if state == "dropped")
    for step in steps:
        table = pq.read_table(run.rollouts / f"step-{step:08d}.parquet", columns=["draw_id", "drop_reason"]).to_pylist()
        kept = {row["draw_id"] for row in table if row["drop_reason"] is None}
        assert kept == {draw for draw, state, own, _ in draws if state == "shipped" and own == step}, step
    return len(draws)
