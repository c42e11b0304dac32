"""Environments whose episodes are run by an existing agent, which calls the policy through OpenAI's API.

Subclass `AgentEnvironment` and implement `tasks`, `act` (run the agent) and `score`. `id = "agent"` is one for agents
named in a run file: a function or a program, on tasks from a file or a function. All calls of an episode form one
rollout: a call that continues an earlier reply continues its tokens, and a sub-agent with its own prompt becomes its
own sample.

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
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from headrace.environments import arguments
from headrace.environments.agents import reaper
from headrace.environments.agents.episode import Episode
from headrace.environments.agents.proxy import HOST, Proxy
from headrace.environments.base import Context, Environment, EpisodeError
from headrace.environments.child_process import describe_exit, kill_group
from headrace.environments.fault import fault_of
from headrace.environments.tables import FILES, read_rows
from headrace.environments.time_limit import ThreadCall
from headrace.rollout.types import Message, Rollout, Task

NO_PROXY = ("no_proxy", "NO_PROXY")
Score = float | Mapping[str, float]


class Endpoint(NamedTuple):
    """The arguments for OpenAI's client."""

    base_url: str
    api_key: str
    model: str


class AgentCrashed(EpisodeError):
    """An agent that raised, or a program that failed; not a fault of the environment."""

    def __init__(self, message: str, *, place: str = "", remote_traceback: str = "") -> None:
        super().__init__("agent_crashed", message, place=place, remote_traceback=remote_traceback)


class AgentEnvironment(Environment):
    """Base of agent environments. `model` is the model name for the agent.

    An episode whose agent crashes fails and is not trained on, unless `crash_reward` is set: for agents that crash
    because of what a model writes. With `describe_tools` false the agent's tools are not in the prompt, for a policy
    that was trained to call them anyway.
    """

    def __init__(self, model: str = "policy", crash_reward: float | None = None, describe_tools: bool = True) -> None:
        self._proxy = Proxy(model, describe_tools)
        self._crash_reward = crash_reward

    async def act(self, data: dict[str, Any], endpoint: Endpoint) -> Any:
        """Run the agent on a task's data and return its result for `score`. Cancelled if the episode ends first."""
        raise NotImplementedError

    async def score(self, result: Any, data: dict[str, Any], messages: list[Message]) -> Score:
        """Return the reward of the agent's result: a number, or numbers by name, which are summed.

        `messages` is the conversation with the latest reply.
        """
        raise NotImplementedError

    async def start(self) -> None:
        bypass_proxy_for_loopback(os.environ)
        await self._proxy.start()

    async def close(self) -> None:
        await self._proxy.close()

    async def run(self, task: Task, context: Context) -> list[Rollout]:
        with self._proxy.episode(context) as episode:
            try:
                result = await self._play(task.data, episode)
            except AgentCrashed as error:
                if self._crash_reward is not None and episode.turns:
                    return [_rollout(episode, {"crashed": self._crash_reward}, crashed=True)]
                if episode.overflow is None:
                    raise
                raise EpisodeError("context_full", f"{episode.overflow}; the agent gave up: {error}") from error
        if not episode.turns:
            raise EpisodeError("no_calls", "the agent made no call to the model: it must use the given base_url")
        score = await self.score(result, task.data, episode.transcript.conversations[-1])
        return [_rollout(episode, dict(score) if isinstance(score, Mapping) else {"reward": score})]

    async def _play(self, data: dict[str, Any], episode: Episode) -> Any:
        """Return the agent's result. Raises `AgentCrashed` for its exceptions, and the original of the context's."""
        endpoint = Endpoint(self._proxy.url(episode), episode.token, self._proxy.model)
        acting = asyncio.ensure_future(self._act(data, endpoint))
        failing = asyncio.ensure_future(episode.failed.wait())
        try:
            await asyncio.wait({acting, failing}, return_when=asyncio.FIRST_COMPLETED)
            if episode.failure is not None:
                raise episode.failure
            result, error = acting.result()
        finally:
            failing.cancel()
            acting.cancel()
            await asyncio.wait({acting})
        if error is None:
            return result
        if isinstance(error, EpisodeError):
            raise error
        fault = fault_of(error)
        raise AgentCrashed(fault.text, place=fault.place, remote_traceback=fault.traceback) from error

    async def _act(self, data: dict[str, Any], endpoint: Endpoint) -> tuple[Any, BaseException | None]:
        """Return the agent's result or exception: sys.exit() raised from a task would end the process."""
        try:
            return await self.act(data, endpoint), None
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return None, error


def _rollout(episode: Episode, rewards: dict[str, float], crashed: bool = False) -> Rollout:
    is_cut = bool(episode.turns) and episode.turns[-1].finish_reason == "length"
    stop_reason = "context_full" if episode.overflow is not None else "truncated" if is_cut else ""
    conversations = episode.transcript.conversations
    metrics = {"turns": len(episode.turns), "conversations": len(conversations), "tool_calls": episode.calls}
    return Rollout(
        rewards=rewards,
        metrics={**metrics, "crashed": float(crashed)},
        messages=conversations[-1],
        turns=episode.turns,
        truncated=bool(stop_reason),
        stop_reason=stop_reason or ("crashed" if crashed else ""),
    )


def bypass_proxy_for_loopback(variables: MutableMapping[str, str]) -> None:
    """Add this machine to the hosts that HTTP clients reach without a proxy."""
    for name in NO_PROXY:
        hosts = [host for host in variables.get(name, "").split(",") if host]
        if HOST not in hosts and "*" not in hosts:
            variables[name] = ",".join([*hosts, HOST])


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
            arguments.check_number("crash_reward", crash_reward, -MAX_REWARD, MAX_REWARD)
        arguments.check_mistakes(demonstrate_mistakes)
        arguments.check_flag("describe_tools", describe_tools)
        super().__init__(model, crash_reward, describe_tools)
        self.demonstrate_mistakes = demonstrate_mistakes
        self._agent = _load_agent(agent, command)
        self._command = list(command or ())
        self._rows = _task_reader(tasks, task_args or {})
        self._reward = _import_function(reward, "reward")
        self._gold = _import_function(gold, "gold") if gold is not None else None
        self._mistake = _import_function(mistake, "mistake") if mistake is not None else None
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


def _load_agent(agent: str | None, command: Sequence[str] | None) -> Callable[..., Any] | None:
    """Check that one of the two is set; return the agent's function, or None for a program."""
    if (agent is None) == (command is None):
        fix = "Give either agent, the import path of a function, or command, a program and its arguments."
        raise arguments.BadArgument("expected one of agent and command", key="agent", value=agent, fix=fix)
    if agent is not None:
        return _import_function(agent, "agent")
    if isinstance(command, str) or not command or not all(isinstance(word, str) for word in command):
        fix = 'For example ["python", "my_agent.py"].'
        raise arguments.BadArgument("expected a list of texts", key="command", value=command, fix=fix)
    if shutil.which(command[0]) is None:
        raise arguments.BadArgument(f"program {command[0]!r} not found", key="command", value=command)
    return None


def _import_function(path: str, argument: str) -> Callable[..., Any]:
    function: Any = arguments.import_argument(argument, path)
    if not callable(function):
        raise arguments.BadArgument(f"a {type(function).__name__}, not a function", key=argument, value=path)
    return function  # type: ignore[no-any-return]


def _task_reader(tasks: str, args: dict[str, Any]) -> Callable[[], Iterable[dict[str, Any]]]:
    if Path(tasks).suffix in FILES or Path(tasks).is_file():
        if args:
            fact = f"tasks = {tasks!r} is a file, which takes no arguments"
            raise arguments.BadArgument(fact, key="task_args", value=args, fix="Leave task_args out.")
        return functools.partial(read_rows, tasks)
    return arguments.bind_args(_import_function(tasks, "tasks"), args, within="task_args.")


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
                status = await _feed(process, stdin)  # the program gets its input once it is watched
            finally:
                kill_group(process.pid)
                await process.wait()
                self._running.discard(process.pid)
                with suppress(BrokenPipeError):  # the next program starts another reaper
                    self._notify(f"-{process.pid}\n")
            if status != 0:
                text = _read_tail(errors)[-MAX_ERROR_CHARS:].strip() or "empty"
                raise AgentCrashed(
                    f"the program {describe_exit(status)}; its standard error: {text}", place=f"status {status}"
                )
            return _read_tail(output)

    async def close(self) -> None:
        """End the reaper, which kills what still runs."""
        if self._reaper is not None:
            assert self._reaper.stdin is not None
            self._reaper.stdin.close()
            await asyncio.to_thread(self._reaper.wait)
            self._reaper = None

    def _watch(self, group: int) -> None:
        """Have the reaper kill this process group if this process dies; start the reaper if needed."""
        self._running.add(group)
        if self._reaper is None or self._reaper.poll() is not None:  # the reaper was killed
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
    """Write the standard input of a process, which may leave it unread, and return its exit status."""
    assert process.stdin is not None
    process.stdin.write(stdin)
    with suppress(BrokenPipeError, ConnectionResetError):
        await process.stdin.drain()
    process.stdin.close()
    return await process.wait()


def _read_tail(file: IO[bytes]) -> str:
    """Return the last `MAX_OUTPUT_BYTES` of a file as text."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - MAX_OUTPUT_BYTES))
    return file.read().decode(errors="replace")
