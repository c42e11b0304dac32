"""Keys of other systems."""

from typing import Any

import pytest

from headrace.config.base import ConfigError, dump, validate
from headrace.config.run import RunConfig
from tests.config.run_files import minimal, run


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
    with pytest.raises(ConfigError, match=r"orchestrator\.eval\.intervall: unknown key"):
        validate(RunConfig, minimal(**changes), "run.toml")


@pytest.mark.parametrize(
    ("changes", "ours"),
    [
        ({"trainer": {"optim": {"learning_rate": 1e-5}}}, "trainer.optim.lr"),
        ({"orchestrator": {"rollouts_per_example": 8}}, "orchestrator.group_size"),
        ({"max_seq_len": 128}, "seq_len"),
    ],
)
def test_another_systems_name_of_a_key_suggests_ours(changes: dict[str, Any], ours: str):
    with pytest.raises(ConfigError) as refusal:
        run(**changes)
    assert f"unknown key. Did you mean {ours}?" in str(refusal.value)
