"""Keys of the run that fill the sections of its processes."""

from pathlib import Path
from typing import Any

import pytest

from headrace.config.base import ConfigError
from tests.config.run_files import run


def test_shared_keys_fill_every_process():
    config = run(seed=7, model={"name": "models/a", "dtype": "float32"})
    assert {section.output_dir for section in (config.trainer, config.orchestrator, config.inference)} == {
        Path("outputs/test")
    }
    assert {section.seed for section in (config.trainer, config.orchestrator, config.inference)} == {7}
    assert config.trainer.model == config.orchestrator.model == config.inference.model == config.model
    assert (config.trainer.max_steps, config.orchestrator.max_steps) == (10, 10)
    assert (config.trainer.seq_len, config.orchestrator.seq_len, config.inference.max_model_len) == (64, 64, 64)


def test_the_orchestrators_renderer_is_also_the_servers():
    config = run(orchestrator={"renderer": {"name": "qwen3", "thinking_retention": "all"}})
    assert config.inference.renderer == config.orchestrator.renderer


@pytest.mark.parametrize(
    "changes",
    [
        {"trainer": {"max_steps": 10}},
        {"orchestrator": {"output_dir": "outputs/test"}},
        {"inference": {"model": {"name": "models/tiny"}}},
    ],
)
def test_an_equal_value_in_a_section_is_accepted(changes: dict[str, Any]):
    assert run(**changes) == run()


@pytest.mark.parametrize(
    ("changes", "key", "shared"),
    [
        ({"trainer": {"max_steps": 11}}, "trainer.max_steps is 11", "max_steps is 10"),
        ({"inference": {"model": {"name": "other"}}}, "inference.model.name is 'other'", "model.name is 'models/tiny'"),
        ({"orchestrator": {"seq_len": 65}}, "orchestrator.seq_len is 65", "seq_len is 64"),
    ],
)
def test_a_different_value_in_a_section_is_refused_with_both(changes: dict[str, Any], key: str, shared: str):
    with pytest.raises(ConfigError) as refusal:
        run(**changes)
    assert key in str(refusal.value)
    assert shared in str(refusal.value)
