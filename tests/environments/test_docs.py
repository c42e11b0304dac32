"""What docs/how-to/environments.md shows is what runs."""

import re
import sys
import textwrap
from pathlib import Path

import pytest

from headrace.environments import rewards
from headrace.environments.base import tasks_of
from headrace.environments.registry import SHIPPED, load_environment
from headrace.environments.script import Script, call_tool, play
from headrace.rollout.checks import check_rollout
from headrace.rollout.merge import merge_turns
from headrace.rollout.types import Turn

DOCS = (Path(__file__).parents[2] / "docs" / "how-to/environments.md").read_text()
SINGLE, SEVERAL, TOOLS, MASKED = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)


async def gold_rewards(source: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    (tmp_path / "documented.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "documented", raising=False)
    environment = load_environment(f"documented:{name}", {})
    played = [await play(environment, t, lambda m, t=t: environment.gold(t, m)) for t in tasks_of(environment, name)]
    return [rollout.rewards for (rollout,), _ in played]


async def test_the_single_turn_environment_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert await gold_rewards(SINGLE, "shout", tmp_path, monkeypatch) == [{"exact": 1.0}] * 3


async def test_the_environment_of_several_turns_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert await gold_rewards(SEVERAL, "GuessLetter", tmp_path, monkeypatch) == [{"found": 1.0}] * 8


async def test_the_tool_runs():
    program = "from headrace.environments import Chat\nasync def run(context):\n" + textwrap.indent(TOOLS, "    ")
    names: dict = {}
    exec(program + "    return answer", names)
    script = Script(lambda m: call_tool("add", a=1234, b=4321) if len(m) == 1 else m[-1]["content"])
    answer = await names["run"](script)
    assert answer.text == "5555"


async def test_the_environment_that_excludes_tokens_trains_its_last_reply_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert await gold_rewards(MASKED, "SecondThought", tmp_path, monkeypatch) == [{"right": 1.0}]
    environment = load_environment("documented:SecondThought", {})
    script = Script(lambda messages: "42")

    class Sampled:
        """Replies with tokens: a prompt of one more token than the conversation so far, then two sampled ones."""

        tokens = 0

        async def chat(self, messages, tools=(), max_tokens=None):
            reply = await script.chat(messages, tools, max_tokens)
            prompt = list(range(self.tokens + 1))
            self.tokens = len(prompt) + 2
            reply.turn = Turn(prompt, [len(prompt), len(prompt) + 1], [-1.0, -1.0], [0, 0], 1.0)
            return reply

    [task] = tasks_of(environment, "env")
    [rollout] = await environment.run(task, Sampled())
    check_rollout(rollout, scored_later=False, vocab_size=100)
    assert rollout.error is None
    [sample] = merge_turns(rollout.turns)
    assert sample.mask.tolist() == [False] * 4 + [True] * 2
    assert sample.sampled.tolist() == [False, True, True, False, True, True]


def test_every_shipped_environment_and_reward_is_listed():
    listed = re.findall(r"^\| (`[^|]+) \|", DOCS.partition("## Environments that ship")[2], re.MULTILINE)
    assert {name for cell in listed for name in re.findall(r"`([^`]+)`", cell)} == set(SHIPPED)
    described = re.findall(r"^\| `(\w+)\(", DOCS.partition("## Rewards that ship")[2], re.MULTILINE)
    assert set(described) | {
        *("GroupReward", "Reward", "Rewards"),
        *("build_reward", "group_reward", "in_sandbox", "register_reward", "scaled"),
    } == set(rewards.__all__)
