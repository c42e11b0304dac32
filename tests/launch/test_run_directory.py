"""What may and may not happen to a directory that exists."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from headrace.launch.errors import BadRequest
from headrace.launch.run_directory import checkpoints, hold, plan_directory, refuse_shorter
from headrace.observe.metrics import History, MetricsLog, read_metrics
from headrace.rollout.version import Version
from headrace.transport.epochs import DRAFTS, EPOCHS
from headrace.transport.journal import Journal
from headrace.transport.journal_entries import Draw, Entries, Outcome, Totals
from headrace.transport.run_dir import RunDir
from tests.refusals import refused


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with complete checkpoints of steps 5 and 10, and one of step 15 that a kill cut short."""
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "config.toml").write_text("")
    for step in (5, 10, 15):
        checkpoint = directory / "checkpoints" / f"step-{step:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "model.safetensors").write_text(f"weights {step}")
        if step < 15:
            (checkpoint / "COMPLETE.json").write_text("{}")
    log = MetricsLog(directory / "metrics.jsonl", "trainer")
    for step in range(1, 13):
        log.log(step, {"loss": 1.0 / step})
    journal = Journal(directory / "journal.sqlite")
    for step in range(1, 13):
        draw = Draw(step - 1, "env", f"task-{step}", step - 1)
        journal.commit(Entries([draw], [Outcome(draw.id, rollouts=8)], Totals(rollouts=8 * step)), shipped=step)
    journal.close()
    return directory


def test_a_new_or_empty_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    plan = plan_directory(tmp_path / "new" / "run", None, False)
    plan.apply()
    assert plan.directory.is_dir()
    assert not plan.resume
    assert plan_directory(plan.directory, None, True) == plan


def test_an_existing_run_is_refused_with_both_ways_out(run: Path) -> None:
    with refused(BadRequest, key="output_dir", value=run):
        plan_directory(run, None, False)


def test_a_checkpoint_that_is_left_only_among_the_permanent_ones_is_gone_on_from(run: Path) -> None:
    where = run / "checkpoints"
    (where / "permanent").mkdir()
    (where / "step-00000010").rename(where / "permanent" / "step-00000010")
    plan_directory(run, "10", False).apply()
    assert (where / "step-00000010" / "model.safetensors").read_text() == "weights 10"
    assert (where / "permanent" / "step-00000010" / "COMPLETE.json").is_file()


def test_a_run_does_not_end_before_the_steps_that_it_has_made(run: Path) -> None:
    refuse_shorter(run, 12)
    refuse_shorter(run, None)
    with refused(BadRequest, key="max_steps", value=11):
        refuse_shorter(run, 11)
    (run / "journal.sqlite").unlink()
    refuse_shorter(run, 10)


def test_clean_deletes_a_run(run: Path) -> None:
    plan_directory(run, None, True).apply()
    assert all(path.name in (EPOCHS, DRAFTS) or path.suffix == ".lock" for path in run.iterdir())
    assert not plan_directory(run, None, False).clean


def test_clean_never_deletes_what_is_not_recognisably_a_run(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with refused(BadRequest, key="output_dir", value=tmp_path):
        plan_directory(tmp_path, None, True)
    assert (tmp_path / "thesis.tex").exists()


def test_clean_refuses_a_run_that_is_running(run: Path) -> None:
    with hold(run), refused(BadRequest, key="output_dir", value=run):
        plan_directory(run, None, True).apply()
    assert (run / "config.toml").exists()


def test_a_lock_left_by_a_launch_that_failed_early_does_not_occupy_the_directory(tmp_path: Path) -> None:
    with hold(tmp_path):
        pass
    assert plan_directory(tmp_path, None, False).directory == tmp_path


def test_resume_where_no_run_is_says_so(tmp_path: Path) -> None:
    with refused(BadRequest, key="--resume"):
        plan_directory(tmp_path, "latest", False)


@pytest.mark.parametrize("given", ["latest", "10", "path"])
def test_the_newest_complete_checkpoint_continues_the_same_run_however_it_is_named(run: Path, given: str) -> None:
    plan = plan_directory(run, str(run / "checkpoints" / "step-00000010") if given == "path" else given, False)
    assert plan.directory == run
    assert plan.resume
    assert plan.notice is None


def test_an_incomplete_checkpoint_is_not_one(run: Path) -> None:
    assert list(checkpoints(run)) == [5, 10]
    with refused(BadRequest, key="--resume", value="15"):
        plan_directory(run, "15", False)


def test_a_checkpoint_of_another_run_is_refused(run: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "other" / "checkpoints" / "step-00000010"
    elsewhere.mkdir(parents=True)
    with refused(BadRequest, key="--resume"):
        plan_directory(run, str(elsewhere), False)


def test_an_older_checkpoint_on_purpose_forks_a_new_run(run: Path) -> None:
    plan = plan_directory(run, "5", False)
    plan.apply()
    fork = run.with_name("run-from-5")
    assert plan.directory == fork
    assert str(fork) in (plan.notice or "")
    assert list(checkpoints(fork)) == [5]
    assert (fork / "checkpoints/step-00000005/model.safetensors").read_text() == "weights 5"
    assert [record["step"] for record in read_metrics(fork / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    steps = sqlite3.connect(fork / "journal.sqlite").execute("SELECT MAX(step) FROM steps").fetchone()
    assert steps == (5,)
    assert list(checkpoints(run)) == [5, 10]  # the old run is as it was


def test_a_fork_has_the_past_versions_that_its_teacher_needs(run: Path) -> None:
    (run / "config.toml").write_text("[trainer.past_weights]\nevery = 2\nmax_async_level = 1\n")
    weights = RunDir(run).weights
    for step in range(7):
        weights.publish(Version(0, step), lambda draft: (draft / "model.safetensors").write_bytes(b"tensors") and None)
    plan_directory(run, "5", False).apply()
    assert RunDir(run.with_name("run-from-5")).weights.published() == [Version(0, 4)]


def test_what_a_fork_evaluates_counts_however_often_the_run_before_it_was_resumed(run: Path) -> None:
    MetricsLog(run / "metrics.jsonl", "orchestrator").log(5, {"eval/heldout/avg@1": 0.5, "eval/incarnation": 3})
    plan_directory(run, "5", False).apply()
    metrics = run.with_name("run-from-5") / "metrics.jsonl"
    MetricsLog(metrics, "orchestrator").log(6, {"eval/heldout/avg@1": 0.6, "eval/incarnation": 1})
    assert History(read_metrics(metrics)).held_out() == [(5, 0.5), (6, 0.6)]


def test_a_fork_does_not_overwrite_an_earlier_one(run: Path) -> None:
    plan_directory(run, "5", False).apply()
    with refused(BadRequest, key="--resume"):
        plan_directory(run, "5", False)
