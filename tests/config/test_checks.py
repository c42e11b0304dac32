"""What a run file may not say, and how it is told."""

from typing import Any

import pytest

from headrace.config.base import ConfigError, validate
from headrace.config.run import RunConfig
from tests.config.run_files import minimal, refusal, refusals, run


def problems(**changes: Any) -> list[str]:
    """The lines of the refusal."""
    with pytest.raises(ConfigError) as refusal:
        run(**changes)
    return str(refusal.value).splitlines()


def problem(**changes: Any) -> str:
    """The only line of the refusal."""
    (line,) = problems(**changes)
    return line


def test_the_minimal_run_is_valid():
    assert run().orchestrator.batch_size == 128


def test_a_mistyped_key_suggests_the_nearest_one_beside_it():
    line = problem(trainer={"optim": {"weight_dacay": 0.1}})
    assert line == "run.toml: trainer.optim.weight_dacay: unknown key. Did you mean trainer.optim.weight_decay?"


def test_a_mistyped_section_suggests_the_nearest_one():
    assert "Did you mean orchestrator?" in problem(orchestrater={})


def test_a_key_in_the_wrong_section_suggests_where_it_belongs():
    assert "Did you mean trainer.optim.lr?" in problem(lr=1e-5)
    assert "Did you mean orchestrator.group_size?" in problem(group_size=4)


def test_a_mistyped_key_in_a_list_of_tables_is_named_with_its_index():
    line = problem(orchestrator={"train": {"env": [{"id": "a"}, {"id": "b", "ration": 1}]}})
    assert line.startswith("run.toml: orchestrator.train.env.1.ration: unknown key. Did you mean")
    assert "ratio?" in line


def test_a_mistyped_key_inside_a_union_suggests_a_key_of_that_union():
    line = problem(trainer={"loss": {"type": "ipo", "ipo_treshold": 0.1}})
    assert "trainer.loss.ipo_treshold: unknown key. Did you mean trainer.loss.ipo_threshold?" in line


def test_a_key_of_another_type_of_the_same_table_is_told_with_those_that_it_has():
    error = refusal(trainer={"loss": {"type": "cispo", "kl_tau": 0.1}})
    assert error.key == "trainer.loss.kl_tau"
    assert "type, eps_max" in (error.fix or "")


def test_a_key_like_nothing_we_know_suggests_nothing():
    assert problem(zebra=1) == "run.toml: zebra: unknown key."


def test_a_mistyped_shared_key_is_reported_once_under_the_name_that_was_written():
    assert problem(model={"nmae": "x"}).startswith("run.toml: model.nmae: unknown key. Did you mean model.name?")


def test_a_wrong_shared_value_is_reported_once_under_the_name_that_was_written():
    error = refusal(max_steps=-1)
    assert (error.file, error.key, error.value) == ("run.toml", "max_steps", -1)


def test_several_problems_are_reported_at_once():
    lines = problems(trainer={"optim": {"lr": -1}, "lss": {}}, inference={"port": 70000})
    assert len(lines) == 3
    for key in ("trainer.optim.lr", "trainer.lss", "inference.port"):
        assert any(key in line for line in lines)


def test_a_negative_learning_rate_is_refused_with_the_value():
    line = problem(trainer={"optim": {"lr": -1e-5}})
    assert "trainer.optim.lr" in line
    assert "greater than 0" in line
    assert "-1e-05" in line


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_learning_rate_that_is_no_finite_number_is_refused(value: float):
    assert "trainer.optim.lr" in problem(trainer={"optim": {"lr": value}})


def test_a_wrong_type_in_a_union_names_the_key_alone():
    for error in refusals(orchestrator={"max_inflight_rollouts": "many"}):
        assert error.key == "orchestrator.max_inflight_rollouts"


@pytest.mark.parametrize("value", [0, -4])
def test_at_least_one_rollout_must_be_in_flight(value: int):
    assert any("max_inflight_rollouts" in line for line in problems(orchestrator={"max_inflight_rollouts": value}))


def test_a_value_where_a_section_belongs_is_refused():
    assert any("trainer" in line for line in problems(trainer=3))


def test_running_further_ahead_than_rollouts_may_age_is_refused():
    line = problem(orchestrator={"max_async_level": 9})
    assert "max_async_level 9 is above max_off_policy_steps 8" in line


def test_a_batch_must_hold_whole_groups():
    assert "batch_size 100 is not divisible by group_size 8" in problem(orchestrator={"batch_size": 100})
    run(orchestrator={"batch_size": 96, "group_size": 12})


def test_a_batch_must_hold_whole_groups_of_every_environment():
    envs = [{"id": "a", "group_size": 4}, {"id": "b", "group_size": 3}]
    line = problem(orchestrator={"batch_size": 32, "train": {"env": envs}})
    assert "batch_size 32 is not divisible by group_size 3" in line


def test_a_batch_is_counted_in_rollouts_or_in_tokens():
    line = problem(orchestrator={"batch_size": 128, "token_batch_size": 4096})
    assert "batch_size or token_batch_size, not both" in line
    tokens = run(orchestrator={"token_batch_size": 4096}).orchestrator
    assert (tokens.batch_size, tokens.token_batch_size) == (None, 4096)


@pytest.mark.parametrize(
    "train",
    [
        {"sampling": {"temperature": 0}, "env": [{"id": "a"}]},
        {"env": [{"id": "a", "sampling": {"temperature": 0.0}}]},
    ],
)
def test_training_refuses_temperature_zero(train: dict[str, Any]):
    line = problem(orchestrator={"train": train})
    assert "'a' samples at temperature 0" in line


def test_an_environments_own_temperature_wins_over_a_greedy_default():
    run(
        orchestrator={"train": {"sampling": {"temperature": 0}, "env": [{"id": "a", "sampling": {"temperature": 0.5}}]}}
    )


def test_evaluation_may_be_greedy():
    run(orchestrator={"eval": {"sampling": {"temperature": 0}, "env": [{"id": "reverse-text"}]}})


def test_other_sampling_keys_leave_the_default_temperature():
    sampling = run(orchestrator={"train": {"sampling": {"max_tokens": 16}}}).orchestrator.train.sampling
    assert (sampling.max_tokens, sampling.temperature) == (16, 1.0)


@pytest.mark.parametrize("slot", ["train", "eval"])
def test_two_environments_of_a_slot_need_two_names(slot: str):
    twice = [{"id": "a"}, {"id": "a"}]
    assert f"{slot}.env name 'a' is used twice" in problem(orchestrator={slot: {"env": twice}})
    named = run(orchestrator={slot: {"env": [{"id": "a"}, {"id": "a", "name": "b"}]}})
    assert [env.name for env in getattr(named.orchestrator, slot).env] == ["a", "b"]


def test_the_same_name_may_train_and_evaluate():
    run(orchestrator={"eval": {"env": [{"id": "reverse-text"}]}})


def test_the_name_of_the_total_is_reserved():
    assert "'all' is reserved" in problem(orchestrator={"train": {"env": [{"id": "a", "name": "all"}]}})


def test_filters_is_another_name_of_post_batch_filters():
    config = run(orchestrator={"filters": [{"type": "repetition", "window": 100, "enforce": True}]}).orchestrator
    (only,) = config.post_batch_filters
    assert (only.type, only.enforce) == ("repetition", True)
    assert len(config.pre_batch_filters) == 3


def test_both_names_of_the_same_filters_are_refused():
    line = problem(orchestrator={"filters": [], "post_batch_filters": []})
    assert "filters and post_batch_filters are the same key" in line


def test_default_filters_are_those_of_the_spec():
    config = run().orchestrator
    assert [(f.type, f.enforce) for f in config.pre_batch_filters] == [
        ("gibberish", False),
        ("repetition", False),
        ("zero_advantage", False),
    ]
    assert [(f.type, f.enforce) for f in config.post_batch_filters] == [
        ("gibberish", False),
        ("repetition", False),
        ("zero_advantage", True),
    ]
    gibberish, repetition, _ = config.pre_batch_filters
    assert (gibberish.token_id_threshold, gibberish.logprob_offset) == (100000, 2.0)
    assert (repetition.window, repetition.prob_threshold) == (3000, 0.99)


def test_one_filter_of_a_type_per_slot():
    twice = [{"type": "repetition"}, {"type": "repetition", "window": 5}]
    assert "pre_batch_filters" in problem(orchestrator={"pre_batch_filters": twice})


def test_an_unknown_filter_type_names_the_known_ones():
    line = problem(orchestrator={"pre_batch_filters": [{"type": "gibberisch"}]})
    for known in ("gibberish", "repetition", "zero_advantage"):
        assert known in line


def test_a_loss_without_a_type_is_the_default_loss():
    loss = run(trainer={"loss": {"kl_tau": 0.01}}).trainer.loss
    assert (loss.type, loss.kl_tau) == ("default", 0.01)


def test_defaults_are_those_of_the_spec():
    config = run().orchestrator
    assert (config.batch_size, config.group_size, config.max_inflight_rollouts) == (128, 8, "auto")
    assert (config.max_off_policy_steps, config.max_async_level, config.log_loop_interval) == (8, 1, 5.0)
    assert (config.eval.interval, config.eval.group_size) == (100, 1)
    assert (config.eval.eval_base_model, config.eval.skip_eval_on_resume) == (True, True)


@pytest.mark.parametrize("key", ["max_steps", "seq_len"])
def test_a_run_needs_an_end_and_a_length(key: str):
    tree = minimal()
    del tree[key]
    with pytest.raises(ConfigError, match=key):
        validate(RunConfig, tree, "run.toml")


def test_a_run_needs_an_environment():
    assert "at least one [[orchestrator.train.env]]" in problem(orchestrator={"train": {"env": []}})


def test_a_model_has_one_origin():
    assert "one of name, init and sft, not name and init" in problems(model={"init": "tiny"})[0]


def test_an_environment_needs_an_id():
    assert "orchestrator.train.env.0.id" in problem(orchestrator={"train": {"env": [{"name": "a"}]}})


@pytest.mark.parametrize("top_k", [0, -2])
def test_top_k_is_positive_or_off(top_k: int):
    assert "top_k" in problem(orchestrator={"eval": {"sampling": {"top_k": top_k}}})
