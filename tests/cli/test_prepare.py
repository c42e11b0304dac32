"""`headrace prepare`: what it writes, what starts the run afterwards, and what it refuses without a trace."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.main import main
from headrace.config.sft import SftConfig
from headrace.launch.saved_config import read_run
from headrace.runfile.run import RunConfig
from headrace.transport.run_dir import RunDir
from tests.cli.run_files import RUN_FILE
from tests.end_to_end.runs import headrace, write_run_file

SFT_FILE = """
output_dir = "{output}"
max_steps = 1
seq_len = 64
model.name = "{model}"
data.env = "reverse-text"
"""
SLURM = "--launch.on slurm --launch.gpus_per_node 4"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "out")


def launched_by(words: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run a command line of `headrace`; return what it would launch."""
    calls: list[dict[str, Any]] = []

    def launch(config: RunConfig | SftConfig, *_: object, **options: object) -> int:
        calls.append({"config": config, **options})
        return 0

    monkeypatch.setattr("headrace.launch.run.launch", launch)
    assert main(words) == 0
    (call,) = calls
    return call


@pytest.mark.parametrize(("file", "command"), [(RUN_FILE, "rl"), (SFT_FILE, "sft")])
def test_a_prepared_run_is_complete_and_the_printed_command_starts_it(
    file: str,
    command: str,
    run: RunDir,
    tmp_path: Path,
    tiny_model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    path = tmp_path / "run.toml"
    path.write_text(file.format(output=run.root, model=tiny_model))
    assert main(["prepare", str(path), "--seed", "7"]) == 0
    assert run.code_folders.is_file()
    assert not any(path.exists() for path in (run.status, run.logs, run.metrics, run.checkpoints, run.endpoints))
    config = read_run(run.root)
    assert (config.seed, config.model.name, isinstance(config, RunConfig)) == (7, str(tiny_model), command == "rl")
    _, _, printed = capsys.readouterr().out.rpartition(": ")
    words = shlex.split(printed)
    assert words == ["headrace", command, str(run.config), "--resume"]
    launch = launched_by(words[1:], monkeypatch)
    assert (launch["resume"], launch["config"].seed) == (True, 7)


def test_another_run_is_not_overwritten(
    run: RunDir, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "rl.toml"
    path.write_text(RUN_FILE.format(output=run.root, model=tiny_model))
    assert main(["prepare", str(path), "--seed", "7"]) == 0
    assert main(["prepare", str(path), "--seed", "8"]) == 2
    assert "output_dir" in capsys.readouterr().err
    assert read_run(run.root).seed == 7
    assert main(["prepare", str(path), "--seed", "8", "--clean"]) == 0
    assert read_run(run.root).seed == 8


@pytest.mark.parametrize("command", ["prepare", "rl"])
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (f"{SLURM} --launch.trainer_nodes 2 --launch.trainer_processes 9", "trainer_processes = 9"),
        (f"{SLURM} --launch.inference_nodes 1 --launch.inference_gpus 6", "inference_gpus = 6"),
        ("--launch.trainer_nodes 2", "trainer_nodes = 2"),
        ("--launch.spare_nodes 1", "spare_nodes = 1"),
    ],
)
def test_what_the_hosts_cannot_hold_is_refused_before_anything_is_written(
    command: str,
    options: str,
    problem: str,
    run: RunDir,
    tmp_path: Path,
    tiny_model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    path = tmp_path / "rl.toml"
    path.write_text(RUN_FILE.format(output=run.root, model=tiny_model))
    assert main([command, str(path), *options.split()]) == 2
    assert f"launch.{problem}: " in capsys.readouterr().err
    assert not run.root.exists()


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_prepared_run_starts_at_step_0_and_continues_later(tmp_path: Path, tiny_model: Path):
    run = RunDir(tmp_path / "run")
    code, output = headrace("prepare", write_run_file(tmp_path, tiny_model))
    assert (code, run.status.exists(), run.metrics.exists()) == (0, False, False), output
    for steps in (3, 4):
        code, output = headrace("rl", run.config, "--resume", "--max_steps", steps)
        assert code == 0, output
        assert run.latest_checkpoint_step() == steps
    code, output = headrace("audit", run.root)
    assert code == 0, output
