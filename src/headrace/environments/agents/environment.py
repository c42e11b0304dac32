"""An environment whose episodes are run by an existing agent, which calls the policy through OpenAI's API.

Subclass `AgentEnvironment` and implement `tasks`, `act` (run the agent) and `score`; `program.py` does so for agents
named in a run file. All calls of an episode form one rollout: a call that continues an earlier reply continues its
tokens, and a sub-agent with its own prompt becomes its own sample.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, MutableMapping
from typing import Any, NamedTuple

from headrace.environments.agents.episode import Episode
from headrace.environments.agents.proxy import HOST, Proxy
from headrace.environments.base import Context, Environment, EpisodeError
from headrace.environments.fault import fault_of
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
    return Rollout(
        rewards=rewards,
        metrics={
            "turns": len(episode.turns),
            "conversations": len(conversations),
            "tool_calls": episode.calls,
            "crashed": float(crashed),
        },
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
