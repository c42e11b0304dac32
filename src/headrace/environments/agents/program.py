"""`id = "agent"`: an agent named in a run file, a function or a program, on tasks from a file or a function."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import json
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from headrace.environments.agents.environment import AgentEnvironment, Endpoint, Score
from headrace.environments.agents.process import Processes
from headrace.environments.arguments import (
    BadArgument,
    bound,
    check_flag,
    check_mistakes,
    check_number,
    import_argument,
)
from headrace.environments.data.tables import FILES, read_rows
from headrace.rollout.types import Message, Task

MAX_REWARD = 1e9


class AgentProgram(AgentEnvironment):
    """Runs an agent that is one of two:

    - `agent`, the import path of a function, called as `function(data, base_url=..., api_key=..., model=...)` with a
      task's data; its return value is the result. One that is not `async` runs in a thread.
    - `command`, a program, started for each episode with the task's data as JSON on its standard input, and
      OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL in its environment; its standard output is the result.

    `tasks` is a file, or the import path of a function that returns them when called with `task_args`. `reward` is the
    import path of a function of (result, data, messages) that returns a number, or numbers by name. `gold` and
    `mistake` are import paths of functions of (data, messages) and (data, messages, rng) that return a reply: for
    demonstrations and `headrace probe`.
    """

    def __init__(
        self,
        tasks: str,
        reward: str,
        agent: str | None = None,
        command: Sequence[str] | None = None,
        task_args: dict[str, Any] | None = None,
        gold: str | None = None,
        mistake: str | None = None,
        model: str = "policy",
        crash_reward: float | None = None,
        describe_tools: bool = True,
        demonstrate_mistakes: float = 0.0,
    ) -> None:
        if crash_reward is not None:
            check_number("crash_reward", crash_reward, -MAX_REWARD, MAX_REWARD)
        check_mistakes(demonstrate_mistakes)
        check_flag("describe_tools", describe_tools)
        super().__init__(model, crash_reward, describe_tools)
        self.demonstrate_mistakes = demonstrate_mistakes
        self._agent = _check_agent(agent, command)
        self._command = list(command or ())
        self._rows = _rows(tasks, task_args or {})
        self._reward = _function(reward, "reward")
        self._gold = _function(gold, "gold") if gold is not None else None
        self._mistake = _function(mistake, "mistake") if mistake is not None else None
        self._processes = Processes()

    def tasks(self) -> Iterable[dict[str, Any]]:
        return self._rows()

    async def act(self, data: dict[str, Any], endpoint: Endpoint) -> Any:
        if self._agent is None:
            variables = {f"OPENAI_{name.upper()}": value for name, value in endpoint._asdict().items()}
            return await self._processes.run(self._command, json.dumps(data).encode(), {**os.environ, **variables})
        call = functools.partial(self._agent, data, **endpoint._asdict())
        result = call() if inspect.iscoroutinefunction(self._agent) else await _run_in_thread(call)
        return await result if inspect.isawaitable(result) else result

    async def score(self, result: Any, data: dict[str, Any], messages: list[Message]) -> Score:
        reward = self._reward(result, data, messages)
        score: Score = await reward if inspect.isawaitable(reward) else reward
        return score

    async def close(self) -> None:
        await super().close()
        await self._processes.close()

    def gold(self, task: Task, messages: Sequence[Message]) -> Message | str:
        return self._gold(task.data, messages) if self._gold is not None else super().gold(task, messages)

    def mistake(self, task: Task, messages: Sequence[Message], rng: random.Random) -> Message | str:
        if self._mistake is None:
            return super().mistake(task, messages, rng)
        reply: Message | str = self._mistake(task.data, messages, rng)
        return reply


def _check_agent(agent: str | None, command: Sequence[str] | None) -> Callable[..., Any] | None:
    if (agent is None) == (command is None):
        fix = "Give either agent, the import path of a function, or command, a program and its arguments."
        raise BadArgument("expected one of agent and command", key="agent", value=agent, fix=fix)
    if agent is not None:
        return _function(agent, "agent")
    if isinstance(command, str) or not command or not all(isinstance(word, str) for word in command):
        fix = 'For example ["python", "my_agent.py"].'
        raise BadArgument("expected a list of texts", key="command", value=command, fix=fix)
    if shutil.which(command[0]) is None:
        raise BadArgument(f"program {command[0]!r} not found", key="command", value=command)
    return None


def _function(path: str, argument: str) -> Callable[..., Any]:
    function: Any = import_argument(argument, path)
    if not callable(function):
        raise BadArgument(f"a {type(function).__name__}, not a function", key=argument, value=path)
    return function  # type: ignore[no-any-return]


def _rows(tasks: str, args: dict[str, Any]) -> Callable[[], Iterable[dict[str, Any]]]:
    if Path(tasks).suffix in FILES or Path(tasks).is_file():
        if args:
            fact = f"tasks = {tasks!r} is a file, which takes no arguments"
            raise BadArgument(fact, key="task_args", value=args, fix="Leave task_args out.")
        return functools.partial(read_rows, tasks)
    return bound(_function(tasks, "tasks"), args, within="task_args.")


async def _run_in_thread(function: Callable[[], Any]) -> Any:
    """Call a function that blocks, such as on model calls, in a thread of its own, so that hundreds run at once.

    The loop's default executor has few threads. A thread cannot be killed: after its episode it fails at its next
    request to the model.
    """
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    outcome: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if not outcome.done():
            outcome.set_result((result, error))

    def work() -> None:
        result, error = None, None
        try:
            result = context.run(function)
        except BaseException as raised:  # sys.exit() included
            error = raised
        with suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name="agent", daemon=True).start()
    result, error = await outcome
    if error is not None:
        raise error
    return result
