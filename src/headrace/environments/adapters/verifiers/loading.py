"""From a name and settings to an environment of verifiers that runs in this process, or the reason why it cannot."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from functools import partial
from typing import Any

from headrace import imports
from headrace.environments.adapters.verifiers.harness import harness, offer
from headrace.environments.adapters.verifiers.library import verifiers
from headrace.environments.adapters.verifiers.toolsets import bring_here
from headrace.environments.arguments import BadArgument
from headrace.errors import BadInput

REPLACED = ("null",)
"""Harnesses that do what ours does: they talk, and call tools."""
OWN_DEFAULT = "bash"
"""What verifiers gives to agents that ask for no harness. Those that need a shell also need a container, and say so."""


class Unsupported(BadInput):
    """A taskset that needs what this process has not."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"cannot be run here: {reason}", value=f"verifiers:{name}")


def load(name: str, config: dict[str, Any], env: dict[str, Any]) -> Any:
    """The environment of a taskset: `config` is the taskset's, `env` that of its environment and its agents."""
    loaders = verifiers("utils.loaders")
    taskset_id = _found(name, verifiers().Taskset, None)
    environment_id = _found(env["id"], verifiers().Env, "args.env.id") if env.get("id") else ""
    try:
        taskset = loaders.taskset_class(taskset_id)
        kind = loaders.environment_class(taskset_id, environment_id)
    except ModuleNotFoundError as error:
        raise BadInput(f"cannot be imported: {error.__cause__ or error}", value=f"verifiers:{name}") from error
    except (AttributeError, TypeError, ValueError) as error:  # it exports none, or several
        raise BadInput(f"cannot be loaded: {error}", value=f"verifiers:{name}") from error
    if loaders.default_harness_id(taskset_id) != OWN_DEFAULT:
        raise Unsupported(name, "it brings a harness of its own, which is another program")
    rows = checked(loaders.taskset_config_type(taskset_id), config, {"id": taskset_id}, "")
    fixed = {"id": environment_id, "taskset": rows, "interception": {"type": "server"}}  # none is started
    settings = {key: value for key, value in env.items() if key != "id"}
    agreed = checked(loaders.env_config_type(taskset_id, environment_id), settings, fixed, "env.")
    _check_toolsets(name, taskset.toolsets(rows))
    _check_toolsets(name, taskset.task_type().toolsets(rows.task))
    if taskset.task_type().NEEDS_CONTAINER:
        raise Unsupported(name, "its tasks need a container")
    seated = _seated(name, agreed)
    try:
        environment = kind(seated)
    except (TypeError, ValueError) as error:
        if not kind.__module__.startswith("verifiers."):
            raise
        raise Unsupported(name, str(error)) from error  # those that verifiers brings check what their agents need
    environment._episode_agents = partial(_with_toolsets_here, name, environment._episode_agents)
    return environment


def check_task(name: str, task: Any) -> None:
    """Raise for a task that asks for more than a directory of its own."""
    data = task.data
    for wanted, asked in (
        (f"the image {data.image!r}", data.image is not None),
        (f"the user {data.agent_user!r}", data.agent_user is not None),
        ("skills, which only programs of their own can use", bool(data.skills)),
        ("a network of its own", "*" not in data.network_allow or bool(data.network_block)),
        ("a GPU", data.resources.gpu is not None),
    ):
        if asked:
            raise Unsupported(name, f"task {data.idx} needs {wanted}")


def _found(name: str, base: type, key: str | None) -> str:
    """The name under which verifiers finds a plugin. Its own are of one part: others are offered under such a name."""
    module, _, member = name.partition(":")
    alias = f"headrace_{name.replace('.', '_').replace(':', '_').lower()}"
    if member:
        plugin = imports.load(name, key)
        if not (isinstance(plugin, type) and issubclass(plugin, base)):
            raise BadInput(f"not a {base.__name__} of verifiers, but {plugin!r:.80}", key=key, value=name)
        offer(alias, plugin)
        return alias
    if "." in module.partition("@")[0]:  # what follows is a version
        try:
            sys.modules[alias] = importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise BadInput(f"cannot be imported: {error}", key=key, value=name) from error
        return alias
    return name


def checked(kind: Any, given: dict[str, Any], fixed: dict[str, Any], prefix: str) -> Any:
    """A config of verifiers, or what is wrong with it by the name of each argument."""
    from pydantic import ValidationError

    known = [field for field in kind.model_fields if field not in fixed]
    fix = f"Known arguments: {', '.join(prefix + key for key in known)}."
    unknown = [
        BadArgument("unknown argument", key=prefix + key, value=value, fix=fix)
        for key, value in given.items()
        if key not in known
    ]
    if unknown:
        raise BadArgument.combine(unknown)
    try:
        return kind.model_validate({**given, **fixed})
    except ValidationError as error:
        problems = [
            BadArgument(entry["msg"], key=prefix + ".".join(map(str, entry["loc"])), value=entry["input"])
            for entry in error.errors(include_url=False)
        ]
        raise BadArgument.combine(problems) from error


def _seated(name: str, config: Any) -> Any:
    """The config with our harness and no sandbox for every agent; what an agent asks for beyond that is refused."""
    vf = verifiers()
    agents = verifiers("configs.agent").agent_config_fields(config)
    for agent, spec in agents.items():
        sampling = {} if spec.sampling is None else spec.sampling.model_dump(exclude_unset=True)
        if spec.harness is not None and spec.harness.id not in REPLACED:
            raise Unsupported(name, f"agent {agent} needs the harness {spec.harness.id!r}, which is another program")
        if "runtime" in spec.model_fields_set and spec.runtime.type != "subprocess":
            raise Unsupported(name, f"agent {agent} needs a runtime of type {spec.runtime.type!r}")
        if spec.model is not None or spec.client is not None:
            raise Unsupported(name, f"agent {agent} has a model of its own; all agents are played by the policy")
        if set(sampling) - {"max_tokens"}:
            told = ", ".join(sorted(set(sampling) - {"max_tokens"}))
            raise Unsupported(name, f"agent {agent} has sampling of its own ({told}): the run file says how to sample")
    here = {"harness": harness(), "runtime": vf.SubprocessConfig()}
    return config.model_copy(update={agent: spec.model_copy(update=here) for agent, spec in agents.items()})


def _check_toolsets(name: str, toolsets: Iterable[Any]) -> None:
    for toolset in toolsets:
        config, called = toolset.config, type(toolset).__name__
        if getattr(config, "url", None):
            raise Unsupported(name, f"toolset {called} is served elsewhere ({config.url})")
        if config.runtime.type != "subprocess":
            raise Unsupported(name, f"toolset {called} needs a runtime of type {config.runtime.type!r}")


def _with_toolsets_here(name: str, make: Any, *args: Any) -> Any:
    """An episode's agents; their toolsets are in this process, also for tasks that the environment makes up itself."""
    agents = make(*args)
    for agent in agents._agents.values():
        agent._rollout_params = partial(_bring_toolsets, name, agent._rollout_params)
    return agents


def _bring_toolsets(name: str, parameters: Any, task: Any, *args: Any) -> Any:
    if "toolsets" not in vars(task):
        task.toolsets = partial(_toolsets_here, name, type(task).toolsets)
    return parameters(task, *args)


def _toolsets_here(name: str, toolsets: Any, config: Any) -> list[Any]:
    made = toolsets(config)
    _check_toolsets(name, made)
    return [bring_here(toolset) for toolset in made]
