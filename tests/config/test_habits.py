"""Keys of other systems."""

import copy
from typing import Any

import pytest

from headrace.config.files import dump
from headrace.runfile.reading import validate
from headrace.runfile.run import RunConfig
from tests.config.run_files import minimal, refusal, refusals, run


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("orchestrator.buffer", {"orchestrator": {"buffer": {"online_difficulty_filtering": True, "seed": 3}}}),
        (
            "orchestrator.eval.cancel_inflight_rollouts_on_eval",
            {"orchestrator": {"eval": {"cancel_inflight_rollouts_on_eval": False}}},
        ),
        ("eval.cancel_inflight_rollouts_on_eval", {"eval": {"cancel_inflight_rollouts_on_eval": True}}),
    ],
)
def test_a_habit_gets_one_notice_and_is_ignored(key: str, changes: dict[str, Any]):
    config, notices = validate(RunConfig, minimal(**changes), "run.toml")
    (notice,) = notices
    assert notice.startswith(f"{key} is not a key of Headrace and is ignored")
    assert dump(config) == dump(run())


def test_the_notice_names_what_replaces_the_key():
    _, (notice,) = validate(RunConfig, minimal(orchestrator={"buffer": {}}), "run.toml")
    assert "orchestrator.pre_batch_filters" in notice


def test_an_empty_habit_is_a_habit_too():
    _, notices = validate(RunConfig, minimal(orchestrator={"buffer": {}}), "run.toml")
    assert len(notices) == 1


def test_each_habit_has_its_own_notice():
    both = minimal(orchestrator={"buffer": {"seed": 1}, "eval": {"cancel_inflight_rollouts_on_eval": True}})
    _, notices = validate(RunConfig, both, "run.toml")
    assert len(notices) == 2


def test_a_run_without_habits_has_no_notices():
    assert validate(RunConfig, minimal(), "run.toml")[1] == []


def test_what_stands_beside_a_habit_is_still_checked():
    changes = {"orchestrator": {"eval": {"cancel_inflight_rollouts_on_eval": True, "intervall": 3}}}
    assert "orchestrator.eval.intervall" in {error.key for error in refusals(**changes)}


@pytest.mark.parametrize(
    ("changes", "ours"),
    [
        ({"trainer": {"optim": {"learning_rate": 1e-5}}}, "trainer.optim.lr"),
        ({"orchestrator": {"num_generations": 8}}, "orchestrator.group_size"),
        ({"max_seq_len": 128}, "seq_len"),
    ],
)
def test_another_systems_name_of_a_key_suggests_ours(changes: dict[str, Any], ours: str):
    assert f" {ours}?" in (refusal(**changes).fix or "")


@pytest.mark.parametrize("role", ["policy", "student"])
@pytest.mark.parametrize("inner", [{"name": "models/tiny"}, {"model": {"name": "models/tiny"}}, "models/tiny"])
def test_the_policy_and_the_student_are_the_model(role: str, inner: Any):
    tree = minimal(orchestrator={role: copy.deepcopy(inner)})
    del tree["model"]
    config, (notice,) = validate(RunConfig, tree, "run.toml")
    assert dump(config) == dump(run())
    assert f"orchestrator.{role}" in notice and "model" in notice


def test_the_client_and_the_renderer_of_the_policy_are_the_orchestrators():
    client = {"base_url": ["http://host:1"]}
    config, notices = validate(
        RunConfig, minimal(orchestrator={"policy": {"client": client, "renderer": "qwen3"}}), "run.toml"
    )
    assert (config.orchestrator.client.base_url, config.orchestrator.renderer.name) == (["http://host:1"], "qwen3")
    assert len(notices) == 2


def test_a_policy_that_contradicts_the_model_is_refused():
    error = refusal(orchestrator={"policy": {"name": "other"}})
    assert (error.file, error.key, error.value) == ("run.toml", "orchestrator.policy.name", "other")


@pytest.mark.parametrize("within", ["", "orchestrator"])
def test_the_experimental_interval_of_the_loop_is_read(within: str):
    section: dict[str, Any] = {"experimental": {"log_loop_interval": 2.5}}
    config, (notice,) = validate(RunConfig, minimal(**({within: section} if within else section)), "run.toml")
    assert config.orchestrator.log_loop_interval == 2.5
    assert "orchestrator.log_loop_interval" in notice


@pytest.mark.parametrize(
    ("changes", "key", "ours"),
    [
        ({"model": {"attn_implementation": "sdpa"}}, "model.attn_implementation", "trainer.attention"),
        ({"trainer": {"attn_implementation": "sdpa"}}, "trainer.attn_implementation", "trainer.attention"),
        ({"trainer": {"use_liger_kernel": True}}, "trainer.use_liger_kernel", "trainer.lm_head_chunk"),
        ({"deepspeed": {"stage": 3}}, "deepspeed", "launch.trainer_processes"),
        ({"trainer": {"deepspeed": "z3.json"}}, "trainer.deepspeed", "trainer.optim.offload_state"),
    ],
)
def test_a_setting_of_other_trainers_is_refused_with_what_there_is_instead(
    changes: dict[str, Any], key: str, ours: str
):
    error = refusal(**changes)
    assert error.key == key and ours in (error.fix or "")
