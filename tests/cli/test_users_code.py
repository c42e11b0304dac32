"""`headrace rl` looks for a user's algorithms and filters before it touches anything."""

import sys
from pathlib import Path

import pytest

from headrace.cli.main import main
from tests.cli.run_files import RUN_FILE

CODE = """
from headrace.algorithms.base import Algorithm


class Own(Algorithm):
    def __init__(self, decay=0.5):
        raise AssertionError("nobody shall construct it here")


def too_long(rollout, limit):
    raise AssertionError("nobody shall call it here")
"""


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch):
    """Where modules are found is put back."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")


def write_run(tmp_path: Path, name: str, more: str) -> Path:
    """A run file with the user's module beside it, and an older run in its output_dir."""
    (tmp_path / f"{name}.py").write_text(CODE)
    (tmp_path / "out" / "checkpoints").mkdir(parents=True)
    file = tmp_path / "rl.toml"
    file.write_text(RUN_FILE.format(output=tmp_path / "out", model=tmp_path) + more)
    return file


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("own_1", '[orchestrator.algo]\ntype = "own_1:Gone"', "algorithm 'own_1:Gone' cannot be imported"),
        (
            "own_2",
            '[orchestrator.algo]\ntype = "own_2:Own"\nkwargs = { x = 1 }',
            "algorithm 'own_2:Own' does not take these kwargs: got an unexpected keyword argument 'x'",
        ),
        (
            "own_3",
            '[[orchestrator.post_batch_filters]]\ntype = "custom"\nimport_path = "own_3:too_long"',
            "filter 'own_3:too_long' does not take these kwargs: missing a required argument: 'limit'",
        ),
    ],
)
@pytest.mark.parametrize("option", ["--clean", "--dry-run"])
def test_code_that_is_not_there_is_refused_before_an_older_run_is_deleted(
    name: str, more: str, words: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["rl", str(write_run(tmp_path, name, more)), option]) == 2
    assert words in capsys.readouterr().err
    assert (tmp_path / "out" / "checkpoints").is_dir()


def test_code_that_is_there_is_only_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    more = '[orchestrator.algo]\ntype = "own_4:Own"\nkwargs = { decay = 0.9 }'
    assert main(["rl", str(write_run(tmp_path, "own_4", more)), "--dry-run"]) == 0
    assert "own_4:Own" in capsys.readouterr().out
