"""Keys of the run that fill the sections of its processes."""

from pathlib import Path
from typing import Any

import pytest

from headrace.config.base import ConfigError
from headrace.config.files import dump
from headrace.runfile.reading import load, validate
from headrace.runfile.run import RunConfig
from tests.config.run_files import minimal, refusal, run


def test_shared_keys_fill_every_process():
    config = run(seed=7, model={"name": "models/a", "dtype": "float32"})
    assert {section.output_dir for section in (config.trainer, config.orchestrator, config.inference)} == {
        Path("outputs/test")
    }
    assert {section.seed for section in (config.trainer, config.orchestrator, config.inference)} == {7}
    assert config.trainer.model == config.orchestrator.model == config.inference.model == config.model
    assert (config.trainer.max_steps, config.orchestrator.max_steps) == (10, 10)
    assert (config.trainer.seq_len, config.orchestrator.seq_len, config.inference.max_model_len) == (64, 64, 64)


def test_the_orchestrators_renderer_is_also_the_servers():
    config = run(orchestrator={"renderer": {"name": "qwen3", "thinking_retention": "all", "pool_size": 4}})
    assert config.orchestrator.renderer.pool_size == 4
    assert config.inference.renderer.model_dump() == config.orchestrator.renderer.model_dump(exclude={"pool_size"})
    assert run(orchestrator={"renderer": "qwen3"}).inference.renderer.name == "qwen3"


@pytest.mark.parametrize(
    "changes",
    [
        {"trainer": {"max_steps": 10}},
        {"orchestrator": {"output_dir": "outputs/test"}},
        {"inference": {"model": {"name": "models/tiny"}}},
    ],
)
def test_an_equal_value_in_a_section_is_accepted(changes: dict[str, Any]):
    assert run(**changes) == run()


@pytest.mark.parametrize(
    ("changes", "key", "value", "shared"),
    [
        ({"trainer": {"max_steps": 11}}, "trainer.max_steps", 11, "10"),
        ({"inference": {"model": {"name": "other"}}}, "inference.model.name", "other", "models/tiny"),
        ({"orchestrator": {"seq_len": 65}}, "orchestrator.seq_len", 65, "64"),
    ],
)
def test_a_different_value_in_a_section_is_refused_with_both(
    changes: dict[str, Any], key: str, value: Any, shared: str
):
    error = refusal(**changes)
    assert (error.key, error.value) == (key, value)
    assert shared in error.fact


def test_a_runs_own_file_follows_an_override_of_a_shared_key(tmp_path: Path):
    saved = tmp_path / "config.toml"
    saved.write_text(dump(run(trainer={"model": {"dtype": "bfloat16"}})))
    overrides = ["--max_steps", "20", "--seed", "3", "--model.name", "models/other"]
    config, _ = load(RunConfig, [saved], overrides)
    expected = run(max_steps=20, seed=3, model={"name": "models/other"}, trainer={"model": {"dtype": "bfloat16"}})
    assert config == expected


def test_a_file_on_top_may_change_a_shared_key_but_not_contradict_a_section(tmp_path: Path):
    below, above = tmp_path / "below.toml", tmp_path / "above.toml"
    below.write_text(dump(run()))
    above.write_text("max_steps = 20\n")
    assert load(RunConfig, [below, above])[0] == run(max_steps=20)
    above.write_text("max_steps = 20\n[trainer]\nmax_steps = 30\n")
    with pytest.raises(ConfigError) as refused:
        load(RunConfig, [below, above])
    assert (refused.value.key, refused.value.value, refused.value.file) == ("trainer.max_steps", 30, above)


def test_the_engine_may_take_longer_sequences_than_are_trained_but_no_shorter_ones():
    assert run(inference={"max_model_len": 100}).inference.max_model_len == 100
    error = refusal(inference={"max_model_len": 63})
    assert (error.key, error.value) == ("inference.max_model_len", 63)
    assert "64" in (error.fix or "")


@pytest.mark.parametrize(
    ("algo", "longest"),
    [
        ("grpo", 64),
        ("opsd", 2 * 64 + 256),
        ("rlcsd", 2 * 64 + 256),
        ({"type": "rlcsd", "teacher": {"name": "t", "base_url": "http://t/v1"}}, 64),
    ],
)
def test_an_engine_that_scores_with_hints_takes_them_too(algo: Any, longest: int):
    config = run(orchestrator={"train": {"env": [{"id": "a"}, {"id": "b", "algo": algo}]}})
    assert config.inference.max_model_len == longest
    unused = run(orchestrator={"algo": algo, "train": {"env": [{"id": "a", "algo": "reward"}]}})
    assert unused.inference.max_model_len == 64


@pytest.mark.parametrize(("kind", "cost"), [("opsd", "dropped"), ("rlcsd", "left with their plain credit")])
def test_an_engine_too_short_for_hints_gets_a_notice_of_what_that_costs(kind: str, cost: str):
    envs: list[dict[str, Any]] = [{"id": "a"}, {"id": "b", "algo": kind}]

    def notices(longest: int) -> list[str]:
        tree = minimal(orchestrator={"train": {"env": envs}}, inference={"max_model_len": longest})
        return validate(RunConfig, tree, "run.toml")[1]

    assert notices(383) == [
        f"orchestrator.train.env 'b': {kind} has the policy score hints with their samples, and "
        "inference.max_model_len is 383: such a sequence may have 384 tokens, and rollouts with one too long are "
        f"{cost}; leave it out for that, or keep it if hints are that much shorter."
    ]
    assert notices(384) == []
    envs[1] = {"id": "b", "algo": {"type": kind, "teacher": {"name": "t", "base_url": "http://t/v1"}}}
    assert notices(64) == []
