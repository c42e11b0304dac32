"""The audit finds what a journal must not say."""

import sqlite3
from pathlib import Path

import msgspec
import pytest

from headrace.cli.main import main
from headrace.orchestrator.audit import find_violations
from headrace.rollout.batch import Batch
from headrace.rollout.digest import digest_of
from headrace.transport.checkpoint_files import STATE, TENSORS, XXH3, BlockDigests, CheckpointMarker
from headrace.transport.files import MARKER, link_tree
from headrace.transport.journal import Journal
from headrace.transport.journal_entries import Draw, Entries, Outcome, Totals
from headrace.transport.run_dir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Two steps of two draws, and one that is still open."""
    run, totals = RunDir(tmp_path), Totals()
    journal = Journal(run.journal)
    for step in (1, 2):
        drawn = [Draw(i, "env", f"key{i}", i) for i in (2 * step - 2, 2 * step - 1)]
        outcomes = [
            Outcome(drawn[0].id, "", 4, 40, {"timeout": 1}, credit=step, rewards=[("policy", 1.0)]),
            Outcome(drawn[1].id, "off_policy", 4, 40, {"off_policy": 4}),
        ]
        for outcome in outcomes:
            totals.add(outcome)
        run.batches.prepare(Batch(step, 0, [], [drawn[0].id]))
        journal.commit(Entries(drawn, outcomes, totals.copy()), shipped=step)
        run.batches.announce(step)
    journal.commit(Entries([Draw(4, "env", "key4", 4)], [], totals))
    journal.close()
    run.metrics.touch()
    return run


def found(run: RunDir) -> str:
    journal = Journal(run.journal, read_only=True)
    return "\n".join([*journal.find_damage(), *find_violations(run, journal)])


def change(run: RunDir, statement: str) -> None:
    with sqlite3.connect(run.journal) as db:
        db.execute(statement)


def test_a_run_that_adds_up_has_nothing_to_report(run: RunDir, capsys: pytest.CaptureFixture[str]):
    assert found(run) == ""
    assert main(["audit", str(run.root)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "       1 drawn", "       2 dropped: off_policy", "       2 shipped", "everything adds up",
        "not checked: rollouts of steps 1 to 2: the run keeps only the newest",
        "not checked: credit, states and draws: there is no config.toml",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("DELETE FROM draws WHERE id = 1", "draw 1 is missing: the next one in the journal is 2"),
        ("UPDATE draws SET position = 9 WHERE id = 3", "draw 3 is at position 9 of env, not 3"),
        ("UPDATE draws SET reason = NULL WHERE id = 1", "draw 1 was dropped without a reason"),
        ("UPDATE draws SET step = 1 WHERE id = 2", "step 2 has no draw"),
        ("DELETE FROM steps WHERE step = 1", "the committed steps are [2]"),
        ("UPDATE draws SET rollouts = 5 WHERE id = 0", "the totals of step 1 are Totals(rollouts=8"),
        ("DELETE FROM drops WHERE draw = 1", "but its draws sum to"),
        ("INSERT INTO covered (id, step) VALUES (1, 2)", "but no checkpoint covers step 1"),
        ("UPDATE draws SET rewards = '[[\"policy\",0.5]]' WHERE id = 0", "row 0 of table draws"),
        ("UPDATE draws SET task_key = 'key9' WHERE id = 4", "row 4 of table draws"),
        ("UPDATE clock SET seconds = 5.0 WHERE step = 1", "row 1 of table clock"),
        ("DROP INDEX draws_by_state", "its tables are not those"),
    ],
)
def test_each_kind_of_damage_is_named(statement: str, expected: str, run: RunDir):
    change(run, statement)
    assert expected in found(run)
    assert main(["audit", str(run.root)]) == 1


def test_a_damaged_checkpoint_is_named_and_one_without_digests_is_not(run: RunDir, capsys: pytest.CaptureFixture[str]):
    for step in (1, 2):
        checkpoint = run.checkpoints / f"step-{step:08d}"
        path = checkpoint / TENSORS / "a.safetensors"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"abcdef")
        (checkpoint / STATE).write_bytes(b"{}")
        digests = BlockDigests(6, 4, [digest_of(b"abcd"), digest_of(b"ef")], XXH3)
        marker = CheckpointMarker(step, tensors={path.name: digests} if step == 2 else {})
        (checkpoint / MARKER).write_bytes(msgspec.json.encode(marker))
    link_tree(run.checkpoints / "step-00000002", run.checkpoints / "permanent" / "step-00000002")
    assert main(["audit", str(run.root)]) == 0
    path.write_bytes(b"abcdEf")
    capsys.readouterr()
    assert main(["audit", str(run.root)]) == 1
    assert capsys.readouterr().out.count(f"{path.name}: damaged: 1 of 2 blocks differ, the first at byte 4") == 1


@pytest.mark.parametrize("deleted", [STATE, TENSORS])
def test_what_is_missing_in_a_checkpoint_without_digests_is_named(
    deleted: str, run: RunDir, capsys: pytest.CaptureFixture[str]
):
    checkpoint = run.checkpoints / "step-00000002"
    (checkpoint / TENSORS).mkdir(parents=True)
    (checkpoint / TENSORS / "a.safetensors").write_bytes(b"abcdef")
    (checkpoint / STATE).write_bytes(b"{}")
    (checkpoint / MARKER).write_bytes(msgspec.json.encode(CheckpointMarker(2)))
    assert main(["audit", str(run.root)]) == 0
    (checkpoint / deleted).rename(run.root / "elsewhere")
    capsys.readouterr()
    assert main(["audit", str(run.root)]) == 1
    assert f"{checkpoint / deleted}: missing" in capsys.readouterr().out


def test_a_run_without_a_journal_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "metrics.jsonl").touch()
    assert main(["audit", str(tmp_path)]) == 2
    assert f"RUN = {tmp_path}: " in capsys.readouterr().err
