"""The environment of a verifiers taskset, and its episodes as rollouts: one for each trace, with its seat's turns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from typing import Any

from headrace.environments.adapters import import_verifiers as verifiers
from headrace.environments.adapters.verifiers import loading
from headrace.environments.adapters.verifiers.seat import (
    CONTEXT_FULL,
    EPISODE,
    Interception,
    Seat,
    Seats,
    bring_here,
    serve,
)
from headrace.environments.arguments import BadArgument
from headrace.environments.base import Context, Environment, EpisodeError
from headrace.errors import BadInput
from headrace.rollout.types import Message, Rollout, RolloutError, Task

POLICY = "policy"
"""The agent of a rollout in an environment with one agent."""
ENDED = ("agent_completed", "user_closed")
"""Stop conditions of a run that ended by itself."""
Settings = dict[str, Any]
FRAME = re.compile(r'^ *File "(.+)", line (\d+)', re.MULTILINE)


class VerifiersTaskset(Environment):
    """A taskset by `name`, an installed one or `package.module:Class`; `config` has its settings.

    `env` has the settings of its environment and agents (`{ agent = { max_turns = 4 } }`), and with `id` an environment
    other than its own; `select` selects tasks (`{ limit = 100 }`); `gold` is a template of the best reply to a task,
    with fields of its data in braces, for probing and demonstrations.
    """

    def __init__(
        self, name: str, /, *, env: Settings | None = None, select: Settings | None = None, gold: str | None = None,
        **config: Any,
    ) -> None:  # fmt: skip
        loading.prepare()
        self._name = name
        self._gold = gold
        self._env = loading.load(name, config, env or {})
        selection = loading.checked(verifiers().SelectConfig, select or {}, {}, "select.")
        self._taskset = self._env.taskset.select(selection)
        if not self._taskset.bounded:
            fix = "Set how many tasks to use: select = { limit = 1000 }."
            raise BadArgument("the taskset is endless", key="select", value=select, fix=fix)
        self._model = verifiers().ModelContext(POLICY, verifiers().EvalClientConfig(api_key_var=POLICY))
        self._single_agent = isinstance(self._env, verifiers().SingleAgentEnv)
        self._listed: list[Any] = []
        self._by_key: dict[str, Any] = {}
        self._open = AsyncExitStack()

    def tasks(self) -> Iterable[dict[str, Any]]:
        self._load_tasks()
        datas = ((task.key, task.data) for task in self._listed)
        return [{"key": key, "data": data.model_dump(mode="json", exclude_defaults=True)} for key, data in datas]

    async def run(self, task: Task, context: Context) -> list[Rollout]:
        retry = verifiers("utils.retries").run_episode_with_retry
        own_task = self._task(task.key)
        seats = Seats(context)
        token = EPISODE.set(seats)
        try:
            episode = await retry(lambda: self._env.run_episode(own_task, self._model), self._env.config.retries)
        finally:
            EPISODE.reset(token)
        return rollouts_of(episode, seats, self._single_agent)

    async def start(self) -> None:
        """Open what all episodes share: the taskset's toolsets, and the resources of its environment."""
        env = self._env
        shared: dict[str, Any] = {}
        for toolset in env.taskset.toolsets(env.taskset.config):
            address = bring_here(toolset).config.url
            address.server = await serve(toolset, self._open)
            server = verifiers("mcp").SharedToolServer(address, local=True, external=True)
            if shared.setdefault(toolset.server_name, server) is not server:
                raise BadInput(f"two toolsets are named {toolset.server_name!r}", value=f"verifiers:{self._name}")
        env._shared_tools, env._interception = shared, Interception()
        self._open.push_async_callback(env.stop)
        await env.start()

    async def close(self) -> None:
        await self._open.aclose()

    def gold(self, task: Task, messages: Sequence[Message]) -> Message | str:
        if self._gold is None:
            raise NotImplementedError(f"verifiers:{self._name} has no gold replies: set args.gold")
        try:
            return self._gold.format_map(vars(self._task(task.key).data))
        except KeyError as error:
            raise BadInput(f"the task has no field {error}", key="args.gold", value=self._gold) from error

    def _load_tasks(self) -> None:
        if not self._listed:
            self._listed = list(self._taskset)
            for task in self._listed:
                loading.check_task(self._name, task)
            self._by_key = {task.key: task for task in self._listed}

    def _task(self, key: str) -> Any:
        """Return a task by its key. A task has methods besides its data, so a worker process loads the taskset, too."""
        self._load_tasks()
        if key not in self._by_key:
            text = f"verifiers:{self._name} has no task {key} here: it must list the same ones every time"
            raise EpisodeError("unknown_task", text)
        return self._by_key[key]


def rollouts_of(episode: Any, seats: Seats, single_agent: bool) -> list[Rollout]:
    """Return the rollouts. An error of the episode fails all; one of a trace only that trace, if there are others."""
    if seats.failure is not None and not episode.ok:
        raise seats.failure
    if episode.errors:
        raise _episode_error(episode.errors[-1])
    for trace in episode.traces if len(episode.traces) == 1 else ():
        if not trace.ok:
            raise _episode_error(trace.errors[-1])
    return [
        _rollout(trace, seats.by_trace.get(trace.id), POLICY if single_agent else trace.agent.name)
        for trace in episode.traces
    ]


def _rollout(trace: Any, seat: Seat | None, agent: str) -> Rollout:
    """Return the rollout of a trace. A run that failed in its setup has no seat."""
    metrics: dict[str, float] = {}
    if seat is not None and seat.tools is not None:
        metrics = {"tool_calls": seat.tool_calls, "tool_errors": seat.tool_errors}
    stop_reason = "truncated" if trace.is_truncated else ""
    if trace.stop_condition not in ENDED:
        stop_reason = str(trace.stop_condition or "")
    error = None if trace.ok else RolloutError(_reason(trace.errors[-1]), trace.errors[-1].message)
    if trace.ok and trace.is_timeout and trace.stop_condition != "agent_timeout":  # in its setup or its scoring
        text = f"a time limit of the taskset has expired: {trace.stop_condition}"
        error = RolloutError(trace.stop_condition, text)
    rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    return Rollout(
        agent=agent,
        trainable=trace.agent.trainable,
        rewards=rewards or {"reward": trace.reward},
        metrics=metrics | {name: value for name, value in trace.metrics.items() if value is not None},
        messages=[seat.wire(message) for message in trace.messages] if seat is not None else [],
        turns=seat.turns if seat is not None else [],
        truncated=trace.is_truncated or trace.stop_condition in (CONTEXT_FULL, "agent_timeout"),
        stop_reason=stop_reason,
        error=error,
    )


def _episode_error(error: Any) -> EpisodeError:
    """Return the error with the traceback and the place of the first exception."""
    cause = (error.traceback or "").partition("\nThe above exception")[0]
    frames = FRAME.findall(cause)
    place = "{} {}:{}".format(error.type, *frames[-1]) if frames else ""
    return EpisodeError(_reason(error), error.message, place=place, remote_traceback=cause)


def _reason(error: Any) -> str:
    """Return the type of an error in snake case: `task_error`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", error.type).lower()
