"""The environment of an evaluation without --env."""

from pathlib import Path
from typing import Any

import pytest

from headrace.config.files import dump
from headrace.config.sft import SftConfig
from headrace.errors import BadInput
from headrace.runfile.reading import validate
from headrace.runfile.run import RunConfig
from headrace.tools.evaluate.candidates import Candidate, run_environment


def a_run(directory: Path, train: list[str], evaluated: list[str]) -> Candidate:
    envs = {slot: [{"id": name, "args": {"split": slot}} for name in names] for slot, names in
            (("train", train), ("eval", evaluated))}  # fmt: skip
    orchestrator = {slot: {"env": listed} for slot, listed in envs.items() if listed}
    tree = {"output_dir": str(directory), "max_steps": 1, "seq_len": 64, "model": {"name": "tiny"},
            "orchestrator": orchestrator}  # fmt: skip
    return saved(validate(RunConfig, tree, "test")[0], directory)


def an_sft_run(directory: Path, evaluated: list[str]) -> Candidate:
    tree: dict[str, Any] = {"output_dir": str(directory), "max_steps": 1, "seq_len": 64, "model": {"name": "tiny"},
            "data": {"env": "copy"}}  # fmt: skip
    if evaluated:
        tree["eval"] = {"env": [{"id": name} for name in evaluated]}
    return saved(validate(SftConfig, tree, "test")[0], directory)


def saved(config: RunConfig | SftConfig, directory: Path) -> Candidate:
    directory.mkdir()
    (directory / "config.toml").write_text(dump(config))
    return Candidate(directory.name, "model", str(directory / "model"), directory)


def test_a_run_is_evaluated_on_what_it_was_evaluated_on(tmp_path: Path):
    model = Candidate("base", "model", "models/base")
    run = a_run(tmp_path / "run", ["reverse-text"], ["arithmetic"])
    other = a_run(tmp_path / "other", ["reverse-text"], ["copy"])
    own = run_environment([model, run, other])
    assert (own.id, own.name, own.args, own.run) == ("arithmetic", "arithmetic", {"split": "eval"}, run.run)


def test_a_run_without_evaluation_is_evaluated_on_what_it_was_trained_on(tmp_path: Path):
    own = run_environment([a_run(tmp_path / "run", ["reverse-text"], [])])
    assert (own.id, own.args) == ("reverse-text", {"split": "train"})


def test_a_supervised_run_is_evaluated_on_what_it_was_evaluated_on(tmp_path: Path):
    assert run_environment([an_sft_run(tmp_path / "run", ["reverse-text"])]).id == "reverse-text"
    with pytest.raises(BadInput) as error:
        run_environment([an_sft_run(tmp_path / "other_run", [])])
    assert error.value.key == "--env"


def test_where_there_is_not_exactly_one_it_is_asked_for(tmp_path: Path):
    with pytest.raises(BadInput) as error:
        run_environment([Candidate("base", "model", "models/base")])
    assert error.value.key == "--env"
    with pytest.raises(BadInput) as error:
        run_environment([a_run(tmp_path / "run", ["arithmetic"], ["reverse-text", "copy"])])
    assert error.value.key == "--env" and "reverse-text, copy" in error.value.fact
