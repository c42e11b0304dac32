"""An environment whose episodes are an agent's own loop, which asks the policy as it would ask OpenAI.

Subclass `AgentEnvironment` and say what the tasks are (`tasks`), how the agent is run (`act`) and what came of it
(`score`); `program.py` does that for agents that a run file names. All calls of an episode are one rollout: what goes
on from an earlier reply goes on from its tokens, and a sub-agent with a prompt of its own is a sample of its own.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from typing import Any, NamedTuple, NoReturn

from headrace.environments.agents.episode import Episode
from headrace.environments.agents.proxy import HOST, Proxy
from headrace.environments.base import Context, Environment, EpisodeError
from headrace.environments.fault import fault_of
from headrace.rollout.types import Message, Rollout, Task

NO_PROXY = ("no_proxy", "NO_PROXY")
Score = float | Mapping[str, float]


class Endpoint(NamedTuple):
    """Where an agent finds the policy, in the words of OpenAI's client."""

    base_url: str
    api_key: str
    model: str


class AgentCrashed(EpisodeError):
    """An agent that raised, or a program that failed. The message says what, and is not a fault of the environment."""

    def __init__(self, message: str, *, place: str = "", remote_traceback: str = "") -> None:
        super().__init__("agent_crashed", message, place=place, remote_traceback=remote_traceback)


class AgentEnvironment(Environment):
    """`model` is what the agent is told to ask for. An agent that crashes fails its episode, which is not trained on,
    unless `crash_reward` says what that is worth: for agents that crash over what a model writes. With `describe_tools`
    false the policy is not told of the agent's tools, for one that was trained to call them anyway."""

    def __init__(self, model: str = "policy", crash_reward: float | None = None, describe_tools: bool = True) -> None:
        self._proxy = Proxy(model, describe_tools)
        self._crash_reward = crash_reward

    async def act(self, data: dict[str, Any], endpoint: Endpoint) -> Any:
        """Run the agent on a task's data; what it returns is scored. It is cancelled when the episode ends before."""
        raise NotImplementedError

    async def score(self, result: Any, data: dict[str, Any], messages: list[Message]) -> Score:
        """What the agent's result is worth: a number, or numbers by name, which are summed.

        `messages` is the conversation that was answered last.
        """
        raise NotImplementedError

    async def start(self) -> None:
        spare_loopback(os.environ)
        await self._proxy.start()

    async def close(self) -> None:
        await self._proxy.close()

    async def run(self, task: Task, context: Context) -> list[Rollout]:
        with self._proxy.episode(context) as episode:
            try:
                result = await self._play(task.data, episode)
            except AgentCrashed as error:
                rewards = self._rewards_of_crash(error, episode)
                return [_rollout(episode, rewards, crashed=True)]
        if not episode.turns:
            raise EpisodeError("no_calls", "the agent ended without asking the model: it must use the base_url given")
        score = await self.score(result, task.data, episode.transcript.conversations[-1])
        return [_rollout(episode, dict(score) if isinstance(score, Mapping) else {"reward": score})]

    async def _play(self, data: dict[str, Any], episode: Episode) -> Any:
        """The agent's result; `AgentCrashed` for what it raised, the original of what the model's line raised."""
        endpoint = Endpoint(self._proxy.url(episode), episode.token, self._proxy.model)
        playing = asyncio.ensure_future(self._act(data, endpoint))
        failing = asyncio.ensure_future(episode.failed.wait())
        try:
            await asyncio.wait({playing, failing}, return_when=asyncio.FIRST_COMPLETED)
            if episode.failure is not None:
                raise episode.failure
            return playing.result()()
        finally:
            failing.cancel()
            playing.cancel()
            await asyncio.wait({playing})

    async def _act(self, data: dict[str, Any], endpoint: Endpoint) -> Callable[[], Any]:
        """What gives the agent's result, or raises: sys.exit() in a task of its own would end the process."""
        try:
            result = await self.act(data, endpoint)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return partial(_raise, error)
        return lambda: result

    def _rewards_of_crash(self, error: AgentCrashed, episode: Episode) -> dict[str, float]:
        if self._crash_reward is not None and episode.turns:
            return {"crashed": self._crash_reward}
        if episode.overflow is not None:
            raise EpisodeError("context_full", f"{episode.overflow}; the agent gave up: {error}") from error
        raise error


def _rollout(episode: Episode, rewards: dict[str, float], crashed: bool = False) -> Rollout:
    cut = bool(episode.turns) and episode.turns[-1].finish_reason == "length"
    stop_reason = "context_full" if episode.overflow is not None else "truncated" if cut else ""
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


def _raise(error: BaseException) -> NoReturn:
    if isinstance(error, EpisodeError):
        raise error
    fault = fault_of(error)
    raise AgentCrashed(fault.text, place=fault.place, remote_traceback=fault.traceback) from error


def spare_loopback(variables: MutableMapping[str, str]) -> None:
    """Have HTTP clients that use a proxy by these variables ask this machine directly."""
    for name in NO_PROXY:
        spared = [host for host in variables.get(name, "").split(",") if host]
        if HOST not in spared and "*" not in spared:
            variables[name] = ",".join([*spared, HOST])
