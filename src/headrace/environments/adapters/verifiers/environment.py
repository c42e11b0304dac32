"""The environment of a verifiers taskset, loaded so that it runs in this process; each trace becomes a rollout.

The harness of every agent is replaced by one in this process: a conversation with tools, until a reply calls none.
Tasksets that need more are refused with the reason.
"""

from __future__ import annotations

import functools
import importlib
import logging
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from types import ModuleType
from typing import Any

from headrace import imports
from headrace.environments.adapters import import_verifiers as verifiers
from headrace.environments.adapters.verifiers.seat import (
    CONTEXT_FULL,
    EPISODE,
    Interception,
    Seat,
    Seats,
    Tools,
    serve,
    set_address,
)
from headrace.environments.arguments import BadArgument
from headrace.environments.base import Context, Environment, EpisodeError
from headrace.errors import BadInput
from headrace.rollout.types import Message, Rollout, RolloutError, Task

HARNESS = "headrace_in_process"
"""The module name under which verifiers finds our harness; it must have one part."""
REPLACED = ("null",)
"""Harnesses that ours replaces: they chat and call tools."""
OWN_DEFAULT = "bash"
"""The default harness of verifiers. Agents that need its shell also need a container, which is checked."""


class Unsupported(BadInput):
    """A taskset that cannot run in this process."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"cannot be run here: {reason}", value=f"verifiers:{name}")


def prepare_library() -> None:
    """Prepare the library for many episodes on one event loop."""
    verifiers("utils.version").verifiers_commit()  # runs git once, before the first episodes
    logging.getLogger("verifiers").setLevel(logging.WARNING)  # the library logs every episode
    for field in verifiers("graph").MessageNode.model_fields.values():
        if field.default_factory is list:  # pydantic inspects its signature for every message: half of the cost
            field.default_factory = lambda: []


def load_env(name: str, config: dict[str, Any], env: dict[str, Any]) -> Any:
    """Return the environment of a taskset with its settings, `config`, and those of environment and agents, `env`."""
    loaders = verifiers("utils.loaders")
    taskset_id = _plugin_name(name, verifiers().Taskset, None)
    environment_id = _plugin_name(env["id"], verifiers().Env, "args.env.id") if env.get("id") else ""
    try:
        taskset = loaders.taskset_class(taskset_id)
        kind = loaders.environment_class(taskset_id, environment_id)
    except ModuleNotFoundError as error:
        raise BadInput(f"cannot be imported: {error.__cause__ or error}", value=f"verifiers:{name}") from error
    except (AttributeError, TypeError, ValueError) as error:  # it exports no class, or several
        raise BadInput(f"cannot be loaded: {error}", value=f"verifiers:{name}") from error
    if loaders.default_harness_id(taskset_id) != OWN_DEFAULT:
        raise Unsupported(name, "it has its own harness, which is another program")
    rows = validate_config(loaders.taskset_config_type(taskset_id), config, {"id": taskset_id}, "")
    fixed = {"id": environment_id, "taskset": rows, "interception": {"type": "server"}}  # no server is started
    settings = {key: value for key, value in env.items() if key != "id"}
    env_config = validate_config(loaders.env_config_type(taskset_id, environment_id), settings, fixed, "env.")
    _check_toolsets(name, taskset.toolsets(rows))
    _check_toolsets(name, taskset.task_type().toolsets(rows.task))
    if taskset.task_type().NEEDS_CONTAINER:
        raise Unsupported(name, "its tasks need a container")
    config_here = _run_agents_in_process(name, env_config)
    try:
        environment = kind(config_here)
    except (TypeError, ValueError) as error:
        if not kind.__module__.startswith("verifiers."):
            raise
        raise Unsupported(name, str(error)) from error  # shipped environments check the needs of their agents
    make_agents = environment._episode_agents

    def episode_agents(*args: Any) -> Any:
        """Make an episode's agents with toolsets in this process, also for tasks that the environment generates."""
        agents = make_agents(*args)
        for agent in agents._agents.values():
            agent._rollout_params = functools.partial(_use_local_toolsets, name, agent._rollout_params)
        return agents

    environment._episode_agents = episode_agents
    return environment


def check_task(name: str, task: Any) -> None:
    """Refuse a task that needs more than a directory of its own."""
    data = task.data
    for need, is_needed in (
        (f"the image {data.image!r}", data.image is not None),
        (f"the user {data.agent_user!r}", data.agent_user is not None),
        ("skills, which only a separate program can use", bool(data.skills)),
        ("a network of its own", "*" not in data.network_allow or bool(data.network_block)),
        ("a GPU", data.resources.gpu is not None),
    ):
        if is_needed:
            raise Unsupported(name, f"task {data.idx} needs {need}")


def _plugin_name(name: str, base: type, key: str | None) -> str:
    """Return the name under which verifiers finds a plugin. It must have one part: others get an alias."""
    module, _, member = name.partition(":")
    alias = f"headrace_{name.replace('.', '_').replace(':', '_').lower()}"
    if member:
        plugin = imports.load(name, key)
        if not (isinstance(plugin, type) and issubclass(plugin, base)):
            raise BadInput(f"not a {base.__name__} of verifiers, but {plugin!r:.80}", key=key, value=name)
        register_plugin(alias, plugin)
        return alias
    if "." in module.partition("@")[0]:  # without a version: NAME@VERSION
        try:
            sys.modules[alias] = importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise BadInput(f"cannot be imported: {error}", key=key, value=name) from error
        return alias
    return name


def validate_config(kind: Any, settings: dict[str, Any], fixed: dict[str, Any], prefix: str) -> Any:
    """Return a validated config of verifiers from settings and fixed values; errors name the arguments."""
    from pydantic import ValidationError

    fields = [field for field in kind.model_fields if field not in fixed]
    fix = f"Known arguments: {', '.join(prefix + key for key in fields)}."
    if unknown := [(prefix + key, value) for key, value in settings.items() if key not in fields]:
        raise BadArgument.combine([BadArgument("unknown argument", key=k, value=v, fix=fix) for k, v in unknown])
    try:
        return kind.model_validate({**settings, **fixed})
    except ValidationError as error:
        problems = [
            BadArgument(entry["msg"], key=prefix + ".".join(map(str, entry["loc"])), value=entry["input"])
            for entry in error.errors(include_url=False)
        ]
        raise BadArgument.combine(problems) from error


def _run_agents_in_process(name: str, config: Any) -> Any:
    """Return the config with our harness and no sandbox for every agent; refuse agents that need more."""
    vf = verifiers()
    agents = verifiers("configs.agent").agent_config_fields(config)
    for agent, spec in agents.items():
        sampling = {} if spec.sampling is None else spec.sampling.model_dump(exclude_unset=True)
        if spec.harness is not None and spec.harness.id not in REPLACED:
            raise Unsupported(name, f"agent {agent} needs the harness {spec.harness.id!r}, which is another program")
        if "runtime" in spec.model_fields_set and spec.runtime.type != "subprocess":
            raise Unsupported(name, f"agent {agent} needs a runtime of type {spec.runtime.type!r}")
        if spec.model is not None or spec.client is not None:
            raise Unsupported(name, f"agent {agent} sets a model; the policy plays all agents")
        if set(sampling) - {"max_tokens"}:
            keys = ", ".join(sorted(set(sampling) - {"max_tokens"}))
            raise Unsupported(name, f"agent {agent} sets sampling ({keys}), which the run file does")
    here = {"harness": harness_config(), "runtime": vf.SubprocessConfig()}
    return config.model_copy(update={agent: spec.model_copy(update=here) for agent, spec in agents.items()})


def _check_toolsets(name: str, toolsets: Iterable[Any]) -> None:
    """Raise `Unsupported` for a toolset that needs a server or a container."""
    for toolset in toolsets:
        config, kind = toolset.config, type(toolset).__name__
        if getattr(config, "url", None):
            raise Unsupported(name, f"toolset {kind} is served elsewhere ({config.url})")
        if config.runtime.type != "subprocess":
            raise Unsupported(name, f"toolset {kind} needs a runtime of type {config.runtime.type!r}")


def _use_local_toolsets(name: str, parameters: Any, task: Any, *args: Any) -> Any:
    """Return the parameters of a run, after replacing the toolsets of its task by ones in this process."""
    if "toolsets" not in vars(task):
        make = type(task).toolsets

        def toolsets(config: Any) -> list[Any]:
            made = make(config)
            _check_toolsets(name, made)
            return [set_address(toolset) for toolset in made]

        task.toolsets = toolsets
    return parameters(task, *args)


@functools.cache
def harness_config() -> Any:
    """Register the harness that replaces that of every agent, and return its config."""
    vf = verifiers()
    can = ("APPENDS_SYSTEM_PROMPT", "SUPPORTS_MCP", "SUPPORTS_TOOL_INTERCEPTION", "SUPPORTS_RESUME")
    traits = {**dict.fromkeys(can, True), "EXECUTES_CODE": False, "NEEDS_CONTAINER": False}
    members = {"__doc__": "A chat loop in this process.", "__module__": HARNESS, "session": _session, "launch": _launch}
    register_plugin(HARNESS, type("InProcess", (vf.Harness,), {**members, **traits}))
    return vf.HarnessConfig(id=HARNESS)


def register_plugin(name: str, plugin: type) -> None:
    """Make verifiers find a class under a module name."""
    module: Any = ModuleType(name)
    setattr(module, plugin.__name__, plugin)
    module.__all__ = [plugin.__name__]
    sys.modules[name] = module


async def _session(self: Any, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str],
                   data: Any, tool_interception_url: str | None = None) -> Any:  # fmt: skip
    """Open the tools in the setup of a run, under its time limit, before the first turn."""
    seat = EPISODE.get().by_trace[trace.id]
    if mcp_urls:
        seat.tools = await Tools.open(mcp_urls, trace, seat.stack)
    base = verifiers().Harness.session
    return await base(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url)


async def _launch(self: Any, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str],
                  data: Any, tool_interception_url: str | None = None) -> Any:  # fmt: skip
    """Run one segment: the prompt of `data` is the conversation so far. With a URL, tool calls are gated."""
    vf = verifiers()
    system, prompt = self.resolve_prompt(data)
    messages = [vf.SystemMessage(content=system)] if system is not None else []
    messages += [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []
    seat = EPISODE.get().by_trace[trace.id]
    done = vf.ProgramResult(exit_code=0, stdout="", stderr="")
    while (reply := await seat.sample(messages)) is not None and reply.calls:
        messages.append(reply.message)
        for call in reply.calls:
            if (result := await seat.run(call, gated=tool_interception_url is not None)) is None:
                return done
            messages.append(result)
    return done


POLICY = "policy"
"""The agent of a rollout in an environment with one agent."""
REGULAR_STOPS = ("agent_completed", "user_closed")
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
        prepare_library()
        self._name = name
        self._gold = gold
        self._env = load_env(name, config, env or {})
        selection = validate_config(verifiers().SelectConfig, select or {}, {}, "select.")
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
            address = set_address(toolset).config.url
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
                check_task(self._name, task)
            self._by_key = {task.key: task for task in self._listed}

    def _task(self, key: str) -> Any:
        """Return a task by its key. A task has methods besides its data, so a worker process loads the taskset, too."""
        self._load_tasks()
        if key not in self._by_key:
            text = f"verifiers:{self._name} has no task {key} here: it must list the same ones every time"
            raise EpisodeError("unknown_task", text)
        return self._by_key[key]


def rollouts_of(episode: Any, seats: Seats, single_agent: bool) -> list[Rollout]:
    """Return one rollout per trace. An error of the episode fails all; an error of a trace only that rollout.

    An episode with a single trace fails with it.
    """
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
    if trace.stop_condition not in REGULAR_STOPS:
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
        messages=[seat.to_wire(message) for message in trace.messages] if seat is not None else [],
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
