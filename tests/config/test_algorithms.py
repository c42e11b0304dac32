"""Invalid `[orchestrator.algo]` sections and their errors."""

from typing import Any

import pytest

from headrace.config.base import ConfigError
from headrace.config.orchestrator import OrchestratorConfig
from headrace.runfile.reading import validate
from headrace.runfile.run import RunConfig
from tests.config.run_files import algo, minimal, refusal, refusals

URL = "http://host:8001/v1"
TEACHER = {"name": "teacher", "base_url": URL}


def refused(key: str, value: Any, given: Any, **orchestrator: Any) -> str:
    """Check the key under `orchestrator` and the value that are refused, and return the fix."""
    error = refusal(orchestrator={"algo": given, **orchestrator})
    assert (error.key, error.value) == (f"orchestrator.{key}", value)
    return error.fix or ""


def test_an_unknown_algorithm_names_the_nearest_and_the_known_ones():
    fix = refused("algo.type", "maxrl", "maxrl")
    assert "max_rl?" in fix and "grpo" in fix
    assert "package.module:Class" in refused("algo.type", "my_module.Mine", {"type": "my_module.Mine"})
    for penalty, value in (("liner", "liner"), ({"coef": 1}, None)):
        fix = refused("algo.length_penalty.type", value, {"length_penalty": penalty})
        assert all(known in fix for known in ("linear", "tokens", "turns", "overlong"))


@pytest.mark.parametrize(
    ("given", "wrong", "right"),
    [
        ({"lenght_penalty": "linear"}, "lenght_penalty", "length_penalty"),
        ({"normalise": "std"}, "normalise", "normalize"),
        ({"length_penalty": {"type": "linear", "coeff": 1}}, "length_penalty.coeff", "length_penalty.coef"),
        ({"length_penalty": {"type": "linear", "coefficient": 1}}, "length_penalty.coefficient", "length_penalty.coef"),
        (
            {"length_penalty": {"type": "overlong", "max_token": 1}},
            "length_penalty.max_token",
            "length_penalty.max_tokens",
        ),
        ({"type": "sft", "teachr": TEACHER}, "teachr", "teacher"),
        ({"type": "opd", "teacher": {**TEACHER, "api_key": "k"}}, "teacher.api_key", "teacher.api_key_var"),
        ({"type": "echo", "roles": {"tool": {"alhpa": 1}}}, "roles.tool.alhpa", "roles.tool.alpha"),
        ({"type": "rlcsd", "lambda": 1}, "lambda", "lam"),
        ({"terms": [{"import_path": "a:b", "kwarg": {}}]}, "terms.0.kwarg", "terms.0.kwargs"),
    ],
)
def test_a_mistyped_key_suggests_one_of_the_chosen_type(given: Any, wrong: str, right: str):
    for prefix, changes in (
        ("algo", {"algo": given}),
        ("train.env.0.algo", {"train": {"env": [{"id": "a", "algo": given}]}}),
    ):
        (error, *_) = [error for error in refusals(orchestrator=changes) if "unknown key" in error.fact]
        assert error.key == f"orchestrator.{prefix}.{wrong}"
        assert f"orchestrator.{prefix}.{right}?" in (error.fix or "")


def test_a_mistyped_key_suggests_nothing_that_only_another_type_has():
    assert refused("algo.lenght_penalty", None, {"type": "max_rl", "lenght_penalty": "linear"}) == ""
    assert refused("algo.length_penalty.coeff", None, {"length_penalty": {"type": "turns", "coeff": 1}}) == ""


@pytest.mark.parametrize("kind", ["max_rl", "reward", "opd", "opsd", "sft", "rae", "hierarchical_grpo", "custom"])
def test_a_length_penalty_on_an_algorithm_that_has_none_says_which_have_one(kind: str):
    error = refusal(orchestrator={"algo": {"type": kind, "length_penalty": "linear"}})
    assert error.key == "orchestrator.algo.length_penalty"
    assert all(owner in error.fact for owner in (kind, "grpo", "echo", "rlcsd"))


def test_a_key_of_another_algorithm_says_whose_it_is():
    refused("algo.teacher", TEACHER, {"teacher": TEACHER})
    both = {"lam": 1, "roles": {}}
    refused("algo.lam", 1, both)
    refused("algo.roles", {}, dict(reversed(both.items())))
    assert "rlcsd" in refusal(orchestrator={"algo": both}).fact


@pytest.mark.parametrize("key", ["pace", "lam", "kwarg"])
def test_what_an_own_class_takes_goes_in_kwargs(key: str):
    assert f"kwargs.{key}" in refused(f"algo.{key}", 1, {"type": "a.b:C", key: 1})


@pytest.mark.parametrize(
    ("given", "key", "value", "wanted"),
    [
        ({"type": "echo", "roles": {"tool": False}}, ".roles.tool", False, "table"),
        ({"type": "echo", "roles": 0.1}, ".roles", 0.1, "table"),
        ({"length_penalty": False}, ".length_penalty", False, "table"),
        ({"terms": "a.b:c"}, ".terms", "a.b:c", "list"),
        ({"type": "opsd", "teacher": 3}, ".teacher", 3, "table"),
        (["x"], "", ["x"], "table"),
        (False, "", False, "table"),
    ],
    ids=str,
)
def test_a_value_where_a_table_belongs_is_refused_by_what_is_wanted(given: Any, key: str, value: Any, wanted: str):
    error = refusal(orchestrator={"algo": given})
    assert (error.key, error.value) == (f"orchestrator.algo{key}", value)
    assert wanted in error.fact


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"length_penalty": {"type": "linear", "coef": -0.1}}, "length_penalty.coef"),
        ({"length_penalty": {"type": "linear", "coef": float("nan")}}, "length_penalty.coef"),
        ({"length_penalty": {"type": "linear", "normalize_by": "group_max", "turns_weight": -1}}, "turns_weight"),
        ({"length_penalty": {"type": "tokens", "completion_weight": float("inf")}}, "completion_weight"),
        ({"type": "echo", "roles": {"tool": {"alpha": 0}}}, "roles.tool.alpha"),
        ({"type": "echo", "roles": {"tool": {"alpha": float("inf")}}}, "roles.tool.alpha"),
        ({"type": "echo", "roles": {"tools": {"alpha": 1}}}, "roles.tools"),
        ({"type": "rlcsd", "lam": -1}, "lam"),
        ({"type": "rlcsd", "tau": 0}, "tau"),
        ({"type": "rlcsd", "eta": float("nan")}, "eta"),
        ({"type": "opsd", "max_concurrent": 0}, "max_concurrent"),
        ({"type": "opd", "teacher": {**TEACHER, "timeout": 0}}, "teacher.timeout"),
        ({"type": "custom"}, "import_path"),
    ],
    ids=str,
)
def test_a_number_that_makes_no_sense_is_refused_under_its_key(given: Any, key: str):
    assert (refusal(orchestrator={"algo": given}).key or "").endswith(f".{key}")


def test_a_frozen_model_says_where_it_is_served():
    key, name = "algo.teacher", "Qwen/Qwen3-32B"
    refused(f"{key}.base_url", None, {"type": "opd", "teacher": {"name": name}})
    refused(f"{key}.base_url", [], {"type": "opd", "model": {"name": name, "base_url": []}})
    assert "base_url" in refused(key, name, {"type": "opd", "teacher": name})
    refused(f"{key}.name", None, {"type": "opd", "teacher": {"base_url": URL}})


@pytest.mark.parametrize(
    ("url", "right"),
    [
        ("host:8001/v1", "http://host:8001/v1"),
        ("ftp://host/v1", "http://host/v1"),
        ("http:///v1", "http://"),
        ("http://host:port/v1", "http://"),
        ("", "http://host:port"),
    ],
)
def test_a_base_url_is_a_url(url: str, right: str):
    teacher = {"name": "t", "base_url": [url]}
    assert right in refused("algo.teacher.base_url.0", url, {"type": "opd", "teacher": teacher})
    assert right in refused("client.base_url.0", url, "grpo", client={"base_url": [url]})


def test_a_key_is_never_written_where_the_name_of_its_variable_belongs():
    error = refusal(orchestrator={"algo": {"type": "opd", "teacher": {**TEACHER, "api_key_var": "sk-secret"}}})
    assert error.key == "orchestrator.algo.teacher.api_key_var" and "secret" not in str(error)


def test_sft_needs_a_teacher_that_is_not_the_policy():
    for given in ({}, {"teacher": "policy"}, {"sampling": {"source": "policy"}}):
        refused("algo.teacher", None, {"type": "sft", **given})


def test_opd_needs_a_teacher_that_is_not_the_policy():
    refused("algo.teacher", None, "opd")
    refused("algo.teacher", "policy", {"type": "opd", "teacher": "policy"})


@pytest.mark.parametrize(
    "kind", ["grpo", "max_rl", "reward", "echo", "opd", "opsd", "rlcsd", "rae", "hierarchical_grpo", "custom"]
)
def test_what_needs_the_policys_logprobs_does_not_sample_from_a_frozen_model(kind: str):
    more: Any = {"opd": {"teacher": TEACHER}, "custom": {"import_path": "a:b"}}.get(kind, {})
    given = {"type": kind, "sampling": {"source": TEACHER}, **more}
    refused("algo.sampling.source", "teacher", given)


def test_what_an_imported_algorithm_samples_from_is_its_own_affair():
    assert algo({"type": "a.b:C", "sampling": {"source": TEACHER}}).sampling_source is not None


def test_echo_needs_a_role():
    refused("algo.roles", {}, {"type": "echo", "roles": {}})
    assert algo("echo").roles["tool"].alpha == 0.1


def test_a_role_of_echo_without_alpha_has_the_default():
    roles = algo({"type": "echo", "roles": {"tool": {}, "user": {"alpha": 0.5}}}).roles
    assert {role: entry.alpha for role, entry in roles.items()} == {"tool": 0.1, "user": 0.5}


@pytest.mark.parametrize(("kind", "place"), [("opsd", "{demonstration}"), ("rlcsd", "{response}")])
def test_a_template_has_the_place_for_its_text_and_no_other(kind: str, place: str):
    refused("algo.template", "Read this.", {"type": kind, "template": "Read this."})
    unknown = f"{{question}} {place}"
    assert place in refused("algo.template", unknown, {"type": kind, "template": unknown})
    latex = rf"{place}, then end with \boxed{{answer}}, \frac{{a}}{{b}}, x^{{n}} or {{}}."
    assert algo({"type": kind, "template": latex}).template == latex


def test_linear_has_one_set_of_weights():
    both = {"type": "linear", "normalize_by": "group_max", "coef": 0.25}
    refused("algo.length_penalty.coef", 0.25, {"length_penalty": both})
    idle = {"type": "linear", "turns_weight": 0.1}
    refused("algo.length_penalty.turns_weight", 0.1, {"length_penalty": idle})


def test_overlong_grows_over_the_last_of_its_tokens():
    given = {"type": "overlong", "max_tokens": 10, "cache_tokens": 11}
    assert "10" in refused("algo.length_penalty.cache_tokens", 11, {"length_penalty": given})
    algo({"length_penalty": {**given, "cache_tokens": 10}})


@pytest.mark.parametrize("penalty", ["tokens", "turns"])
def test_efficiency_has_its_own_baseline(penalty: str):
    given = {"length_weighted_baseline": True, "length_penalty": penalty}
    refused("algo.length_weighted_baseline", True, given)
    algo({**given, "length_penalty": "linear"})


def test_a_penalty_in_units_of_seq_len_needs_it():
    tree: Any = {"algo": {"length_penalty": "linear"}, "train": {"env": [{"id": "a"}]}}
    with pytest.raises(ConfigError) as error:
        validate(OrchestratorConfig, tree, "run.toml")
    assert error.value.key == "algo.length_penalty" and "seq_len" in (error.value.fix or "")
    tree["algo"]["length_penalty"] = {"type": "linear", "normalize_by": "group_max"}
    validate(OrchestratorConfig, tree, "run.toml")


@pytest.mark.parametrize("absent", ["none", None, {"name": "none"}])
@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        *((kind, "algo", kind) for kind in ("echo", "opsd", "rlcsd")),
        ("grpo", "renderer.name", "none"),
    ],
)
def test_a_run_needs_a_renderer(absent: Any, kind: str, key: str, value: str):
    refused(key, value, kind, renderer=absent)


def test_echo_needs_a_renderer_that_knows_who_wrote_what():
    envs = [{"id": "a"}, {"id": "b", "algo": "echo"}]
    refused("renderer.name", "default", "grpo", renderer={"name": "default"}, train={"env": envs})
    algo("echo", renderer="qwen3")


def test_a_pool_that_nothing_uses_is_refused():
    pool = {"renderer": {"pool_size": 2}}
    with pytest.raises(ConfigError) as error:
        validate(OrchestratorConfig, {**pool}, "run.toml")
    assert (error.value.key, error.value.value) == ("renderer.pool_size", 2)
    for slot in ("train", "eval"):
        validate(OrchestratorConfig, {"renderer": {"pool_size": 2}, slot: {"env": [{"id": "a"}]}}, "run.toml")
    assert refusal(inference={"renderer": {"pool_size": 2}}).key == "inference.renderer.pool_size"


@pytest.mark.parametrize(
    ("kind", "warned"),
    [
        *(("grpo", True), ("max_rl", True), ("echo", True), ("rlcsd", True), ("hierarchical_grpo", True)),
        *(("reward", False), ("opsd", False), ("rae", False)),
    ],
)
def test_a_group_of_one_gets_a_notice_where_credit_is_relative(kind: str, warned: bool):
    tree = minimal(
        orchestrator={"group_size": 1, "train": {"env": [{"id": "a", "algo": kind}, {"id": "b", "group_size": 8}]}}
    )
    _, notices = validate(RunConfig, tree, "run.toml")
    if warned:
        (notice,) = notices
        assert notice.startswith(f"orchestrator.train.env 'a' has group_size = 1, and {kind} compares the rollouts")
        assert "raise group_size" in notice
    else:
        assert notices == []


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_a_baseline_that_grows_or_never_moves_is_refused(decay: float):
    error = refusal(orchestrator={"algo": {"type": "rae", "decay": decay}})
    assert (error.key, error.value) == ("orchestrator.algo.decay", decay)
