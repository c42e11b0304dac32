"""The batch script of a run on SLURM, and its submission through the real command line; sbatch itself is a stand-in."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.config.launch import SlurmConfig
from headrace.errors import SAVED
from headrace.launch.errors import BadRequest
from headrace.launch.slurm_job import (
    JOB_VAR,
    NODES_VAR,
    REQUEUE_VAR,
    JobSize,
    batch_script,
    headrace_command,
    submitted,
)
from headrace.runfile.reading import load
from headrace.runfile.run import RunConfig
from tests.end_to_end.runs import write_run_file
from tests.launch.node_world import LIMIT_S, wait_for
from tests.launch.slurm_stand_in import SUBMIT, install, options


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return install(tmp_path, monkeypatch)


def test_the_script_has_what_was_configured_and_the_users_lines_count():
    slurm = SlurmConfig(
        partition="gpu", account="a b", time="2-00", requeue=False, signal_before=60, lines=["--nodes=9"]
    )
    script = batch_script(slurm, "my run", Path("/r/log"), JobSize(4, 8), "exec true")
    lines = options(script)
    for expected in ("--nodes=4", "--gres=gpu:8", "--partition=gpu", '--account="a b"', "--time=2-00", "--no-requeue"):
        assert expected in lines
    assert "--signal=B:USR1@60" in lines and "--no-kill" in lines and "--open-mode=append" in lines
    assert lines[-1] == "--nodes=9"
    bare = batch_script(SlurmConfig(), "run", Path("/r/log"), JobSize(1, None), "exec true")
    assert not any(line.startswith(("--gres", "--partition", "--account", "--time")) for line in options(bare))
    assert "--requeue" in options(bare)


def test_a_prologue_chooses_another_command(tmp_path: Path):
    prologue = "HEADRACE='echo in a container:'\n"
    script = batch_script(
        SlurmConfig(prologue=prologue),
        "run",
        tmp_path / "log",
        JobSize(1, None),
        f"exec {headrace_command('rl', 'a b')}",
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "in a container: rl a b\n"
    assert shlex.join([sys.executable, "-m", "headrace"]) in headrace_command("rl")


def test_a_time_limit_during_the_prologue_queues_the_job_again(tmp_path: Path, calls: Path):
    started = tmp_path / "started"
    slurm = SlurmConfig(prologue=f"touch {started}; sleep 1\n")
    script = batch_script(slurm, "run", tmp_path / "log", JobSize(1, None), "exec echo has started")
    job = subprocess.Popen(["bash", "-c", script], env={**os.environ, JOB_VAR: "17"}, stdout=subprocess.PIPE, text=True)
    wait_for(started.exists)
    job.send_signal(signal.SIGUSR1)
    assert job.communicate()[0] == ""
    assert calls.read_text().splitlines() == ["scontrol requeue 17"]


@pytest.mark.parametrize("is_batch_job", [True, False])
def test_a_time_limit_before_the_processes_start_queues_a_batch_job_again(
    tmp_path: Path, tiny_model: Path, calls: Path, is_batch_job: bool
):
    """Without the hosts, which an srun that only waits does not start."""
    (tmp_path / "bin" / "srun").write_text('#!/bin/sh\necho srun >> "$CALLS"\nexec sleep 60\n')
    (tmp_path / "bin" / "srun").chmod(0o755)
    env = {**os.environ, JOB_VAR: "17", NODES_VAR: "1", **({REQUEUE_VAR: "1"} if is_batch_job else {})}
    words = ["rl", str(write_run_file(tmp_path, tiny_model)), "--launch.on", "slurm"]
    job = subprocess.Popen([sys.executable, "-m", "headrace", *words], env=env)
    wait_for(lambda: "srun" in calls.read_text().split())
    job.send_signal(signal.SIGUSR1)
    assert job.wait(LIMIT_S) == SAVED
    asked = ["scontrol show config", "srun", "scontrol requeue 17"] if is_batch_job else ["srun"]
    assert calls.read_text().splitlines() == asked


def test_a_run_is_prepared_and_its_job_released(
    tmp_path: Path, tiny_model: Path, calls: Path, capsys: pytest.CaptureFixture[str]
):
    file = write_run_file(tmp_path, tiny_model)
    nodes = ["--launch.trainer_nodes", "2", "--launch.inference_nodes", "3", "--launch.spare_nodes", "1"]
    assert main(["rl", str(file), "--launch.on", "slurm", *nodes]) == 0
    assert calls.read_text().splitlines() == [SUBMIT, "scontrol update JobId=17 StartTime=now"]
    assert "17" in capsys.readouterr().out
    run = tmp_path / "run"
    script = (run / "slurm.sh").read_text()
    assert script == Path(f"{calls}.script").read_text()
    assert "--nodes=6" in options(script) and f"--output={run}/logs/slurm.log" in options(script)
    assert script.splitlines()[-1].endswith(f"rl {run}/config.toml --resume")
    config, _ = load(RunConfig, [run / "config.toml"], [])
    assert config.launch.on == "slurm" and (run / "logs").is_dir()


def test_print_writes_the_script_and_submits_nothing(tmp_path: Path, tiny_model: Path, calls: Path):
    assert main(["rl", str(write_run_file(tmp_path, tiny_model)), "--launch.on", "slurm", "--print"]) == 0
    assert (tmp_path / "run" / "slurm.sh").is_file() and not calls.read_text()


def test_a_refused_job_leaves_an_earlier_run_as_it_was(
    tmp_path: Path, tiny_model: Path, calls: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    file, run = write_run_file(tmp_path, tiny_model), tmp_path / "run"
    assert main(["rl", str(file), "--launch.on", "slurm", "--print"]) == 0
    (run / "mine").touch()
    monkeypatch.setenv("REFUSING", "sbatch")
    assert main(["rl", str(file), "--launch.on", "slurm", "--clean"]) == 2
    assert "invalid partition specified: gpu" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["rl", str(file), "--launch.on", "slurm", "--clean"]) == 2
    assert (run / "mine").exists()


def test_a_job_whose_run_cannot_be_prepared_is_cancelled(calls: Path):
    with pytest.raises(OSError), submitted("#!/bin/sh\n"):
        raise OSError("no space left")
    assert calls.read_text().splitlines() == [SUBMIT, "scancel 17"]


def test_a_job_that_cannot_be_released_is_an_error(calls: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("REFUSING", "scontrol")
    with pytest.raises(BadRequest) as refused, submitted("#!/bin/sh\n"):
        pass
    assert refused.value.key == "launch.on"
