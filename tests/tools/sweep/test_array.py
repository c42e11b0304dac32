"""Sweeps as job arrays of SLURM; its commands are stand-ins."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from headrace.cli.main import main
from headrace.observe.run_state import HeartbeatContent
from headrace.tools.sweep.record import note_outcomes, read_record
from tests.cli.run_files import RUN_FILE
from tests.launch.slurm_stand_in import SUBMIT, install, options

SWEEP = "run: rl.toml\noutput_dir: out\ngrid: {trainer.optim.lr: [1e-4, 1e-3]}\nseeds: [0, 1]\nparallel: 3\n"


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In a folder with a run file and a sweep, which is also the working directory."""
    (tmp_path / "rl.toml").write_text(RUN_FILE.format(output="alone", model="a-model"))
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    return install(tmp_path, monkeypatch)


def run_task(number: int) -> str:
    """Run one task of the script, with another command in place of Headrace, and return its words."""
    env = {**os.environ, "SLURM_ARRAY_TASK_ID": str(number), "HEADRACE": "echo"}
    return subprocess.run(["bash", "out/slurm.sh"], env=env, capture_output=True, text=True, check=True).stdout


def test_every_run_is_a_task_and_one_that_exists_is_resumed(calls: Path):
    assert main(["sweep", "sweep.yaml", "--launch.on", "slurm", "--launch.slurm.partition", "gpu"]) == 0
    assert calls.read_text().splitlines() == [SUBMIT, "scontrol update JobId=17 StartTime=now"]
    script = Path("out/slurm.sh").read_text()
    assert "--array=0-3%3" in options(script) and "--partition=gpu" in options(script)
    assert '--launch.on="slurm"' in run_task(0)
    assert "--trainer.optim.lr=0.001" in run_task(3) and "--seed=1" in run_task(3) and "--resume" not in run_task(3)
    existing = Path("out") / read_record(Path("out")).plan[3]
    existing.mkdir()
    (existing / "config.toml").touch()
    assert run_task(3).strip().endswith("--resume")


def test_runs_that_have_finished_are_not_submitted_again(calls: Path):
    words = ["sweep", "sweep.yaml", "--launch.on", "slurm"]
    assert main([*words, "--print"]) == 0
    assert not calls.read_text()
    record = read_record(Path("out"))
    for name, state in zip(record.plan, ("finished", "finished", "failed", "running"), strict=True):
        folder = Path("out") / name
        folder.mkdir()
        (folder / "metrics.jsonl").touch()
        beat = HeartbeatContent(0.0, 1, state, 3, 0.0, "out of memory" if state == "failed" else "")
        (folder / "heartbeat.json").write_bytes(msgspec.json.encode(beat))
    note_outcomes(Path("out"), record)
    assert [run.outcome for run in record.planned] == ["finished", "finished", "failed", ""]
    assert record.planned[2].failure == "out of memory"
    assert main(words) == 0
    assert "--array=0-1%3" in options(Path("out/slurm.sh").read_text())
    assert main([*words, "--report"]) == 0
    assert "out of memory" in Path("out/report.md").read_text()


def test_runs_of_different_sizes_are_refused(calls: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["sweep", "sweep.yaml", "--launch.on", "slurm", "--grid.launch.trainer_nodes", "[1, 2]"]) == 2
    assert "launch" in capsys.readouterr().err
    assert not calls.read_text()
