"""`headrace sweep` as a command: what it refuses before anything starts, and a run that fails."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.launch.run_directory import hold
from tests.cli.run_files import RUN_FILE
from tests.tools.sweep.sweeps import write_sweep

GRID = "run: rl.toml\noutput_dir: out\ngrid: {trainer.optim.lr: [1e-4, 1e-3]}\nseeds: [0, 1]\n"
HACKABLE = """
model: {name: a-model}
data: {provider: arithmetic, kwargs: {num_tasks: 8}}
objective: {name: token_grpo}
trainer: {max_steps: 2, batch_size: 16}
storage: {cache_dir: %s}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a run file and a sweep; also the working directory."""
    (tmp_path / "rl.toml").write_text(RUN_FILE.format(output="alone", model="a-model"))
    (tmp_path / "sweep.yaml").write_text(GRID)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    return tmp_path


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--grid.trainer.optim.lrr", "[1]"], "Did you mean trainer.optim.lr?"),
        (["--grid.max_steps", "[2, 0]"], "lr=0.0001,max_steps=0,seed=0"),
        (["--grid.trainer.optim.betas", "[3]"], "trainer.optim.betas"),
        (["--grids", "1"], "--grids: unknown key. Did you mean grid?"),
        (["--run", "gone.toml"], "gone.toml: no such file"),
        (
            ["--eval.env", "reverse-text", "--eval.smaples", "2"],
            "sweep.yaml: eval: unrecognized arguments: --smaples 2",
        ),
        (["--eval.env", "x", "--eval.checkpoints", "final"], "eval.checkpoints: the final models are evaluated"),
        (["--eval.env", "x", "--eval.samples", "2"], "--samples = 2"),
        (["--gpus_per_run", "0"], "gpus_per_run"),
        (["--report"], "headrace: out: "),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(
    options: list[str], says: str, folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["sweep", "sweep.yaml", *options]) == 2
    assert says in capsys.readouterr().err
    assert not (folder / "out").exists()


def test_a_dry_run_lists_the_runs_and_starts_nothing(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["sweep", "sweep.yaml", "--dry-run", "--parallel", "3"]) == 0
    head, titles, *rows = capsys.readouterr().out.splitlines()
    assert head == "4 runs in out, 3 at once"
    assert titles.split() == ["run", "trainer.optim.lr", "seed"]
    assert [row.split() for row in rows][1] == ["lr=0.0001,seed=1", "0.0001", "1"]
    assert not (folder / "out").exists()


def test_two_sweeps_do_not_share_a_folder(folder: Path, capsys: pytest.CaptureFixture[str]):
    with hold(folder / "out"):
        assert main(["sweep", "sweep.yaml"]) == 2
    assert "output_dir = out: " in capsys.readouterr().err


def test_a_changed_run_file_is_refused_by_the_run_that_is_there(folder: Path, capsys: pytest.CaptureFixture[str]):
    write_sweep(folder / "out", {(1e-4, 0): 0.5})
    assert main(["sweep", "sweep.yaml"]) == 2
    said = capsys.readouterr().err
    assert "max_steps was 7, now 3" in said


def test_the_report_is_made_from_what_is_there_also_while_it_runs(folder: Path, capsys: pytest.CaptureFixture[str]):
    write_sweep(folder / "out", {(1e-4, 0): 0.5, (1e-3, 0): 0.6})
    with hold(folder / "out"):
        assert main(["sweep", "sweep.yaml", "--report"]) == 0
    printed = capsys.readouterr().out
    assert "wrote out/report.md, report.html" in printed
    assert (folder / "out" / "report.html").is_file()


def test_a_file_of_plugins_is_swept_by_its_own_keys_under_its_storage_root(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    (folder / "rl.yaml").write_text(HACKABLE % (folder / "root"))
    (folder / "lambda.yaml").write_text(
        "run: rl.yaml\ngrid: {objective.kwargs.length_penalty_lambda: [0.25, 0.5]}\nseeds: [3]"
    )
    assert main(["sweep", "lambda.yaml", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert f"2 runs in {folder / 'root/artifacts/sweeps/lambda'}" in printed
    assert "length_penalty_lambda=0.25,seed=3" in printed
    assert main(["sweep", "lambda.yaml", "--dry-run", "--overrides.objective.kwargs.length_penalty_lamda", "1"]) == 2
    assert "length_penalty_lamda" in capsys.readouterr().err


def test_without_a_folder_or_a_storage_root_the_file_is_asked_for_one(folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / "sweep.yaml").write_text("run: rl.toml\ngrid: {max_steps: [1, 2]}")
    assert main(["sweep", "sweep.yaml"]) == 2
    assert "sweep.yaml: output_dir: " in capsys.readouterr().err


def test_a_failed_run_is_reported_with_the_end_of_its_log_and_tried_again_by_the_next_command(
    folder: Path, capfd: pytest.CaptureFixture[str]
):
    (folder / "rl.toml").write_text(RUN_FILE.format(output="alone", model=folder / "no-model"))
    (folder / "sweep.yaml").write_text("run: rl.toml\noutput_dir: out\nlist: [{name: only}]")
    assert main(["sweep", "sweep.yaml"]) == 1
    said = capfd.readouterr()
    assert "only: failed: ended with exit status 2; the end of out/logs/only.log:" in said.out
    assert "no-model" in said.out
    assert "headrace: failed: only; the same command tries again" in said.err
    (run,) = json.loads((folder / "out" / "results.json").read_text())["runs"]
    assert (run["state"], "no-model" in run["failure"]) == ("failed", True)
    assert main(["sweep", "sweep.yaml"]) == 1
    assert "only: started" in capfd.readouterr().out
    assert (folder / "out" / "logs" / "only.log").read_text().count("no-model") >= 2
