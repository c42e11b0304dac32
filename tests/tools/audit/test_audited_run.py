"""The audit of a real run: each kind of change of its files is found, and what was not checked is named."""

import asyncio
import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.errors import Failure
from headrace.launch.saved_config import save
from headrace.rollout.batch import Batch
from headrace.tools.audit import audit_run
from headrace.transport import journal_schema
from headrace.transport.journal import Journal
from headrace.transport.journal_entries import FileRecord
from headrace.transport.run_dir import RolloutKind, RunDir
from tests.orchestrator.test_orchestrator import STEPS, Pipeline

ENVIRONMENTS = [
    {"id": "reverse-text", "curriculum": {"sampler": {"type": "difficulty_pool"}}, "ratio": 1.0},
    {"id": "reverse-text", "name": "with-state", "algo": {"type": "rae"}, "ratio": 1.0},
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> RunDir:
    """A run of the real orchestrator with two algorithms, a curriculum and dropped groups."""
    pipeline = Pipeline(tmp_path_factory.mktemp("finished") / "run", tiny_model, train={"env": ENVIRONMENTS})
    asyncio.run(pipeline.finish())
    save(pipeline.run_config, pipeline.run)
    return pipeline.run


@pytest.fixture
def run(finished: RunDir, tmp_path: Path) -> RunDir:
    shutil.copytree(finished.root, tmp_path / "run")
    return RunDir(tmp_path / "run")


def test_a_finished_run_adds_up_and_everything_is_checked(run: RunDir):
    report = audit_run(run)
    assert (report.problems, report.unchecked) == ([], [])
    with closing(Journal(run.journal, read_only=True)) as journal:
        outcomes = [outcome for of_step in journal.outcomes().values() for outcome in of_step]
        assert sum(bool(outcome.reason) for outcome in outcomes) > 0, "a run without dropped groups shows less"
        assert max(draw.observed or 0 for draw, *_ in journal.draws()) > 0
        assert set(journal.states_by_step()) == {"with-state"}


def rewrite_rows(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the rows of a rollout file."""
    table = pq.read_table(path)
    rows = table.to_pylist()
    for row in rows:
        change(row)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema.remove_metadata()), path)


def flip_rewards(row: dict[str, Any]) -> None:
    row["reward"] = None if row["reward"] is None else 1.0 - row["reward"]


def flip_advantages(row: dict[str, Any]) -> None:
    for sample in row["samples"]:
        sample["advantages"] = None if sample["advantages"] is None else [-a for a in sample["advantages"]]


def write_as_the_run(run: RunDir, *statements: str) -> None:
    """Change rows with the checksums of the run itself: as wrong code, not as a damaged disk."""
    with closing(sqlite3.connect(run.journal, isolation_level=None)) as db:
        journal_schema.prepare_writer(db, run.journal, lambda: 1)
        for statement in statements:
            db.execute(statement)


def record_again(run: RunDir, *paths: Path) -> None:
    with closing(Journal(run.journal)) as journal:
        journal.record_files([FileRecord.of(run.root, path) for path in paths], step=1)


def problems_of(run: RunDir) -> str:
    return "\n".join(audit_run(run).problems)


@pytest.mark.parametrize("change", [flip_rewards, flip_advantages])
def test_changed_rollouts_are_found_by_their_digest(change: Callable[[dict[str, Any]], None], run: RunDir):
    path = RolloutKind.TRAIN.path(run.rollouts, 1)
    rewrite_rows(path, change)
    assert f"{path} is damaged" in problems_of(run)


def test_changed_rewards_differ_from_the_journal_and_give_other_credit(run: RunDir):
    path = RolloutKind.TRAIN.path(run.rollouts, 1)
    rewrite_rows(path, flip_rewards)
    record_again(run, path)
    found = problems_of(run)
    assert "the rewards of draw" in found and "the credit of group" in found


def test_changed_credit_differs_from_the_rewards_and_from_the_batch(run: RunDir):
    path = RolloutKind.TRAIN.path(run.rollouts, 1)
    rewrite_rows(path, flip_advantages)
    record_again(run, path)
    found = problems_of(run)
    assert "the credit of group" in found and f"of {run.batches.path(1)} has other advantages" in found


def test_a_changed_batch_differs_from_the_rollouts(run: RunDir):
    batch = run.batches.read(1)
    batch.samples[0].sample.streams["advantages"] = -np.asarray(batch.samples[0].sample.streams["advantages"])
    run.batches.prepare(Batch(1, batch.incarnation, batch.samples, batch.draw_ids, batch.counts))
    run.batches.announce(1)
    assert f"{run.batches.path(1)} is damaged" in problems_of(run)
    record_again(run, run.batches.path(1))
    assert f"sample 0 of {run.batches.path(1)} has other advantages" in problems_of(run)


@pytest.mark.parametrize("step", [1, STEPS])
def test_a_deleted_file_is_missing(step: int, run: RunDir):
    rollouts, batch = RolloutKind.TRAIN.path(run.rollouts, step), run.batches.path(step)
    for path in (rollouts, batch):
        path.unlink()
    found = problems_of(run)
    assert f"{rollouts} is missing" in found and f"{batch} is missing" in found


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("UPDATE algorithms SET state = '{\"policy\": 0.5}' WHERE step = 2", "in step 2, but its credits give"),
        ("UPDATE draws SET task_key = (SELECT task_key FROM draws WHERE id = 3) WHERE id = 9", "draw 9 has task"),
        ("UPDATE draws SET rewards = '[]' WHERE state = 'shipped'", "the rewards of draw"),
        ("UPDATE draws SET tokens = tokens + 1 WHERE id = 2", "the sampled tokens of draw 2"),
        ("DELETE FROM files WHERE name LIKE 'rollouts/%1.parquet'", ""),
    ],
)
def test_what_the_journal_says_wrongly_is_found_although_its_checksums_match(
    statement: str, expected: str, run: RunDir
):
    write_as_the_run(run, statement)
    report = audit_run(run)
    assert not any("checksum" in problem for problem in report.problems)
    if expected:
        assert expected in "\n".join(report.problems)
    else:
        assert any("digests of rollout files" in what for what in report.unchecked)


def test_environments_drawn_against_the_seed_are_found(run: RunDir):
    write_as_the_run(run, "UPDATE draws SET env = CASE env WHEN 'with-state' THEN 'reverse-text' ELSE 'with-state' END")
    assert "but the seed gives" in problems_of(run)


def test_draws_of_a_start_with_other_settings_are_not_compared(run: RunDir):
    write_as_the_run(run, "UPDATE starts SET settings = 'others'", "UPDATE draws SET task_key = 'x' WHERE id = 9")
    report = audit_run(run)
    assert not any("has task" in problem for problem in report.problems)
    assert any("starts 1" in what for what in report.unchecked)


@pytest.mark.parametrize("flips", [10, pytest.param(300, marks=pytest.mark.full)])
def test_a_flipped_bit_in_the_journal_is_found_or_changes_nothing_that_can_be_read(flips: int, run: RunDir):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng, whole, dump = random.Random(seed), run.journal.read_bytes(), dump_of(run.journal)
    for _ in range(flips):
        place, bit = rng.randrange(len(whole)), rng.randrange(8)
        content = bytearray(whole)
        content[place] ^= 1 << bit
        run.journal.write_bytes(content)
        try:
            problems = audit_run(run).problems
        except Failure as error:
            problems = [str(error)]
        assert problems or dump_of(run.journal) == dump, f"bit {bit} of byte {place}, seed {seed}"


def dump_of(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as db:
        return list(db.iterdump())


@pytest.mark.parametrize("place", [0, 300, -40])
def test_damaged_files_are_problems_not_exceptions(place: int, run: RunDir):
    for path in (run.batches.path(2), RolloutKind.TRAIN.path(run.rollouts, 2)):
        content = bytearray(path.read_bytes())
        content[place] ^= 0xFF
        path.write_bytes(content)
        assert str(path) in problems_of(run)
