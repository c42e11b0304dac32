"""Agents that a run file names: what becomes of their calls, and of those that fail."""

import asyncio
import json
import logging
import os
import signal
import sys
import textwrap
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.environments.agents import AgentProgram
from headrace.environments.agents.program import bypass_proxy_for_loopback
from headrace.environments.base import Context, EpisodeError, PromptTooLong, Reply, tasks_of
from headrace.environments.registry import EnvironmentNotFound, load_environment
from headrace.environments.script import Script, call_tool
from headrace.inference.schema import StructuredOutputs
from headrace.rollout.types import Message, Rollout, Task
from tests.end_to_end.runs import is_alive, wait_until
from tests.environments.agents import agents, rows
from tests.environments.pools import Broken, Echo, Failing, Silent, pool
from tests.refusals import refused

AGENTS = "tests.environments.agents.agents"
ROWS = "tests.environments.agents.rows"
COMMON = {"tasks": f"{ROWS}:tasks", "reward": f"{ROWS}:reward", "gold": f"{ROWS}:gold"}
TASK = Task("agent", {"question": "question 0", "answer": "answer 0"})


def program(agent: str | None = "ask", **args: Any) -> AgentProgram:
    named = {} if agent is None else {"agent": f"{AGENTS}:{agent}"}
    environment = load_environment("agent", {**COMMON, **named, **args})
    assert isinstance(environment, AgentProgram)
    return environment


@asynccontextmanager
async def started(agent: str | None = "ask", **args: Any) -> AsyncIterator[AgentProgram]:
    environment = program(agent, **args)
    await environment.start()
    try:
        yield environment
    finally:
        await environment.close()


async def play(agent: str | None, context: Context, data: dict[str, Any] | None = None, **args: Any) -> Rollout:
    async with started(agent, **args) as environment:
        (rollout,) = await environment.run(Task("agent", {**TASK.data, **(data or {})}), context)
        return rollout


def says(text: str) -> Script:
    return Script(lambda messages: text)


@pytest.mark.parametrize("agent", ["ask", "ask_in_thread"])
async def test_what_an_agent_returns_is_rewarded(agent: str):
    rollout = await play(agent, says("answer 0"))
    assert rollout.rewards == {"reward": 1.0}
    assert rollout.messages == [
        {"role": "user", "content": "question 0"},
        {"role": "assistant", "content": "answer 0"},
    ]
    assert len(rollout.turns) == 1
    assert rollout.metrics == {"turns": 1, "conversations": 1, "tool_calls": 0, "crashed": 0}


async def test_a_reward_may_be_several_and_asynchronous():
    rollout = await play("ask", says("answer 1"), reward=f"{ROWS}:named_rewards")
    assert rollout.rewards == {"right": 0.0, "length": 0.2}


async def test_tools_are_called_over_several_turns():
    script = Script(lambda m: call_tool("add", a=len(m)) if len(m) < 6 else f"answer {m[-1]['content']}")
    rollout = await play("use_tools", script, {"answer": "answer 5"})
    assert rollout.rewards == {"reward": 1.0}
    assert [message["role"] for message in rollout.messages] == [
        *("system", "user", "assistant", "tool", "assistant", "tool", "assistant")
    ]
    assert rollout.messages[3] == {"role": "tool", "tool_call_id": "call_0", "name": "add", "content": "3"}
    assert rollout.metrics["tool_calls"] == 2
    assert script.calls[0][1] == [agents.ADD]


async def test_half_a_character_reaches_the_agent_as_a_question_mark():
    script = Script(lambda m: call_tool("add", a=1, q="\ud800") if len(m) == 2 else "a \ud800")
    rollout = await play("use_tools", script, {"answer": "a ?"})
    assert rollout.rewards == {"reward": 1.0}
    assert rollout.metrics["conversations"] == 1


async def test_sub_agents_are_conversations_of_one_rollout():
    rollout = await play("delegate", Echo())
    assert len(rollout.turns) == 5
    assert rollout.metrics["conversations"] == 3
    assert rollout.messages[0]["content"] == "echo again echo again"  # of the one that was answered last


async def test_settings_of_an_agents_own_are_ignored_and_named_once(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        async with started("ask") as environment:
            for _ in range(3):
                await environment.run(TASK, says("x"))
    (warning,) = [record.message for record in caplog.records if "an agent sets" in record.message]
    assert "temperature, seed" in warning


class Small:
    """A model with room for so many characters."""

    def __init__(self, room: int) -> None:
        self.room = room

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        max_tokens: int | None = None,
        structured_outputs: StructuredOutputs | None = None,
    ) -> Reply:
        if sum(len(message["content"]) for message in messages) > self.room:
            raise PromptTooLong(f"the conversation is longer than {self.room}")
        return await Echo().chat(messages, tools, max_tokens)


async def test_an_agent_gets_an_error_when_its_context_is_full_and_may_continue():
    rollout = await play("until_full", Small(200), {"answer": "full"})
    assert rollout.rewards == {"reward": 1.0}
    assert (rollout.truncated, rollout.stop_reason) == (True, "context_full")


async def test_an_agent_that_gives_up_over_a_full_context_fails_for_that_reason():
    with pytest.raises(EpisodeError, match="longer than 200") as caught:
        await play("until_full", Small(200), {"crash": True})
    assert caught.value.reason == "context_full"


@pytest.mark.parametrize(
    ("agent", "words"), [("ask_and_fail", "ValueError: no brackets"), ("ask_and_exit", "SystemExit: 3")]
)
async def test_a_crash_costs_the_episode(agent: str, words: str):
    with pytest.raises(EpisodeError, match=words) as caught:
        await play(agent, says("x"))
    assert caught.value.reason == "agent_crashed"
    assert "agents.py" in caught.value.place
    assert "Traceback" in caught.value.remote_traceback


async def test_a_crash_may_be_worth_something():
    rollout = await play("ask_and_fail", says("x"), crash_reward=-0.5)
    assert rollout.rewards == {"crashed": -0.5}
    assert rollout.stop_reason == "crashed"
    assert rollout.metrics["crashed"] == 1


async def test_what_the_models_line_raises_is_raised_although_the_agent_swallows_it():
    context = Failing()
    with pytest.raises(Broken) as caught:
        await play("swallow_errors", context)
    assert caught.value is context.error


async def test_an_agent_that_never_asks_fails_for_that_reason():
    with pytest.raises(EpisodeError, match="base_url") as caught:
        await play("never_ask", says("x"))
    assert caught.value.reason == "no_calls"


async def test_a_call_after_the_end_is_refused_and_not_counted():
    agents.late.clear()
    agents.release.clear()
    async with started("leave_a_call_behind") as environment:
        (rollout,) = await environment.run(TASK, says("x"))
        agents.release.set()
        while not agents.late:
            await asyncio.sleep(0.01)
    assert agents.late == [410]
    assert len(rollout.turns) == 1


@pytest.mark.parametrize("agent", ["ask", "ask_in_thread", "sleep_forever", "sleep_in_thread"])
async def test_an_agent_ends_with_its_episode(agent: str):
    context = Silent()
    async with started(agent) as environment:
        running = asyncio.create_task(environment.run(TASK, context))
        await (context.asked.wait() if agent.startswith("ask") else asyncio.sleep(0.05))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        if agent.startswith("ask"):
            await context.hung_up.wait()


async def test_hundreds_of_episodes_at_once_keep_their_own_answers():
    async def one(environment: AgentProgram, number: int) -> None:
        (rollout,) = await environment.run(Task("agent", {"question": str(number), "answer": f"echo {number}"}), Echo())
        assert rollout.rewards == {"reward": 1.0}

    async with started("ask_in_thread") as environment:
        await asyncio.gather(*(one(environment, number) for number in range(200)))


async def test_agents_run_in_worker_processes_too():
    args = {**COMMON, "agent": f"{AGENTS}:use_tools"}
    script = Script(lambda m: call_tool("add", a=1) if len(m) == 2 else "answer 0")
    async with pool(identifier="agent", args=args) as workers:
        (rollout,) = await workers.run(TASK, script)
        assert rollout.rewards == {"reward": 1.0}
        assert len(rollout.turns) == 2
        with pytest.raises(Broken):
            await workers.run(TASK, Failing())


def test_gold_replies_make_demonstrations_of_the_agents_own_conversations():
    shown = next(program("use_tools").demonstrations(seed=0))
    assert [message["role"] for message in shown.messages] == ["system", "user", "assistant"]
    assert shown.tools == [agents.ADD]


# Programs


def write_program(directory: Path, body: str) -> list[str]:
    path = directory / "my_agent.py"
    path.write_text("import json, os, sys, time\ndata = json.load(sys.stdin)\n" + textwrap.dedent(body))
    return [sys.executable, "-S", str(path)]


ASKS = """
    import urllib.request
    body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": data["question"]}]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""


async def test_a_program_reads_its_task_and_writes_its_result(tmp_path: Path):
    command = write_program(tmp_path, ASKS + "    print(answer, end='')")
    rollout = await play(None, says("answer 0"), command=command)
    assert rollout.rewards == {"reward": 1.0}
    assert len(rollout.turns) == 1


async def test_a_program_that_fails_says_how_and_why(tmp_path: Path):
    command = write_program(tmp_path, ASKS + "    raise SystemExit('the reply has no brackets')")
    with pytest.raises(EpisodeError, match=r"status 1\b.*the reply has no brackets") as caught:
        await play(None, says("x"), command=command)
    assert caught.value.reason == "agent_crashed"


STARTS_ANOTHER = """
    import subprocess
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"])
    with open(data["pids"] + ".tmp", "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    os.rename(data["pids"] + ".tmp", data["pids"])
"""


def gone(pids: Path) -> bool:
    return not any(_runs(int(pid)) for pid in pids.read_text().split())


def _runs(pid: int) -> bool:
    """Return whether it is alive and not a zombie."""
    status = Path(f"/proc/{pid}/stat")
    return is_alive(pid) and not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")


@pytest.mark.parametrize("how", ["ends", "is cancelled"])
async def test_whatever_a_program_has_started_ends_with_its_episode(how: str, tmp_path: Path):
    pids = tmp_path / "pids"
    command = write_program(tmp_path, STARTS_ANOTHER + ("" if how == "ends" else "    time.sleep(1000)"))
    async with started(None, command=command) as environment:
        running = asyncio.create_task(environment.run(Task("agent", {"pids": str(pids)}), says("x")))
        while not pids.exists():
            await asyncio.sleep(0.01)
        if how == "is cancelled":
            running.cancel()
        await asyncio.wait({running})
        wait_until(lambda: gone(pids), "the program's processes end")


PARENT = """
import asyncio, sys
from headrace.environments.registry import load_environment
from headrace.environments.script import Script
from headrace.inference.schema import StructuredOutputs
from headrace.rollout.types import Task

async def main():
    environment = load_environment("agent", {args!r})
    await environment.start()
    await environment.run(Task("agent", {data!r}), Script(lambda messages: "x"))

asyncio.run(main())
"""


async def test_a_program_ends_when_the_process_that_runs_the_episode_is_killed(tmp_path: Path):
    pids = tmp_path / "pids"
    command = write_program(tmp_path, STARTS_ANOTHER + "    time.sleep(1000)")
    source = PARENT.format(args={**COMMON, "command": command}, data={"pids": str(pids)})
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", source)
    while not pids.exists():
        await asyncio.sleep(0.01)
    os.kill(parent.pid, signal.SIGKILL)
    await parent.wait()
    wait_until(lambda: gone(pids), "the program's processes end")


# Arguments


async def test_tasks_come_from_a_file(tmp_path: Path):
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows.tasks(2)))
    assert [task.data for task in tasks_of(program(tasks=str(path)), "agent")] == rows.tasks(2)
    assert len(tasks_of(program(task_args={"count": 5}), "agent")) == 5


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ({}, "agent"),
        ({"agent": f"{AGENTS}:ask", "command": ["python"]}, "agent"),
        ({"agent": f"{AGENTS}:missing"}, "agent"),
        ({"agent": f"{AGENTS}:ADD"}, "agent"),
        ({"command": "python agent.py"}, "command"),
        ({"command": ["no-such-program"]}, "command"),
        ({"agent": f"{AGENTS}:ask", "crash_reward": "0"}, "crash_reward"),
        ({"agent": f"{AGENTS}:ask", "task_args": {"many": 1}}, "task_args.many"),
        ({"agent": f"{AGENTS}:ask", "tasks": "a.jsonl", "task_args": {"count": 1}}, "task_args"),
    ],
)
def test_what_is_wrong_with_the_arguments_is_said(args: dict[str, Any], key: str):
    with refused(EnvironmentNotFound, key=f"args.{key}"):
        load_environment("agent", {**COMMON, **args})


def test_clients_ask_this_machine_directly_whatever_proxies_there_are():
    variables = {"no_proxy": "example.org"}
    for _ in range(2):
        bypass_proxy_for_loopback(variables)
    assert variables == {"no_proxy": "example.org,127.0.0.1", "NO_PROXY": "127.0.0.1"}
    bypass_proxy_for_loopback(all_spared := {"no_proxy": "*", "NO_PROXY": "*"})
    assert all_spared == {"no_proxy": "*", "NO_PROXY": "*"}
