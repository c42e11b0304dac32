"""The ways to write `[orchestrator.algo]`."""

from pathlib import Path
from typing import Any

import pytest

from headrace.algorithms.echo import EchoConfig
from headrace.algorithms.grpo import GrpoConfig
from headrace.config.model import FrozenModelConfig
from tests.config.run_files import MINIMAL, algo, load_text, refusal, run

URL = "http://host:8001/v1"
TEACHER = {"name": "teacher", "base_url": URL}


def test_nothing_is_grpo_and_a_string_is_the_type():
    assert run().orchestrator.algo == GrpoConfig() == algo("grpo") == algo({"type": "grpo"}) == algo({})
    assert algo("max_rl").type == "max_rl"
    assert algo("my_package.my_module:MyAlgorithm").type == "my_package.my_module:MyAlgorithm"


def test_a_plain_value_is_the_key_that_matters_most():
    assert algo({"length_penalty": "turns"}).length_penalty.type == "turns"
    echo = algo({"type": "echo", "roles": {"user": 0.5}, "filter": "a.b:keep"})
    assert {role: entry.alpha for role, entry in echo.roles.items()} == {"user": 0.5}
    assert (echo.filter.import_path, echo.filter.kwargs) == ("a.b:keep", {})


@pytest.mark.parametrize(
    "orchestrator",
    [
        {"advantage": {"type": "echo", "normalize": "std"}},
        {"advantage": "echo", "algo": {"normalize": "std"}},
        {"algo": "echo", "advantage": {"type": "echo", "normalize": "std"}},
        {"algo": {"type": "echo", "advantage": {"normalize": "std"}}},
        {"algo": {"advantage": {"type": "echo", "normalize": "std"}, "normalize": "std"}},
        {"advantage": {"normalize": "std"}, "algo": {"advantage": "echo"}},
    ],
    ids=str,
)
def test_advantage_is_folded_into_algo(orchestrator: dict[str, Any]):
    assert run(orchestrator=orchestrator).orchestrator.algo == EchoConfig(normalize="std")


def test_tables_that_are_folded_merge_key_by_key():
    both = {"algo": {"length_penalty": {"type": "linear"}}, "advantage": {"length_penalty": {"coef": 0.5}}}
    assert run(orchestrator=both).orchestrator.algo.length_penalty.coef == 0.5


@pytest.mark.parametrize(
    ("short", "table"),
    [
        ({"length_penalty": "linear"}, {"length_penalty": {"type": "linear"}}),
        ({"terms": ["a.b:c"]}, {"terms": [{"import_path": "a.b:c"}]}),
        ({"type": "echo", "roles": {"tool": 0.5}}, {"type": "echo", "roles": {"tool": {"alpha": 0.5}}}),
        ({"type": "echo", "filter": "a.b:c"}, {"type": "echo", "filter": {"import_path": "a.b:c"}}),
        ({"type": "rlcsd", "hint_filter": "a.b:c"}, {"type": "rlcsd", "hint_filter": {"import_path": "a.b:c"}}),
    ],
    ids=str,
)
def test_a_plain_value_does_not_contradict_the_table_that_it_stands_for(short: Any, table: Any):
    for first, second in ((short, table), (table, short)):
        for both in ({"algo": first, "advantage": second}, {"algo": {**first, "advantage": second}}):
            assert run(orchestrator=both).orchestrator.algo == algo(table)


@pytest.mark.parametrize(
    ("orchestrator", "key", "value", "other"),
    [
        (
            {"algo": {"type": "grpo"}, "advantage": {"type": "max_rl"}},
            "advantage.type",
            "max_rl",
            "algo.type",
        ),
        (
            {"algo": {"length_penalty": {"type": "linear", "coef": 1}, "advantage": {"length_penalty": {"coef": 2}}}},
            "algo.advantage.length_penalty.coef",
            2,
            "length_penalty.coef",
        ),
        (
            {"algo": {"length_penalty": {"type": "turns"}}, "advantage": {"length_penalty": "linear"}},
            "advantage.length_penalty.type",
            "linear",
            "algo.length_penalty.type",
        ),
        (
            {"algo": {"type": "opd", "teacher": TEACHER, "model": {"name": "other"}}},
            "algo.model.name",
            "other",
            "teacher.name",
        ),
        (
            {"algo": {"type": "sft", "teacher": TEACHER, "sampling": {"source": {**TEACHER, "name": "other"}}}},
            "algo.teacher",
            f"teacher at {URL}",
            "sampling.source",
        ),
        (
            {"algo": {"type": "sft", "teacher": TEACHER, "sampling": {"source": "policy"}}},
            "algo.teacher",
            f"teacher at {URL}",
            "sampling.source",
        ),
    ],
)
def test_a_shorthand_that_contradicts_the_explicit_table_is_refused_with_both(
    orchestrator: Any, key: str, value: Any, other: str
):
    error = refusal(orchestrator=orchestrator)
    assert (error.key, error.value) == (f"orchestrator.{key}", value)
    assert other in error.fact


def test_model_is_another_name_of_teacher():
    for given in ({"model": TEACHER}, {"teacher": TEACHER, "model": {"name": "teacher", "base_url": [URL]}}):
        assert algo({"type": "opd", **given}).teacher == FrozenModelConfig(**TEACHER)
    assert algo({"type": "opsd", "model": "policy"}).teacher == "policy"


@pytest.mark.parametrize(
    "given",
    [
        {"teacher": TEACHER},
        {"model": TEACHER},
        {"sampling": {"source": TEACHER}},
        {"teacher": TEACHER, "sampling": {"source": {"name": "teacher", "base_url": [URL]}}},
    ],
)
def test_the_teacher_of_sft_plays_the_episodes_however_it_is_named(given: dict[str, Any]):
    config = algo({"type": "sft", **given})
    assert config == algo({"type": "sft", "sampling": {"source": TEACHER}})
    assert config.sampling_source == FrozenModelConfig(**TEACHER)
    assert algo("grpo").sampling_source is None


def test_an_environments_own_algorithm_replaces_the_inherited_one_whole():
    inherited = {"type": "grpo", "normalize": "std", "length_penalty": "turns"}
    envs = [{"id": "a"}, {"id": "b", "algo": {"type": "grpo"}}, {"id": "c", "advantage": {"type": "max_rl"}}]
    config = run(orchestrator={"algo": inherited, "train": {"env": envs}}).orchestrator
    first, second, third = (config.algo_of(env) for env in config.train.env)
    assert first == config.algo and second == GrpoConfig() and third.type == "max_rl"


def test_an_algorithm_may_be_chosen_on_the_command_line(tmp_path: Path):
    config, _ = load_text(
        tmp_path, MINIMAL, "--orchestrator.algo", "max_rl", "--orchestrator.train.env.0.algo", "reward"
    )
    assert (config.orchestrator.algo.type, config.orchestrator.train.env[0].algo.type) == ("max_rl", "reward")
