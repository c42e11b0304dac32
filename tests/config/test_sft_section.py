"""The run file of `headrace sft`: where examples come from, and what validation may be."""

from pathlib import Path
from typing import Any

import pytest

from headrace.config.base import ConfigError
from headrace.config.files import dump
from headrace.config.sft import SftConfig
from headrace.errors import BadInput
from headrace.runfile.reading import load, validate

ENV = {"env": "reverse-text"}


def sft(data: dict[str, Any], **others: Any) -> SftConfig:
    tree = {"max_steps": 1, "seq_len": 8, "model": {"init": "tiny"}, "data": data, **others}
    return validate(SftConfig, tree, "sft.toml")[0]


def refusal(data: dict[str, Any], **others: Any) -> BadInput:
    """Return the only problem."""
    with pytest.raises(ConfigError) as refused:
        sft(data, **others)
    (error,) = refused.value.problems
    return error


@pytest.mark.parametrize("data", [{"path": "a.jsonl"}, {"name": "openai/gsm8k", "subset": "main"}, ENV])
def test_data_has_one_source(data: dict[str, Any]):
    assert sft(data).validation is None


def test_data_has_exactly_one_source():
    assert refusal({}).key == "data"
    error = refusal({"path": "a.jsonl", **ENV})
    assert (error.key, error.value) == ("data.env", "reverse-text")
    assert refusal({"split": "test"}).key == "data.split"


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"path": "a.jsonl", "split": "train"}, "split"),
        ({**ENV, "subset": "main"}, "subset"),
        ({**ENV, "columns": {"prompt": "question"}}, "columns"),
        ({"name": "a/b", "args": {"split": "eval"}}, "args"),
    ],
)
def test_a_key_of_another_source_is_refused_rather_than_ignored(data: dict[str, Any], key: str):
    error = refusal(data)
    assert (error.key, error.value) == (f"data.{key}", data[key])


def test_columns_name_one_format_with_known_keys():
    error = refusal({"path": "a.jsonl", "columns": {"messages": "chat", "prompt": "question"}})
    assert (error.key, error.value) == ("data.columns.messages", "chat")
    error = refusal({"path": "a.jsonl", "columns": {"completions": "answer"}})
    assert error.key == "data.columns.completions" and "data.columns.completion?" in (error.fix or "")


def test_validation_has_exactly_one_source_or_a_fraction():
    assert refusal(ENV, validation={"interval": 5}).key == "validation"
    error = refusal({"path": "a.jsonl"}, validation={"path": "b.jsonl", "fraction": 0.1})
    assert (error.key, error.value) == ("validation.fraction", 0.1)
    held_out = sft({"path": "a.jsonl"}, validation={"fraction": 0.1}).validation
    assert held_out is not None and (held_out.interval, held_out.max_examples) == (50, 1000)


def test_validation_on_a_dataset_says_which_split():
    assert refusal(ENV, validation={"name": "openai/gsm8k"}).key == "validation.split"
    assert sft(ENV, validation={"name": "openai/gsm8k", "split": "test"}).validation is not None


def test_demonstrations_have_no_fraction_to_hold_out():
    assert refusal(ENV, validation={"fraction": 0.1}).key == "validation.fraction"


@pytest.mark.parametrize("fraction", [0, 1, 1.5])
def test_a_fraction_is_between_nothing_and_everything(fraction: float):
    error = refusal({"path": "a.jsonl"}, validation={"fraction": fraction})
    assert (error.key, error.value) == ("validation.fraction", fraction)


def test_paths_of_data_and_validation_are_relative_to_their_file(tmp_path: Path):
    file = tmp_path / "sft.toml"
    file.write_text(
        'max_steps = 1\nseq_len = 8\n[data]\npath = "a.jsonl"\ncolumns = { prompt = "q", completion = "a" }\n'
        '[validation]\npath = "b.jsonl"\n'
    )
    config, _ = load(SftConfig, [file])
    assert config.data.path == tmp_path / "a.jsonl"
    assert config.validation is not None and config.validation.path == tmp_path / "b.jsonl"
    (tmp_path / "dumped.toml").write_text(dump(config))
    assert load(SftConfig, [tmp_path / "dumped.toml"])[0] == config


def test_evaluation_takes_its_model_length_and_renderer_from_the_run():
    config = sft(ENV, eval={"interval": 4, "env": [{"id": "reverse-text"}]}, seed=3, renderer={"name": "qwen3"})
    server, evaluator = config.server(), config.evaluator()
    assert (server.model, server.renderer, server.seed, server.max_model_len) == (config.model, config.renderer, 3, 8)
    assert (evaluator.train.env, evaluator.seq_len, evaluator.max_steps) == ([], 8, 1)
    assert evaluator.eval.pin_version
    assert evaluator.renderer.model_dump(exclude={"pool_size"}) == config.renderer.model_dump()
    longer = sft(ENV, eval={"env": [{"id": "reverse-text"}]}, inference={"max_model_len": 64})
    assert (longer.server().max_model_len, longer.evaluator().seq_len) == (64, 64)


def test_versions_are_evaluated_at_the_interval_of_any_environment():
    envs = [{"id": "a"}, {"id": "b", "interval": 5}]
    config = sft(ENV, eval={"interval": 3, "env": envs})
    assert [step for step in range(1, 11) if config.is_evaluated(step)] == [3, 5, 6, 9, 10]
    assert config.evaluates and not sft(ENV).evaluates
    assert not sft(ENV).is_evaluated(100)


def test_what_the_server_takes_from_the_run_is_refused_in_its_section():
    assert refusal(ENV, inference={"model": {"name": "x"}}).key == "inference.model"
    assert refusal(ENV, launch={"sharing": "alternate"}).key == "launch.sharing"
    error = refusal(ENV, eval={"env": [{"id": "a"}, {"id": "a"}]})
    assert (error.key, error.value) == ("eval.env.1.name", "a")


@pytest.mark.parametrize("section", [{}, {"interval": 5}, {"env": []}])
def test_an_evaluation_without_an_environment_is_refused(section: dict[str, Any]):
    assert refusal(ENV, eval=section).key == "eval.env"


def test_prompts_are_not_rendered_in_a_pool_outside_an_rl_run():
    for changes in ({"renderer": {"pool_size": 2}}, {"inference": {"renderer": {"pool_size": 2}}}):
        assert (refusal(ENV, **changes).key or "").endswith("renderer.pool_size")


def test_an_sft_run_that_evaluates_comes_back_as_it_was_written(tmp_path: Path):
    config = sft(ENV, eval={"env": [{"id": "reverse-text", "args": {"split": "eval"}}]}, inference={"port": 5})
    (tmp_path / "dumped.toml").write_text(dump(config))
    assert load(SftConfig, [tmp_path / "dumped.toml"])[0] == config
