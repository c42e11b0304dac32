"""`id = "agent"`: an agent named in a run file, a function or a program, on tasks from a file or a function.

A program is one process per episode. With all that it has started it forms a process group, which is killed when the
program ends or its episode is cancelled; if this process is killed, a reaper process does the same (`reaper.py`).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from headrace.environments.agents import reaper
from headrace.environments.agents.environment import AgentCrashed, AgentEnvironment, Endpoint, Score
from headrace.environments.arguments import (
    BadArgument,
    bound,
    check_flag,
    check_mistakes,
    check_number,
    import_argument,
)
from headrace.environments.child_process import describe_exit, kill_group
from headrace.environments.data.tables import FILES, read_rows
from headrace.environments.time_limit import ThreadCall
from headrace.rollout.types import Message, Task

MAX_REWARD = 1e9
MAX_ERROR_CHARS = 2000
"""Characters at the end of a failed program's standard error that are reported."""
MAX_OUTPUT_BYTES = 16 << 20


class AgentProgram(AgentEnvironment):
    """Runs an agent that is one of two:

    - `agent`, the import path of a function, called as `function(data, base_url=..., api_key=..., model=...)` with a
      task's data; its return value is the result. One that is not `async` runs in a thread, which cannot be killed:
      after its episode it fails at its next request to the model.
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
        result = call() if inspect.iscoroutinefunction(self._agent) else await ThreadCall(call).result()
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


class Processes:
    """The running programs, and their reaper. Output goes to files, so that a full pipe never blocks a program."""

    def __init__(self) -> None:
        self._running: set[int] = set()
        self._reaper: subprocess.Popen[bytes] | None = None

    async def run(self, command: Sequence[str], stdin: bytes, variables: Mapping[str, str]) -> str:
        """Run a program with this standard input and return its standard output. Raises `AgentCrashed`."""
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=errors,
                env=dict(variables),
                start_new_session=True,
            )
            try:
                self._watch(process.pid)
                status = await _feed(process, stdin)  # the program starts once it has its input, when it is watched
            finally:
                kill_group(process.pid)
                await process.wait()
                self._running.discard(process.pid)
                with suppress(BrokenPipeError):  # the next program starts another reaper
                    self._notify(f"-{process.pid}\n")
            if status != 0:
                text = _read(errors)[-MAX_ERROR_CHARS:].strip() or "empty"
                raise AgentCrashed(
                    f"the program {describe_exit(status)}; its standard error: {text}", place=f"status {status}"
                )
            return _read(output)

    async def close(self) -> None:
        """End the reaper, which kills what still runs."""
        if self._reaper is not None:
            assert self._reaper.stdin is not None
            self._reaper.stdin.close()
            await asyncio.to_thread(self._reaper.wait)
            self._reaper = None

    def _watch(self, group: int) -> None:
        self._running.add(group)
        if self._reaper is None or self._reaper.poll() is not None:  # it was killed
            self._reaper = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(reaper.__file__))],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
            for other in self._running - {group}:
                self._notify(f"+{other}\n")
        self._notify(f"+{group}\n")

    def _notify(self, line: str) -> None:
        if self._reaper is not None and self._reaper.stdin is not None:
            self._reaper.stdin.write(line.encode())
            self._reaper.stdin.flush()


async def _feed(process: asyncio.subprocess.Process, stdin: bytes) -> int:
    """Write its standard input, which it may leave unread, and return its exit status."""
    assert process.stdin is not None
    process.stdin.write(stdin)
    with suppress(BrokenPipeError, ConnectionResetError):
        await process.stdin.drain()
    process.stdin.close()
    return await process.wait()


def _read(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - MAX_OUTPUT_BYTES))
    return file.read().decode(errors="replace")
