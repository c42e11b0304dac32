"""A teacher or a reference that is the run's own past, on a further server of the run."""

from typing import Any

import pytest

from headrace.config.base import ConfigError
from headrace.config.trainer import PastWeightsConfig
from headrace.launch.processes import needs_of
from headrace.runfile.reading import validate
from headrace.runfile.run import RunConfig
from tests.refusals import refused

PAST = {"type": "opsd", "teacher": {"every": 4}}
CHARGED = {"type": "grpo", "kl": {"coef": 0.1, "place": "reward"}}


def run_of(*algorithms: dict[str, Any], **orchestrator: Any) -> RunConfig:
    envs = [{"id": "reverse-text", "name": f"env{number}", "algo": algo} for number, algo in enumerate(algorithms)]
    tree = {"output_dir": "out", "max_steps": 1, "seq_len": 64, "model": {"init": "tiny"}}
    return validate(RunConfig, {**tree, "orchestrator": {"train": {"env": envs}, **orchestrator}}, "test")[0]


@pytest.mark.parametrize(
    ("algo", "kept"),
    [
        ({"type": "opsd"}, None),
        (PAST, PastWeightsConfig(every=4, max_async_level=2)),
        ({"type": "rlcsd", "model": {"every": 4}}, PastWeightsConfig(every=4, max_async_level=2)),
        (CHARGED, None),
    ],
)
def test_the_trainer_keeps_what_a_teacher_needs_and_a_server_is_added(
    algo: dict[str, Any], kept: PastWeightsConfig | None
):
    run = run_of(algo, {"type": "grpo"}, max_async_level=2)
    assert run.trainer.past_weights == kept
    assert needs_of(run).least_servers == (1 if algo == {"type": "opsd"} else 2)
    assert validate(RunConfig, run.model_dump(mode="json", exclude_none=True), "again")[0] == run


def test_hints_fit_into_the_server_of_the_past():
    assert run_of(PAST).inference.max_model_len == run_of({"type": "opsd"}).inference.max_model_len


def test_versions_are_kept_while_a_batch_after_a_checkpoint_may_need_them():
    kept = PastWeightsConfig(every=4, max_async_level=2)
    assert {step: list(kept.needed_after(step)) for step in (0, 3, 4, 5, 6, 9, 10)} == {
        0: [0],
        3: [0],
        4: [0, 4],
        5: [0, 4],
        6: [4],
        9: [4, 8],
        10: [8],
    }


@pytest.mark.parametrize(
    ("algorithms", "key"),
    [
        ([PAST, {"type": "opsd", "teacher": {"every": 5}}], "orchestrator.train.env.1"),
        ([PAST, CHARGED], "orchestrator.train.env.1"),
        ([{"type": "rlcsd", "teacher": {"every": 4}, "kl": CHARGED["kl"]}], "orchestrator.train.env.0"),
        ([{"type": "opd", "teacher": {"every": 4}}], "orchestrator.train.env.0.algo.teacher.base_url"),
    ],
)
def test_what_cannot_work_is_refused_by_its_key(algorithms: list[dict[str, Any]], key: str):
    with refused(ConfigError, key=key):
        run_of(*algorithms)


def test_servers_that_the_run_does_not_start_cannot_have_its_past():
    with refused(ConfigError, key="orchestrator.client.base_url"):
        run_of(PAST, client={"base_url": ["http://elsewhere.invalid"]})
