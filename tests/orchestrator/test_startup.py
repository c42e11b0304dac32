"""The line of each environment names what was resolved for it."""

from __future__ import annotations

from typing import Any

from headrace.config.orchestrator import OrchestratorConfig
from headrace.orchestrator.signals import Kind
from headrace.orchestrator.wiring import startup_lines
from headrace.runfile.reading import validate

TEACHER = {"name": "big", "base_url": "http://host:8000/v1"}


def lines(tasks: dict[tuple[Kind, str], int], **sections: Any) -> list[str]:
    config, _ = validate(OrchestratorConfig, {"seq_len": 64, **sections}, "test")
    return startup_lines(config, tasks)


def test_a_training_environment_says_algorithm_sampler_share_filters_and_teacher():
    envs = [
        {"id": "a", "ratio": 3, "curriculum": {"sampler": "in_order"}},
        {"id": "b", "ratio": 1, "group_size": 4, "algo": {"type": "opd", "teacher": TEACHER}},
    ]
    first, second = lines({(Kind.TRAIN, "a"): 1000, (Kind.TRAIN, "b"): 5}, train={"env": envs})
    for part in ("on a:", "1,000 tasks", "75% of the draws", "groups of 8", "grpo", "in_order", "zero_advantage"):
        assert part in first, part
    assert "gibberish" not in first, "a filter that only counts drops nothing"
    assert "teacher" not in first
    for part in ("25% of the draws", "groups of 4", "opd", "shuffled", "teacher big at http://host:8000/v1"):
        assert part in second, part


def test_without_a_ratio_the_share_is_that_of_the_tasks():
    first, second = lines({(Kind.TRAIN, "a"): 30, (Kind.TRAIN, "b"): 10}, train={"env": [{"id": "a"}, {"id": "b"}]})
    assert "75% of the draws" in first and "25% of the draws" in second


def test_an_evaluation_environment_says_how_much_and_how_often():
    section = {"interval": 20, "num_examples": 50, "env": [{"id": "a", "group_size": 4}]}
    (line,) = lines({(Kind.EVAL, "a"): 200}, eval=section)
    for part in ("evaluation on a:", "50 tasks", "4 episodes", "every 20 steps"):
        assert part in line, part
