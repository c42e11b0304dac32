"""`headrace new environment`: what it writes works as it is, and it never writes over anything."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.cli.new import SETTINGS, class_name, module_name
from headrace.errors import BadInput
from headrace.runfile.reading import validate
from headrace.runfile.run import RunConfig
from tests.refusals import refused

REPOSITORY = Path(__file__).parents[2]
KINDS = tuple(SETTINGS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an environment of each kind."""
    directory = tmp_path_factory.mktemp("new")
    for kind in KINDS:
        assert main(["new", "environment", f"my-{kind}", "--kind", kind, "--dir", str(directory)]) == 0
    return directory


def run_tests(folder: Path) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={folder}", str(folder)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout


def test_four_files_are_written_and_the_next_commands_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["new", "environment", "MyEnv", "--dir", str(tmp_path / "deep" / "er")]) == 0
    written = sorted(path.name for path in (tmp_path / "deep" / "er").iterdir())
    assert written == ["my_env.py", "my_env.toml", "my_env_sft.toml", "test_my_env.py"]
    assert capsys.readouterr().out.splitlines()[-5:] == [
        "next:",
        f"  cd {tmp_path / 'deep' / 'er'}",
        "  pytest test_my_env.py",
        "  headrace probe my_env:my_env",
        "  headrace rl my_env.toml",
    ]


def test_nothing_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "my_env.toml").write_text("mine")
    assert main(["new", "environment", "my-env", "--dir", str(tmp_path)]) == 2
    assert f"{tmp_path / 'my_env.toml'}: " in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["my_env.toml"]


def test_names_become_those_of_modules_and_classes():
    assert [module_name(name) for name in ("my-env", "MyEnv", "my.env 2")] == ["my_env", "my_env", "my_env_2"]
    assert (class_name("my_env", "chat"), class_name("my_env", "single")) == ("MyEnv", "my_env")
    for wrong in ("2nd", "", "über", "my/env", "lambda"):
        with refused(BadInput, key="NAME", value=wrong):
            module_name(wrong)
    for taken in ("random", "headrace", "pytest"):
        with refused(BadInput, key="NAME", value=taken):
            module_name(taken)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("chat", "chat"), ("Environment", "chat"), ("task", "chat"), ("tool-error", "tools")]
    + [(name, "single") for name in ("rows", "letters", "environment", "str")],
)
def test_a_name_that_the_skeleton_uses_itself_is_refused(
    name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["new", "environment", name, "--kind", kind, "--dir", str(tmp_path)]) == 2
    assert f'NAME = "{name}": ' in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_a_name_that_only_another_kind_or_the_test_uses_is_fine(tmp_path: Path):
    for name, kind in (("letters", "chat"), ("chat", "single"), ("reward", "single"), ("play", "single")):
        assert main(["new", "environment", name, "--kind", kind, "--dir", str(tmp_path)]) == 0
    assert "8 passed" in run_tests(tmp_path)


@pytest.mark.full
def test_the_files_are_strictly_typed(folder: Path):
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(folder / ".mypy_cache"), "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_files_are_as_we_write_ours(folder: Path):
    settings = "--config", str(REPOSITORY / "pyproject.toml")
    for command in (["check"], ["format", "--check"]):
        subprocess.run(
            [sys.executable, "-m", "ruff", *command, *settings, str(folder)], check=True, capture_output=True
        )


def test_their_own_tests_pass(folder: Path):
    assert f"{2 * len(KINDS)} passed" in run_tests(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_a_probe_finds_nothing_to_fix(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"my_{kind}"
    code = main(["probe", f"{folder / name}.py:{class_name(name, kind)}", "--tasks", "4", "--examples", "1"])
    shown = capsys.readouterr().out
    assert (code, shown.splitlines()[-1]) == (0, "nothing to fix"), shown


@pytest.mark.parametrize("kind", KINDS)
def test_the_run_file_is_accepted(folder: Path, kind: str, capsys: pytest.CaptureFixture[str]):
    for command, file in (("rl", f"my_{kind}.toml"), ("sft", f"my_{kind}_sft.toml")):
        assert main([command, str(folder / file), "--dry-run"]) == 0
        tree = tomllib.loads(capsys.readouterr().out)
        if command == "rl":
            assert tree["model"]["sft"] == str(folder / f"my_{kind}_sft.toml")
            assert tree["orchestrator"]["train"]["env"][0]["id"] == f"my_{kind}:{class_name(f'my_{kind}', kind)}"
            validate(RunConfig, tree, "dry run")
