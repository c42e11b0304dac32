"""What docs/how-to/curriculum.md shows is what runs."""

import random
import re
import sys
import tomllib
from pathlib import Path

import pytest

from headrace.config.environments import CurriculumConfig
from headrace.config.orchestrator import OrchestratorConfig
from headrace.rollout.types import Task
from headrace.runfile.reading import load, validate
from headrace.runfile.run import RunConfig

REPOSITORY = Path(__file__).parents[2]
DOCS = (REPOSITORY / "docs" / "how-to/curriculum.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", DOCS, re.DOTALL | re.MULTILINE)
(CODE,) = [text for language, text in BLOCKS if language == "python"]
POOLS, GATE, OWN = [text for language, text in BLOCKS if language == "toml"]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CurriculumConfig:
    (tmp_path / "tasks.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tasks", raising=False)
    table = tomllib.loads("[[orchestrator.train.env]]\n" + OWN)["orchestrator"]["train"]["env"][0]["curriculum"]
    return CurriculumConfig.model_validate(table)


def test_the_keys_that_the_page_shows_are_the_defaults():
    config, _ = validate(OrchestratorConfig, tomllib.loads(POOLS)["orchestrator"], "docs")
    shown = config.train.env[0].curriculum
    assert shown == CurriculumConfig.model_validate({"sampler": "difficulty_pool"})
    config, _ = validate(OrchestratorConfig, tomllib.loads(GATE)["orchestrator"], "docs")
    assert config.train.curriculum == CurriculumConfig.model_validate({"gate": "advantage_range"})


def test_the_share_of_easy_tasks_that_the_page_works_out_is_right():
    chosen = CurriculumConfig.model_validate({"sampler": "difficulty_pool"}).sampler
    assert chosen is not None
    sampler = chosen.make(tasks(100))
    for number, task in enumerate(sampler.tasks):
        sampler.observe(task, [1.0 if number < 90 else 0.5])
    easy = sum(sampler.draw(n, random.Random(n)).data["n"] < 90 for n in range(4000)) / 4000
    assert easy == pytest.approx(90 * 0.2 / (90 * 0.2 + 10 * 1.0), abs=0.03)
    assert f"{18 / 28:.0%}" == "64%"


def tasks(count: int) -> list[Task]:
    return [Task("env", {"n": n}) for n in range(count)]


def test_the_sampler_and_the_gate_of_the_page_work(own: CurriculumConfig):
    assert own.sampler is not None and own.gate is not None
    own.sampler.check_imports()
    own.gate.check_imports()
    sampler, gate = own.sampler.make(tasks(300)), own.gate.make()
    assert max(sampler.draw(n, random.Random(n)).data["n"] for n in range(500)) == 99
    for task in tasks(10):
        sampler.observe(task, [1.0, 1.0])
    assert sampler.metrics() == {"solved": 10}
    assert max(sampler.draw(n, random.Random(n)).data["n"] for n in range(500)) == 109
    assert gate.keeps([])


def test_the_mixture_has_four_environments_and_three_algorithms():
    (name,) = re.findall(r"headrace rl (examples/\S+\.toml)", DOCS)
    config, notices = load(RunConfig, [REPOSITORY / name])
    orchestrator = config.orchestrator
    assert len(orchestrator.train.env) == 4
    assert {orchestrator.algo_of(env).type for env in orchestrator.train.env} == {"grpo", "max_rl", "rae"}
    assert notices == []
