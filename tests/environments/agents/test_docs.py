"""What docs/how-to/agents.md shows is what runs."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from headrace.environments.base import tasks_of
from headrace.environments.registry import load_environment
from headrace.environments.script import Script

DOCS = (Path(__file__).parents[3] / "docs" / "how-to/agents.md").read_text()
AGENT, COUNT = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
(RUN_FILE,) = re.findall(r"```toml\n(.*?)```", DOCS, re.DOTALL)


async def test_the_agent_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_training.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text('{"word": "mill"}\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_training", raising=False)
    (entry,) = tomllib.loads(RUN_FILE)["orchestrator"]["train"]["env"]
    environment = load_environment(entry["id"], entry["args"])
    (task,) = tasks_of(environment, "agent")
    await environment.start()
    (rollout,) = await environment.run(task, Script(lambda messages: "MILL"))
    await environment.close()
    assert rollout.rewards == {"reward": 1.0}


async def test_the_game_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "counting.py").write_text(COUNT)
    monkeypatch.syspath_prepend(tmp_path)
    environment = load_environment("gymnasium:counting:Count", {})
    answers = iter("123")
    script = Script(lambda messages: f"<action>{next(answers)}</action>")
    (rollout,) = await environment.run(tasks_of(environment, "count")[0], script)
    assert rollout.rewards == {"reward": 1.0}
