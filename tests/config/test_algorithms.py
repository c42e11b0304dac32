"""What `[orchestrator.algo]` may not say, and how that is told."""

from typing import Any

import pytest

from headrace.config.algorithms import sampling_source
from headrace.config.base import ConfigError, validate
from headrace.config.orchestrator import OrchestratorConfig
from headrace.config.run import RunConfig
from tests.config.run_files import algo, minimal, refusal, run

URL = "http://host:8001/v1"
TEACHER = {"name": "teacher", "base_url": URL}


def problem(given: Any, **orchestrator: Any) -> str:
    """The only line of the refusal, without the name of the file."""
    with pytest.raises(ConfigError) as refusal:
        algo(given, **orchestrator)
    (line,) = str(refusal.value).splitlines()
    return line.removeprefix("run.toml: ")


def refused(key: str, message: str, given: Any, **orchestrator: Any) -> None:
    """It is refused under this key, in these words."""
    line = problem(given, **orchestrator)
    assert line.startswith(f"{key}: ") and message in line, line


def test_an_unknown_algorithm_names_the_nearest_and_the_known_ones():
    refused("orchestrator.algo", "no such algorithm as 'maxrl'. Did you mean max_rl? Known: grpo, max_rl, ", "maxrl")
    assert "package.module:Class" in problem({"type": "my_module.MyAlgorithm"})
    refused("orchestrator.algo.length_penalty", "linear, tokens, turns, overlong", {"length_penalty": "liner"})
    refused("orchestrator.algo.length_penalty", "linear, tokens, turns, overlong", {"length_penalty": {"coef": 1}})


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
        with pytest.raises(ConfigError) as refusal:
            run(orchestrator=changes)
        suggestion = f"orchestrator.{prefix}.{wrong}: unknown key. Did you mean orchestrator.{prefix}.{right}?"
        assert suggestion in str(refusal.value)


def test_a_mistyped_key_suggests_nothing_that_only_another_type_has():
    assert problem({"type": "max_rl", "lenght_penalty": "linear"}) == "orchestrator.algo.lenght_penalty: unknown key."
    line = problem({"length_penalty": {"type": "turns", "coeff": 1}})
    assert line == "orchestrator.algo.length_penalty.coeff: unknown key."


@pytest.mark.parametrize("kind", ["max_rl", "reward", "opd", "opsd", "sft", "rae", "hierarchical_grpo", "custom"])
def test_a_length_penalty_on_an_algorithm_that_has_none_says_which_have_one(kind: str):
    given = {"type": kind, "length_penalty": "linear"}
    refused("orchestrator.algo", f"{kind} has no length_penalty: it is a key of grpo and echo and rlcsd alone", given)


def test_a_key_of_another_algorithm_says_whose_it_is():
    refused("orchestrator.algo", "grpo has no teacher: it is a key of opd and opsd and sft", {"teacher": TEACHER})
    both = {"lam": 1, "roles": {}}
    refused("orchestrator.algo", "grpo has no lam: it is a key of rlcsd alone", both)
    refused("orchestrator.algo", "grpo has no roles: it is a key of echo alone", dict(reversed(both.items())))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("pace", "a.b:C has no pace; what your own class takes goes in algo.kwargs.pace."),
        (
            "lam",
            "a.b:C has no lam: it is a key of rlcsd alone; what your own class takes goes in algo.kwargs.lam.",
        ),
        (
            "kwarg",
            "a.b:C has no kwarg; what your own class takes goes in algo.kwargs.kwarg. Did you mean algo.kwargs?",
        ),
    ],
)
def test_what_an_own_class_takes_goes_in_kwargs(key: str, message: str):
    assert problem({"type": "a.b:C", key: 1}) == f"orchestrator.algo: {message}"


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
    key = "orchestrator.algo.teacher"
    needed = 'Qwen/Qwen3-32B needs a base_url: say where it is served, as base_url = "http://host:port/v1"'
    refused(key, needed, {"type": "opd", "teacher": {"name": "Qwen/Qwen3-32B"}})
    refused(key, needed, {"type": "opd", "model": {"name": "Qwen/Qwen3-32B", "base_url": []}})
    refused(key, "'Qwen/Qwen3-32B' is no model reference", {"type": "opd", "teacher": "Qwen/Qwen3-32B"})
    refused(f"{key}.name", "required, and not set", {"type": "opd", "teacher": {"base_url": URL}})


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("host:8001/v1", "'host:8001/v1' is not a URL: write http://host:8001/v1"),
        ("ftp://host/v1", "write http://host/v1"),
        ("http:///v1", "is not a URL"),
        ("http://host:port/v1", "is not a URL: Port could not be cast"),
        ("", "write http://host:port"),
    ],
)
def test_a_base_url_is_a_url(url: str, message: str):
    refused(
        "orchestrator.algo.teacher.base_url.0", message, {"type": "opd", "teacher": {"name": "t", "base_url": [url]}}
    )
    refused("orchestrator.client.base_url.0", message, "grpo", client={"base_url": [url]})


def test_a_key_is_never_written_where_the_name_of_its_variable_belongs():
    line = problem({"type": "opd", "teacher": {**TEACHER, "api_key_var": "sk-secret"}})
    assert "name of an environment variable" in line and "secret" not in line


def test_sft_needs_a_teacher_that_is_not_the_policy():
    for given in ({}, {"teacher": "policy"}, {"sampling": {"source": "policy"}}):
        refused("orchestrator.algo", "set teacher.name, and teacher.base_url", {"type": "sft", **given})


def test_opd_needs_a_teacher_that_is_not_the_policy():
    refused("orchestrator.algo", "opd needs a teacher: set teacher.name", "opd")
    refused("orchestrator.algo", "the KL would be zero", {"type": "opd", "teacher": "policy"})


@pytest.mark.parametrize(
    "kind", ["grpo", "max_rl", "reward", "echo", "opd", "opsd", "rlcsd", "rae", "hierarchical_grpo", "custom"]
)
def test_what_needs_the_policys_logprobs_does_not_sample_from_a_frozen_model(kind: str):
    more: Any = {"opd": {"teacher": TEACHER}, "custom": {"import_path": "a:b"}}.get(kind, {})
    given = {"type": kind, "sampling": {"source": TEACHER}, **more}
    refused("orchestrator.algo", f"sampling.source is teacher, but {kind} trains on what the policy itself", given)


def test_what_an_imported_algorithm_samples_from_is_its_own_affair():
    assert sampling_source(algo({"type": "a.b:C", "sampling": {"source": TEACHER}})) is not None


def test_echo_needs_a_role():
    refused("orchestrator.algo.roles", "set alpha of one, as tool.alpha = 0.1", {"type": "echo", "roles": {}})
    assert algo("echo").roles["tool"].alpha == 0.1


@pytest.mark.parametrize(("kind", "place"), [("opsd", "{demonstration}"), ("rlcsd", "{response}")])
def test_a_template_has_the_place_for_its_text_and_no_other(kind: str, place: str):
    key = "orchestrator.algo.template"
    refused(key, f"has no {place} in it", {"type": kind, "template": "Read this."})
    unknown = {"type": kind, "template": f"{{question}} {place}"}
    refused(key, f"has {{question}} in it, which nothing replaces: only {place} is known", unknown)
    latex = rf"{place}, then end with \boxed{{answer}}, \frac{{a}}{{b}}, x^{{n}} or {{}}."
    assert algo({"type": kind, "template": latex}).template == latex


def test_linear_has_one_set_of_weights():
    key = "orchestrator.algo.length_penalty"
    both = {"type": "linear", "normalize_by": "group_max", "coef": 0.25}
    refused(key, "set output_weight, input_weight and turns_weight", {"length_penalty": both})
    idle = {"type": "linear", "turns_weight": 0.1}
    refused(key, 'turns_weight: of normalize_by = "group_max"; set that, or set coef', {"length_penalty": idle})


def test_overlong_grows_over_the_last_of_its_tokens():
    given = {"type": "overlong", "max_tokens": 10, "cache_tokens": 11}
    refused("orchestrator.algo.length_penalty", "cache_tokens 11 is above max_tokens 10", {"length_penalty": given})
    algo({"length_penalty": {**given, "cache_tokens": 10}})


@pytest.mark.parametrize("penalty", ["tokens", "turns"])
def test_efficiency_has_its_own_baseline(penalty: str):
    given = {"length_weighted_baseline": True, "length_penalty": penalty}
    refused("orchestrator.algo", f'length_penalty.type = "{penalty}" has a baseline of its own', given)
    algo({**given, "length_penalty": "linear"})


def test_a_penalty_in_units_of_seq_len_needs_it():
    tree: Any = {"algo": {"length_penalty": "linear"}, "train": {"env": [{"id": "a"}]}}
    with pytest.raises(ConfigError, match=r"algo\.length_penalty counts tokens in units of seq_len, which is not set"):
        validate(OrchestratorConfig, tree, "run.toml")
    tree["algo"]["length_penalty"] = {"type": "linear", "normalize_by": "group_max"}
    validate(OrchestratorConfig, tree, "run.toml")


@pytest.mark.parametrize("absent", ["none", None, {"name": "none"}])
@pytest.mark.parametrize(
    ("kind", "need"),
    [
        ("echo", "algo is echo, which must know who wrote each token, and there is no renderer: set renderer.name"),
        ("opsd", "algo is opsd, which puts a demonstration before each sample, and there is no renderer"),
        ("rlcsd", "algo is rlcsd, which puts hints before each sample, and there is no renderer"),
        ("grpo", "renderer.name: environments speak in messages"),
    ],
)
def test_a_run_needs_a_renderer(absent: Any, kind: str, need: str):
    refused("orchestrator", need, kind, renderer=absent)


def test_echo_needs_a_renderer_that_knows_who_wrote_what():
    envs = [{"id": "a"}, {"id": "b", "algo": "echo"}]
    refused("orchestrator", "train.env.1.algo is echo", "grpo", renderer={"name": "default"}, train={"env": envs})
    algo("echo", renderer="qwen3")


def test_a_pool_that_nothing_uses_is_refused():
    pool = {"renderer": {"pool_size": 2}}
    with pytest.raises(ConfigError, match=r"renderer\.pool_size is 2, but there is no environment"):
        validate(OrchestratorConfig, {**pool}, "run.toml")
    for slot in ("train", "eval"):
        validate(OrchestratorConfig, {"renderer": {"pool_size": 2}, slot: {"env": [{"id": "a"}]}}, "run.toml")
    with pytest.raises(ConfigError, match=r"inference\.renderer\.pool_size: unknown key"):
        run(inference={"renderer": {"pool_size": 2}})


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
