"""A dumped configuration reloads as itself."""

import copy
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from headrace.algorithms.grpo import GrpoConfig
from headrace.config.base import ConfigError, sections_in
from headrace.config.files import dump
from headrace.config.orchestrator import OrchestratorConfig
from headrace.config.sft import SftConfig
from headrace.runfile.reading import load, validate
from headrace.runfile.run import RunConfig
from tests.config.run_files import MINIMAL, load_text, minimal, run

FIXED = settings(deadline=None, max_examples=40, derandomize=True)
EXAMPLES = Path(__file__).parents[2] / "examples"


def reload(config: RunConfig, directory: Path) -> RunConfig:
    path = directory / "dumped.toml"
    path.write_text(dump(config))
    again, notices = load(type(config), [path])
    assert notices == []
    return again


def assert_round_trip(config: RunConfig, directory: Path) -> None:
    again = reload(config, directory)
    assert again == config
    assert dump(again) == dump(config)


def test_the_minimal_run_comes_back(tmp_path: Path):
    assert_round_trip(run(), tmp_path)


@pytest.mark.parametrize(
    "overrides",
    [
        ["--trainer.optim.lr", "3e-5", "--seed", "5"],
        ["--orchestrator.token_batch_size", "4096"],
        ["--orchestrator.train.env.0.args", '{ split = "eval", nested = { list = [1, 2.5, "x"] } }'],
        ["--orchestrator.train.env.0.args", "{ longest = inf, nested = [-inf] }"],
        ["--orchestrator.filters", '[{ type = "repetition", window = 7 }]'],
        ["--trainer.loss", '{ type = "ipo", ipo_threshold = 0.3 }'],
        ["--wandb.mode", "offline", "--tensorboard.enabled", "true"],
        ["--trainer.optim.betas", "[0.8, 0.95]", "--orchestrator.max_inflight_rollouts", "64"],
        ["--output_dir", "outputs/ünïcode run"],
    ],
)
def test_a_run_with_overrides_comes_back(tmp_path: Path, overrides: list[str]):
    config, _ = load_text(tmp_path, MINIMAL, *overrides)
    assert_round_trip(config, tmp_path)


def example_runs() -> Iterator[tuple[type[RunConfig] | type[SftConfig], list[Path], list[str]]]:
    """Each example: alone, or as the command in its comment runs it, over another file and with overrides."""
    for file in sorted(EXAMPLES.glob("*/*.toml")):
        text = file.read_text()
        commands = re.findall(r"^# +headrace (rl|sft) (.+)$", text, re.MULTILINE)
        for command, words in commands or [("sft" if "[data]" in text else "rl", str(file))]:
            files, *overrides = words.split(" --")
            arguments = [part for override in overrides for part in (f"--{override}").split(" ", 1)]
            yield SftConfig if command == "sft" else RunConfig, [EXAMPLES.parent / f for f in files.split()], arguments


def test_every_example_comes_back(tmp_path: Path):
    runs = list(example_runs())
    assert len(runs) >= 8
    for kind, files, overrides in runs:
        config, notices = load(kind, files, overrides)
        assert notices == []
        assert_round_trip(config, tmp_path)


TEACHER = {"name": "t", "base_url": "http://t:1/v1", "headers": {"X-Team": "a"}, "api_key_var": "KEY", "timeout": 5}
ALGORITHMS: list[Any] = [
    "grpo",
    {"normalize": "std", "length_weighted_baseline": True, "terms": ["a.b:c"]},
    {"length_penalty": "linear"},
    {"length_penalty": {"type": "linear", "coef": 0.5, "gate_by_correctness": True}},
    {"length_penalty": {"type": "linear", "normalize_by": "group_max", "turns_weight": 0.0}},
    {"length_penalty": {"type": "tokens", "tool_response_weight": 0.5}},
    {"length_penalty": "turns"},
    {"length_penalty": {"type": "overlong", "max_tokens": 60, "cache_tokens": 10}},
    "max_rl",
    "reward",
    "echo",
    {
        "type": "echo",
        "roles": {"user": 0.01, "tool": {"alpha": 1}},
        "filter": {"import_path": "a:b", "kwargs": {"c": 1}},
    },
    {"type": "opd", "model": TEACHER},
    {"type": "grpo_distill", "model": TEACHER, "ref_kl_weight": 0.5},
    "opsd",
    {
        "type": "opsd",
        "teacher": {**TEACHER, "base_url": ["http://a/v1", "http://b/v1"]},
        "template": "<{demonstration}>",
    },
    {"type": "sft", "teacher": TEACHER},
    {"type": "sft", "sampling": {"source": TEACHER}},
    "rlcsd",
    {"type": "rlcsd", "length_penalty": "linear", "terms": ["a.b:c"]},
    {"type": "rlcsd", "advantage": {"lam": 0.1, "hint_filter": "a:b"}, "normalization": "rollout_mean"},
    {"type": "rae", "decay": 0.9},
    {"type": "hierarchical_grpo", "episode_agents": ["solver"]},
    {"type": "custom", "import_path": "a.b:c", "kwargs": {"k": [1, {"x": 2.5}]}},
    {"type": "a.b:C", "kwargs": {"k": 1}, "sampling": {"source": TEACHER}},
]


@pytest.mark.parametrize("algo", ALGORITHMS, ids=str)
def test_every_algorithm_comes_back(tmp_path: Path, algo: Any):
    envs = [{"id": "a", "algo": copy.deepcopy(algo)}, {"id": "b"}]
    assert_round_trip(run(orchestrator={"algo": copy.deepcopy(algo), "train": {"env": envs}}), tmp_path)


def test_every_type_of_algorithm_and_penalty_is_among_those_that_come_back():
    configs = [run(orchestrator={"algo": copy.deepcopy(algo)}).orchestrator.algo for algo in ALGORITHMS]
    known = sections_in(OrchestratorConfig.model_fields["algo"].annotation)
    assert {type(config) for config in configs} == set(known)
    penalties = {type(getattr(config, "length_penalty", None)) for config in configs} - {type(None)}
    assert penalties == set(sections_in(GrpoConfig.model_fields["length_penalty"].annotation))


positive = st.floats(1e-12, 1e12, allow_subnormal=False)


@FIXED
@given(
    lr=positive,
    weight_decay=st.floats(0, 1e6),
    betas=st.tuples(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True)),
    temperature=positive,
    seed=st.integers(-(2**62), 2**62),
    steps=st.integers(1, 10**9),
    ratio=positive,
    name=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20),
)
def test_every_number_comes_back_exactly(
    tmp_path_factory, lr, weight_decay, betas, temperature, seed, steps, ratio, name
):
    config = run(
        seed=seed,
        max_steps=steps,
        model={"name": name},
        trainer={"optim": {"lr": lr, "weight_decay": weight_decay, "betas": list(betas)}},
        orchestrator={"train": {"sampling": {"temperature": temperature}, "env": [{"id": "a", "ratio": ratio}]}},
    )
    again = reload(config, tmp_path_factory.getbasetemp())
    assert again == config
    assert again.trainer.optim.lr == lr
    assert dump(again) == dump(config)


@pytest.mark.parametrize(
    "changes",
    [
        {"trainer": {"seed": 5}},
        {"trainer": {"model": {"dtype": "float32"}}},
        {"inference": {"renderer": {"name": "default"}}},
    ],
)
def test_a_section_that_differs_from_an_unset_shared_key_is_refused_at_once_or_comes_back(
    tmp_path: Path, changes: dict[str, Any]
):
    try:
        config, _ = validate(RunConfig, minimal(**changes), "run.toml")
    except ConfigError:
        return
    assert_round_trip(config, tmp_path)


def sections(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield kind
    for name in kind.model_fields:
        for child in sections_in(kind.model_fields[name].annotation):
            yield from sections(child)


@pytest.mark.parametrize("kind", [RunConfig, SftConfig])
def test_no_key_loses_its_value_by_being_unset(kind: type[BaseModel]):
    # TOML has no null: where the default is a value, unset cannot be written, and a dump brings the default back
    lost = {
        f"{section.__name__}.{name}"
        for section in sections(kind)
        for name, field in section.model_fields.items()
        if not field.is_required()
        and field.get_default(call_default_factory=True) is not None
        and typing.get_origin(field.annotation) in (typing.Union, types.UnionType)
        and type(None) in typing.get_args(field.annotation)
    }
    assert lost == set()
