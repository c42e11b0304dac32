"""The environment of a verifiers taskset."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from typing import Any

from headrace.environments.adapters.verifiers import loading, toolsets
from headrace.environments.adapters.verifiers.library import prepare, verifiers
from headrace.environments.adapters.verifiers.outcome import POLICY, rollouts_of
from headrace.environments.adapters.verifiers.seat import EPISODE, Interception, Seats
from headrace.environments.arguments import BadArgument
from headrace.environments.base import Context, Environment, EpisodeError
from headrace.errors import BadInput
from headrace.rollout.types import Message, Rollout, Task


class VerifiersTaskset(Environment):
    """A taskset by `name`, an installed one or `package.module:Class`; `config` has its settings.

    `env` has the settings of its environment and agents (`{ agent = { max_turns = 4 } }`), and with `id` an environment
    other than its own; `select` selects tasks (`{ limit = 100 }`); `gold` is a template of the best reply to a task,
    with fields of its data in braces, for probing and demonstrations.
    """

    def __init__(
        self,
        name: str,
        /,
        *,
        env: dict[str, Any] | None = None,
        select: dict[str, Any] | None = None,
        gold: str | None = None,
        **config: Any,
    ) -> None:
        prepare()
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
        return [
            {"key": task.key, "data": task.data.model_dump(mode="json", exclude_defaults=True)} for task in self._listed
        ]

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
            address = toolsets.bring_here(toolset).config.url
            address.server = await toolsets.serve(toolset, self._open)
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
            raise EpisodeError(
                "unknown_task", f"verifiers:{self._name} has no task {key} here: it must list the same ones every time"
            )
        return self._by_key[key]
