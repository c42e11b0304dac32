"""The run file of `headrace sft`: where examples come from, and what validation may be."""

from pathlib import Path
from typing import Any

import pytest

from headrace.config.base import ConfigError, dump, load, validate
from headrace.config.sft import SftConfig

ENV = {"env": "reverse-text"}


def sft(data: dict[str, Any], **others: Any) -> SftConfig:
    tree = {"max_steps": 1, "seq_len": 8, "model": {"init": "tiny"}, "data": data, **others}
    return validate(SftConfig, tree, "sft.toml")[0]


def problem(data: dict[str, Any], **others: Any) -> str:
    """The only line of the refusal."""
    with pytest.raises(ConfigError) as refusal:
        sft(data, **others)
    (line,) = str(refusal.value).splitlines()
    return line


@pytest.mark.parametrize("data", [{"path": "a.jsonl"}, {"name": "openai/gsm8k", "subset": "main"}, ENV])
def test_data_has_one_source(data: dict[str, Any]):
    assert sft(data).validation is None


def test_data_has_exactly_one_source():
    assert problem({}) == "sft.toml: data: give exactly one of path, name and env"
    assert (
        problem({"path": "a.jsonl", **ENV})
        == "sft.toml: data: give exactly one of path, name and env, not path and env"
    )


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"path": "a.jsonl", "split": "train"}, "split belongs to name, and path is given"),
        ({**ENV, "subset": "main"}, "subset belongs to name, and env is given"),
        ({**ENV, "columns": {"prompt": "question"}}, "columns belongs to path or name, and env is given"),
        ({"name": "a/b", "args": {"split": "eval"}}, "args belongs to env, and name is given"),
    ],
)
def test_a_key_of_another_source_is_refused_rather_than_ignored(data: dict[str, Any], key: str):
    assert problem(data) == f"sft.toml: data: {key}"


def test_columns_name_one_format_with_known_keys():
    line = problem({"path": "a.jsonl", "columns": {"messages": "chat", "prompt": "question"}})
    assert line.startswith("sft.toml: data.columns: name messages, or prompt and completion, not both")
    assert "Did you mean data.columns.completion?" in problem({"path": "a.jsonl", "columns": {"completions": "answer"}})


def test_validation_has_exactly_one_source_or_a_fraction():
    assert problem(ENV, validation={"interval": 5}).endswith("give exactly one of path, name, env and fraction")
    line = problem({"path": "a.jsonl"}, validation={"path": "b.jsonl", "fraction": 0.1})
    assert line.endswith("not path and fraction")
    held_out = sft({"path": "a.jsonl"}, validation={"fraction": 0.1}).validation
    assert held_out is not None and (held_out.interval, held_out.max_examples) == (50, 1000)


def test_validation_on_a_dataset_says_which_split():
    assert "validation: split: say which split" in problem(ENV, validation={"name": "openai/gsm8k"})
    assert sft(ENV, validation={"name": "openai/gsm8k", "split": "test"}).validation is not None


def test_demonstrations_have_no_fraction_to_hold_out():
    assert "give validation.env instead" in problem(ENV, validation={"fraction": 0.1})


@pytest.mark.parametrize("fraction", [0, 1, 1.5])
def test_a_fraction_is_between_nothing_and_everything(fraction: float):
    assert problem({"path": "a.jsonl"}, validation={"fraction": fraction}).startswith(
        "sft.toml: validation.fraction = "
    )


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
    assert "inference.model: the server takes the run's own" in problem(ENV, inference={"model": {"name": "x"}})
    assert "launch.sharing: a trainer that waits for nobody" in problem(ENV, launch={"sharing": "alternate"})
    assert "eval.env name 'a' is used twice" in problem(ENV, eval={"env": [{"id": "a"}, {"id": "a"}]})


def test_prompts_are_not_rendered_in_a_pool_outside_an_rl_run():
    for changes in ({"renderer": {"pool_size": 2}}, {"inference": {"renderer": {"pool_size": 2}}}):
        assert "renderer.pool_size: unknown key." in problem(ENV, **changes)


def test_an_sft_run_that_evaluates_comes_back_as_it_was_written(tmp_path: Path):
    config = sft(ENV, eval={"env": [{"id": "reverse-text", "args": {"split": "eval"}}]}, inference={"port": 5})
    (tmp_path / "dumped.toml").write_text(dump(config))
    assert load(SftConfig, [tmp_path / "dumped.toml"])[0] == config
