"""The penalty for the distance to a reference policy in a run file: what the trainer keeps, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from headrace.config.base import ConfigError
from headrace.config.trainer import ReferenceConfig
from headrace.runfile.reading import validate
from headrace.runfile.run import RunConfig
from tests.refusals import refused

FROZEN = {"name": "frozen", "base_url": ["http://frozen.invalid/v1"]}
ALGORITHMS = ("grpo", "max_rl", "reward", "rlcsd", "rae", "hierarchical_grpo", "echo")


def run_of(*kls: dict[str, Any] | None, kind: str = "grpo") -> RunConfig:
    """A run with an environment for each `kl`."""
    envs = [
        {"id": "reverse-text", "name": f"env{n}", "algo": {"type": kind} | ({} if kl is None else {"kl": kl})}
        for n, kl in enumerate(kls)
    ]
    tree = {"output_dir": "out", "max_steps": 1, "seq_len": 64, "model": {"init": "tiny"}}
    return validate(RunConfig, {**tree, "orchestrator": {"train": {"env": envs}}}, "test")[0]


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_algorithms_with_advantages_have_it(kind: str):
    assert run_of({"coef": 0.1}, kind=kind).trainer.reference == ReferenceConfig()


@pytest.mark.parametrize(
    ("kl", "reference"),
    [
        (None, None),
        ({"coef": 0}, None),
        ({"coef": 0.1, "reference": FROZEN}, None),
        ({"coef": 0.1, "reference": FROZEN, "place": "reward", "estimator": "k1"}, None),
        ({"coef": 0.1, "place": "reward"}, None),
        ({"coef": 0.1, "reference": "start"}, ReferenceConfig()),
        ({"coef": 0.1, "reference": {"every": 20}}, ReferenceConfig(every=20)),
    ],
)
def test_the_trainer_keeps_the_runs_own_past_where_it_is_the_reference(
    kl: dict[str, Any] | None, reference: ReferenceConfig | None
):
    assert run_of(kl, None).trainer.reference == reference


def test_a_resolved_run_reads_back_as_the_same():
    run = run_of({"coef": 0.1, "reference": {"every": 20}}, {"coef": 0.1, "reference": FROZEN})
    assert validate(RunConfig, run.model_dump(mode="json", exclude_none=True), "again")[0] == run


@pytest.mark.parametrize(
    ("kl", "key"),
    [
        ({"coef": 0.1, "estimator": "k1"}, "estimator"),
        ({"coef": 0.1, "place": "reward", "reference": FROZEN, "ratio": True}, "ratio"),
        ({"coef": 0.1, "place": "reward", "reference": {"every": 3}}, "reference"),
        ({"coef": 0.1, "reference": "Qwen/Qwen3-8B"}, "reference"),
        ({"coef": 0.1, "reference": {"name": "frozen"}}, "reference.base_url"),
        ({"coef": 0.1, "reference": {"every": 0}}, "reference.every"),
        ({"coef": -0.1}, "coef"),
        ({}, "coef"),
    ],
)
def test_what_cannot_work_is_refused_by_its_key(kl: dict[str, Any], key: str):
    with refused(ConfigError, key=f"orchestrator.train.env.0.algo.kl.{key}"):
        run_of(kl)


@pytest.mark.parametrize("kind", ["opsd", "sft"])
def test_algorithms_without_advantages_do_not_have_it(kind: str):
    with refused(ConfigError, key="orchestrator.train.env.0.algo.kl"):
        run_of({"coef": 0.1}, kind=kind)


def test_the_trainer_multiplies_by_the_ratio_that_all_penalties_ask_for():
    assert run_of({"coef": 0.1, "ratio": True}, None, {"coef": 0.0}).trainer.kl_ratio
    with refused(ConfigError, key="orchestrator.train.env", value="env1"):
        run_of({"coef": 0.1, "ratio": True}, {"coef": 0.1})


def test_two_references_of_the_trainer_are_refused():
    with refused(ConfigError, key="orchestrator.train.env", value="env1"):
        run_of({"coef": 0.1}, {"coef": 0.1, "reference": {"every": 3}})


def test_a_class_that_trains_with_another_loss_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    code = "from headrace.algorithms.base import Algorithm\nclass Mine(Algorithm):\n    action_loss_type = 'ce'\n"
    (tmp_path / "kl_of_ce.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    algo = run_of({"coef": 0.1}, kind="kl_of_ce:Mine").orchestrator.train.env[0].algo
    with refused(key="kl"):
        algo.check_imports()
