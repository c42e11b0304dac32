"""What a run file may not say, and how it is refused."""

import tomllib
from typing import Any

import pytest

from headrace.config.base import ConfigError
from headrace.config.files import dump
from headrace.config.orchestrator import FILTERS
from headrace.runfile.reading import validate
from headrace.runfile.run import RunConfig
from tests.config.run_files import minimal, refusal, refusals, run


def suggested(key: str, right: str, **changes: Any) -> None:
    """Check that the unknown key is named, and the right one suggested."""
    error = refusal(**changes)
    assert error.key == key and f" {right}?" in (error.fix or "")


def test_the_minimal_run_is_valid():
    assert run().orchestrator.batch_size == 128


def test_a_mistyped_key_suggests_the_nearest_one_beside_it():
    changes = {"trainer": {"optim": {"weight_dacay": 0.1}}}
    suggested("trainer.optim.weight_dacay", "trainer.optim.weight_decay", **changes)


def test_a_mistyped_section_suggests_the_nearest_one():
    suggested("orchestrater", "orchestrator", orchestrater={})


def test_a_key_in_the_wrong_section_suggests_where_it_belongs():
    suggested("lr", "trainer.optim.lr", lr=1e-5)
    suggested("group_size", "orchestrator.group_size", group_size=4)


def test_a_mistyped_key_in_a_list_of_tables_is_named_with_its_index():
    train = {"env": [{"id": "a"}, {"id": "b", "ration": 1}]}
    suggested("orchestrator.train.env.1.ration", "orchestrator.train.env.1.ratio", orchestrator={"train": train})


def test_a_mistyped_key_inside_a_union_suggests_a_key_of_that_union():
    loss = {"type": "ipo", "ipo_treshold": 0.1}
    suggested("trainer.loss.ipo_treshold", "trainer.loss.ipo_threshold", trainer={"loss": loss})


def test_a_key_of_another_type_of_the_same_table_is_refused():
    error = refusal(trainer={"loss": {"type": "cispo", "kl_tau": 0.1}})
    assert error.key == "trainer.loss.kl_tau"
    assert error.value == 0.1


def test_a_key_like_nothing_we_know_suggests_nothing():
    error = refusal(zebra=1)
    assert (error.key, error.fix) == ("zebra", None)


def test_a_mistyped_shared_key_is_reported_once_under_the_name_that_was_written():
    suggested("model.nmae", "model.name", model={"nmae": "x"})


def test_a_wrong_shared_value_is_reported_once_under_the_name_that_was_written():
    error = refusal(max_steps=-1)
    assert (error.file, error.key, error.value) == ("run.toml", "max_steps", -1)


def test_several_problems_are_reported_at_once():
    errors = refusals(trainer={"optim": {"lr": -1}, "lss": {}}, inference={"port": 70000})
    assert {error.key for error in errors} == {"trainer.optim.lr", "trainer.lss", "inference.port"}
    assert len(errors) == 3


def test_a_negative_learning_rate_is_refused_with_the_value():
    error = refusal(trainer={"optim": {"lr": -1e-5}})
    assert (error.key, error.value) == ("trainer.optim.lr", -1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_learning_rate_that_is_no_finite_number_is_refused(value: float):
    assert refusal(trainer={"optim": {"lr": value}}).key == "trainer.optim.lr"


def test_a_wrong_type_in_a_union_names_the_key_alone():
    for error in refusals(orchestrator={"max_inflight_rollouts": "many"}):
        assert error.key == "orchestrator.max_inflight_rollouts"


@pytest.mark.parametrize("value", [0, -4])
def test_at_least_one_rollout_must_be_in_flight(value: int):
    for error in refusals(orchestrator={"max_inflight_rollouts": value}):
        assert (error.key, error.value) == ("orchestrator.max_inflight_rollouts", value)


def test_a_value_where_a_section_belongs_is_refused():
    assert "trainer" in {error.key for error in refusals(trainer=3)}


def test_running_further_ahead_than_rollouts_may_age_is_refused():
    error = refusal(orchestrator={"max_async_level": 9})
    assert (error.key, error.value) == ("orchestrator.max_async_level", 9)


def test_a_batch_must_hold_whole_groups():
    error = refusal(orchestrator={"batch_size": 100})
    assert (error.key, error.value) == ("orchestrator.batch_size", 100)
    assert "104" in (error.fix or ""), "the next multiple of 8"
    run(orchestrator={"batch_size": 96, "group_size": 12})


def test_a_batch_must_hold_whole_groups_of_every_environment():
    envs = [{"id": "a", "group_size": 4}, {"id": "b", "group_size": 3}]
    error = refusal(orchestrator={"batch_size": 32, "train": {"env": envs}})
    assert (error.key, error.value) == ("orchestrator.batch_size", 32)
    assert "33" in (error.fix or "")


def test_a_group_must_fit_in_flight():
    envs = [{"id": "a"}, {"id": "b", "group_size": 16}]
    error = refusal(orchestrator={"max_inflight_rollouts": 15, "train": {"env": envs}})
    assert (error.key, error.value) == ("orchestrator.max_inflight_rollouts", 15)
    assert "16" in (error.fix or "")
    run(orchestrator={"max_inflight_rollouts": 16, "train": {"env": envs}})


def test_a_ratio_is_set_on_all_environments_or_on_none():
    envs = [{"id": "a", "ratio": 1}, {"id": "b"}, {"id": "c", "ratio": 2}]
    assert refusal(orchestrator={"train": {"env": envs}}).key == "orchestrator.train.env.1.ratio"
    run(orchestrator={"train": {"env": [envs[0], envs[2]]}})
    run(orchestrator={"train": {"env": [envs[1]]}})


@pytest.mark.parametrize("section", [{}, {"interval": 5}, {"env": []}])
def test_an_evaluation_without_an_environment_is_refused(section: dict[str, Any]):
    assert refusal(orchestrator={"eval": section}).key == "orchestrator.eval.env"


def test_a_run_that_evaluates_nothing_writes_no_section_about_it():
    tree = tomllib.loads(dump(run()))
    assert "eval" not in tree["orchestrator"]
    assert validate(RunConfig, tree, "config.toml")[0] == run()


def test_a_batch_is_counted_in_rollouts_or_in_tokens():
    error = refusal(orchestrator={"batch_size": 128, "token_batch_size": 4096})
    assert (error.key, error.value) == ("orchestrator.token_batch_size", 4096)
    tokens = run(orchestrator={"token_batch_size": 4096}).orchestrator
    assert (tokens.batch_size, tokens.token_batch_size) == (None, 4096)


@pytest.mark.parametrize(
    ("key", "train"),
    [
        ("sampling", {"sampling": {"temperature": 0}, "env": [{"id": "a"}]}),
        ("env.0.sampling", {"env": [{"id": "a", "sampling": {"temperature": 0.0}}]}),
    ],
)
def test_training_refuses_temperature_zero(key: str, train: dict[str, Any]):
    error = refusal(orchestrator={"train": train})
    assert (error.key, error.value) == (f"orchestrator.train.{key}.temperature", 0)


def test_an_environments_own_temperature_wins_over_a_greedy_default():
    envs = [{"id": "a", "sampling": {"temperature": 0.5}}]
    config = run(orchestrator={"train": {"sampling": {"temperature": 0}, "env": envs}}).orchestrator
    assert config.train_temperature(config.train.env[0]) == 0.5


def test_evaluation_may_be_greedy():
    config = run(orchestrator={"eval": {"sampling": {"temperature": 0}, "env": [{"id": "reverse-text"}]}})
    assert config.orchestrator.eval.sampling.temperature == 0


def test_other_sampling_keys_leave_the_default_temperature():
    sampling = run(orchestrator={"train": {"sampling": {"max_tokens": 16}}}).orchestrator.train.sampling
    assert (sampling.max_tokens, sampling.temperature) == (16, 1.0)


@pytest.mark.parametrize("slot", ["train", "eval"])
def test_two_environments_of_a_slot_need_two_names(slot: str):
    twice = [{"id": "a"}, {"id": "a"}]
    error = refusal(orchestrator={slot: {"env": twice}})
    assert (error.key, error.value) == (f"orchestrator.{slot}.env.1.name", "a")
    named = run(orchestrator={slot: {"env": [{"id": "a"}, {"id": "a", "name": "b"}]}})
    assert [env.name for env in getattr(named.orchestrator, slot).env] == ["a", "b"]


def test_the_same_name_may_train_and_evaluate():
    config = run(orchestrator={"eval": {"env": [{"id": "reverse-text"}]}}).orchestrator
    assert config.train.env[0].name == config.eval.env[0].name == "reverse-text"


def test_the_name_of_the_total_is_reserved():
    error = refusal(orchestrator={"train": {"env": [{"id": "a", "name": "all"}]}})
    assert (error.key, error.value) == ("orchestrator.train.env.0.name", "all")


def test_filters_is_another_name_of_post_batch_filters():
    config = run(orchestrator={"filters": [{"type": "repetition", "window": 100, "enforce": True}]}).orchestrator
    (only,) = config.post_batch_filters
    assert (only.type, only.enforce) == ("repetition", True)
    assert len(config.pre_batch_filters) == 3


def test_both_names_of_the_same_filters_are_refused():
    assert refusal(orchestrator={"filters": [], "post_batch_filters": []}).key == "orchestrator.filters"


@pytest.mark.parametrize(
    ("slot", "written", "enforced"),
    [
        ("post_batch_filters", {}, True),
        ("filters", {}, True),
        ("post_batch_filters", {"enforce": False}, False),
        ("pre_batch_filters", {}, False),
        ("pre_batch_filters", {"enforce": True}, True),
    ],
)
def test_zero_advantage_drops_rollouts_after_the_batch_unless_it_says_otherwise(
    slot: str, written: dict[str, Any], enforced: bool
):
    config = run(orchestrator={slot: [{"type": "zero_advantage", **written}, {"type": "repetition"}]})
    again = validate(RunConfig, tomllib.loads(dump(config)), "config.toml")[0]
    name = "post_batch_filters" if slot == "filters" else slot
    for orchestrator in (config.orchestrator, again.orchestrator):
        assert [entry.enforce for entry in getattr(orchestrator, name)] == [enforced, False]


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
    error = refusal(orchestrator={"pre_batch_filters": twice})
    assert (error.key, error.value) == ("orchestrator.pre_batch_filters.1", "repetition")


def test_an_unknown_filter_type_names_the_known_ones():
    error = refusal(orchestrator={"pre_batch_filters": [{"type": "gibberisch"}]})
    assert (error.key, error.value) == ("orchestrator.pre_batch_filters.0.type", "gibberisch")
    assert all(name in (error.fix or "") for name in FILTERS.names)


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
    with pytest.raises(ConfigError) as refused:
        validate(RunConfig, tree, "run.toml")
    assert refused.value.key == key


def test_a_run_needs_an_environment():
    assert refusal(orchestrator={"train": {"env": []}}).key == "orchestrator.train.env"


def test_a_model_has_one_origin():
    error = refusal(model={"init": "tiny"})
    assert (error.key, error.value) == ("model.init", "tiny")


def test_an_environment_needs_an_id():
    assert refusal(orchestrator={"train": {"env": [{"name": "a"}]}}).key == "orchestrator.train.env.0.id"


@pytest.mark.parametrize("top_k", [0, -2])
def test_top_k_is_positive_or_off(top_k: int):
    error = refusal(orchestrator={"eval": {"sampling": {"top_k": top_k}}})
    assert (error.key, error.value) == ("orchestrator.eval.sampling.top_k", top_k)
