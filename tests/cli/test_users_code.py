"""`headrace rl` and `sft` look for a user's code and for environments before they touch anything."""

import sys
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.trainer.tiny import write_tiny_settings
from tests.cli.run_files import RUN_FILE

CODE = """
from headrace.algorithms.base import Algorithm


class Own(Algorithm):
    def __init__(self, decay=0.5):
        raise AssertionError("it must not be constructed here")


def too_long(rollout, limit):
    raise AssertionError("it must not be called here")
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
    (tmp_path / "out" / "config.toml").touch()
    write_tiny_settings(tmp_path / "model")
    file = tmp_path / "rl.toml"
    file.write_text(RUN_FILE.format(output=tmp_path / "out", model=tmp_path / "model") + more)
    return file


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("own_1", '[orchestrator.algo]\ntype = "own_1:Gone"', 'orchestrator.algo = "own_1:Gone":'),
        (
            "own_2",
            '[orchestrator.algo]\ntype = "own_2:Own"\nkwargs = { x = 1 }',
            'orchestrator.algo = "own_2:Own":',
        ),
        (
            "own_3",
            '[[orchestrator.post_batch_filters]]\ntype = "custom"\nimport_path = "own_3:too_long"',
            'orchestrator.post_batch_filters.0.import_path = "own_3:too_long":',
        ),
    ],
)
@pytest.mark.parametrize("option", ["--clean", "--dry-run"])
def test_code_that_is_not_there_is_refused_before_an_older_run_is_deleted(
    name: str, more: str, words: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["rl", str(write_run(tmp_path, name, more)), "--inference.port", "0", option]) == 2
    assert words in capsys.readouterr().err
    assert (tmp_path / "out" / "checkpoints").is_dir()


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("own_5", '[[orchestrator.train.env]]\nid = "reverse-txt"', 'orchestrator.train.env.1.id = "reverse-txt":'),
        ("own_6", '[[orchestrator.eval.env]]\nid = "own_6:Gone"', 'orchestrator.eval.env.0.id = "own_6:Gone":'),
        (
            "own_7",
            '[[orchestrator.eval.env]]\nid = "reverse-text"\nargs = { x = 1 }',
            "orchestrator.eval.env.0.args.x = 1:",
        ),
        (
            "own_8",
            '[trainer.loss]\ntype = "custom"\nimport_path = "own_8:gone"',
            'trainer.loss.import_path = "own_8:gone": ',
        ),
        (
            "own_9",
            '[trainer.loss]\ntype = "custom"\nimport_path = "own_9:too_long"',
            'trainer.loss.import_path = "own_9:too_long": ',
        ),
    ],
)
@pytest.mark.parametrize("occasion", ["an older run", "no start model"])
def test_environments_and_losses_are_tried_before_a_run_is_deleted_or_a_start_model_trained(
    name: str, more: str, words: str, occasion: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = write_run(tmp_path, name, more)
    if occasion == "no start model":
        (tmp_path / "out").rename(tmp_path / "elsewhere")
        file.write_text(file.read_text().replace("name =", "sft ="))
    assert main(["rl", str(file), "--inference.port", "0", "--clean"]) == 2
    assert words in capsys.readouterr().err
    assert (tmp_path / "out").is_dir() == (occasion == "an older run")


@pytest.mark.parametrize(
    "more",
    [
        'validation = { env = "reverse-txt" }\ndata = { env = "reverse-text" }',
        'data = { env = "reverse-txt" }',
        'data = { path = "x.jsonl" }\neval = { env = [{ id = "reverse-txt" }] }',
    ],
)
def test_environments_of_an_sft_run_are_tried_before_an_older_run_is_deleted(
    more: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.toml").write_text("")
    file = tmp_path / "sft.toml"
    file.write_text(f'output_dir = "{tmp_path / "out"}"\nmax_steps = 1\nseq_len = 8\n{more}\n[model]\ninit = "tiny"\n')
    assert main(["sft", str(file), "--inference.port", "0", "--clean"]) == 2
    assert '= "reverse-txt":' in capsys.readouterr().err
    assert (tmp_path / "out" / "config.toml").is_file()


def test_code_that_is_there_is_only_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    more = '[orchestrator.algo]\ntype = "own_4:Own"\nkwargs = { decay = 0.9 }'
    assert main(["rl", str(write_run(tmp_path, "own_4", more)), "--dry-run"]) == 0
    assert "own_4:Own" in capsys.readouterr().out
