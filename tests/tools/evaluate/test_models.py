"""Which models a command line means."""

from pathlib import Path

import pytest

from headrace.errors import BadInput
from headrace.tools.evaluate.candidates import find_models
from headrace.transport.files import MARKER


def make(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A sweep of two runs, the first of them with permanent checkpoints, and a model beside it."""
    for run in ("sweep/lambda-2", "sweep/lambda-10"):
        make(tmp_path / run / "config.toml")
        make(tmp_path / run / "model" / "config.json")
        for step in (2, 10):
            make(tmp_path / run / "checkpoints" / "permanent" / f"step-{step:08}" / MARKER)
    (tmp_path / "sweep/lambda-2/checkpoints/permanent/step-00000012").mkdir()  # not complete
    make(tmp_path / "sweep" / "report.html")
    make(tmp_path / "base" / "config.json")
    return tmp_path


def found(*targets: object, permanent: bool = False) -> list[tuple[str, str]]:
    return [(c.kind, c.name) for c in find_models([str(target) for target in targets], permanent=permanent)]


def test_of_a_model_and_a_folder_of_runs_the_final_models_are_meant_by_number(root: Path):
    assert found(root / "base", root / "sweep") == [("model", "base"), ("model", "lambda-2"), ("model", "lambda-10")]
    (_, first, _) = find_models([str(root / "base"), str(root / "sweep")], permanent=False)
    assert first.source == str(root / "sweep/lambda-2/model")
    assert first.run == root / "sweep/lambda-2"


def test_folders_are_in_the_order_of_the_numbers_in_their_names(tmp_path: Path):
    for value in ("0.5,seed=10", "0.5,seed=9", "0.25,seed=0", "1.0,seed=0"):
        make(tmp_path / f"lambda={value}" / "config.toml")
        make(tmp_path / f"lambda={value}" / "model" / "config.json")
    names = [name.removeprefix("lambda=") for _, name in found(tmp_path)]
    assert names == ["0.25,seed=0", "0.5,seed=9", "0.5,seed=10", "1.0,seed=0"]


def test_of_runs_the_permanent_checkpoints_can_be_meant_under_names_that_tell_them_apart(root: Path):
    assert found(root / "sweep/lambda-2", permanent=True) == [("checkpoint", "step-2"), ("checkpoint", "step-10")]
    assert [name for _, name in found(root / "sweep", permanent=True)] == [
        "lambda-2/step-2",
        "lambda-2/step-10",
        "lambda-10/step-2",
        "lambda-10/step-10",
    ]


def test_a_single_checkpoint_knows_its_run_and_what_is_named_twice_is_meant_once(root: Path):
    path = root / "sweep/lambda-2/checkpoints/permanent/step-00000002"
    (only,) = find_models([str(path), str(path)], permanent=False)
    assert (only.kind, only.run) == ("checkpoint", root / "sweep/lambda-2")


def test_servers_are_named_by_their_addresses(root: Path):
    assert found("http://a:1", "http://b:1,http://b:2") == [("endpoint", "a-1"), ("endpoint", "b-1+b-2")]


def test_what_is_no_model_is_refused_before_anything_runs(root: Path):
    (root / "empty").mkdir()
    for name in ("empty", "nowhere"):
        with pytest.raises(BadInput) as refusal:
            found(root / name)
        assert (refusal.value.key, refusal.value.value) == ("CHECKPOINT", str(root / name))
    make(root / "new" / "config.toml")
    with pytest.raises(BadInput) as error:
        found(root / "new", permanent=True)
    assert (error.value.key, error.value.value) == ("CHECKPOINT", str(root / "new"))
