"""Code of a user's own: beside the run files at first, and found again when the run is read later."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.launch.own_code import add_code_folders, add_code_folders_of, save_folders
from headrace.transport.run_dir import RunDir


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")


def test_code_beside_a_run_file_is_found_by_all_processes(tmp_path: Path):
    (tmp_path / "beside_the_run_file.py").write_text("print('found')\n")
    assert add_code_folders([tmp_path / "rl.toml", tmp_path / "more.toml"]) == [str(Path.cwd()), str(tmp_path)]
    assert sys.path[-1] == str(tmp_path)
    command = [sys.executable, "-c", "import beside_the_run_file, sys; assert '/elsewhere' in sys.path"]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=True)
    assert done.stdout == "found\n"


def test_a_run_is_read_with_the_folders_it_was_started_with_and_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save_folders([str(tmp_path / "mine"), str(tmp_path / "gone")], RunDir(tmp_path))
    monkeypatch.chdir(tmp_path)
    add_code_folders_of(RunDir(tmp_path))
    assert sys.path[-3:] == [str(tmp_path / "mine"), str(tmp_path / "gone"), str(tmp_path)]
    add_code_folders_of(RunDir(tmp_path))
    assert sys.path.count(str(tmp_path)) == 1


def test_a_run_that_kept_no_folders_is_read_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    add_code_folders_of(RunDir(tmp_path / "run"))
    assert sys.path[-1] == str(tmp_path)


def test_a_saved_configuration_brings_the_folders_of_its_run(tmp_path: Path):
    save_folders([str(tmp_path / "mine")], RunDir(tmp_path))
    assert add_code_folders([tmp_path / "config.toml"])[1:] == [str(tmp_path), str(tmp_path / "mine")]
    assert add_code_folders([tmp_path / "rl.toml"])[1:] == [str(tmp_path)]
