"""A worker process: loads one environment and runs its episodes concurrently.

`python -m headrace.environments.worker CHANNEL LIFELINE` takes the two descriptors of `child_process.py`. It samples
nothing itself: `chat` is a call to the parent.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.environments.base import ChatFailed, Environment, EpisodeError, PromptTooLong, Reply
from headrace.environments.channel import Call, Cancel, Channel, Failed, Result, encode, make_decoder
from headrace.environments.child_process import connect_to_parent
from headrace.environments.registry import load_environment
from headrace.inference.schema import StructuredOutputs
from headrace.observe.status import setup_logging
from headrace.rollout.checks import checked_rollouts, normalize_fields
from headrace.rollout.types import Message, Rollout, RolloutError, Task

log = logging.getLogger(__name__)

SCHEMA = 3

_load_arguments = make_decoder(tuple[int, str, dict[str, Any], list[str]])
_run_arguments = make_decoder(tuple[Task])
_score_arguments = make_decoder(tuple[list[Rollout]])
_replies = make_decoder(Reply)


class Scores(msgspec.Struct, array_like=True):
    """The fields of one rollout that scoring a group changes."""

    rewards: dict[str, float]
    metrics: dict[str, float]
    error: RolloutError | None


class Worker:
    """The environment and its jobs. The parent calls `load` first, then `run` and `score`."""

    def __init__(self) -> None:
        self.channel = Channel(self._on_parent_lost, self._handle_call)
        self._environment: Environment | None = None
        self._end: asyncio.Future[int]

    async def serve(self, parent: socket.socket) -> int:
        """Work until the parent closes the channel, then cancel what still runs and return the exit status."""
        self._end = asyncio.get_running_loop().create_future()
        await self.channel.open(parent)
        status = await self._end
        running = list(self.channel.served.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if self._environment is not None:  # `start` may have failed or been cancelled
            await self._environment.close()
        return status

    def _on_parent_lost(self) -> None:
        if self.channel.cause:
            log.error("the parent %s; this worker ends", self.channel.cause)
        self._end.set_result(1 if self.channel.cause else 0)

    async def _handle_call(self, call: Call) -> list[Rollout] | list[Scores] | None:
        """Execute a call of the parent: `load`, `run` or `score`."""
        if call.method == "load":
            schema, identifier, args, module_path = _load_arguments.decode(call.arguments)
            sys.path[:] = module_path
            if schema != SCHEMA:
                raise RuntimeError(f"the pool uses schema {schema}, this worker {SCHEMA}: restart the run")
            self._environment = load_environment(identifier, args)
            await self._environment.start()
            return None
        assert self._environment is not None, "the pool sends jobs once it is loaded"
        if call.method == "run":
            [task] = _run_arguments.decode(call.arguments)
            rollouts = checked_rollouts(await self._environment.run(task, WorkerContext(self.channel, call.number)))
        else:
            [rollouts] = _score_arguments.decode(call.arguments)
            await self._environment.score_group(rollouts)
        for rollout in rollouts:
            normalize_fields(rollout)
        if call.method == "run":
            return rollouts
        return [Scores(rollout.rewards, rollout.metrics, rollout.error) for rollout in rollouts]


class WorkerContext:
    """The context of one episode: its calls go through the parent."""

    def __init__(self, channel: Channel, job: int) -> None:
        self._channel = channel
        self._job = job

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        max_tokens: int | None = None,
        structured_outputs: StructuredOutputs | None = None,
    ) -> Reply:
        arguments = encode((self._job, list(messages), list(tools), max_tokens, structured_outputs))
        number, outcome = self._channel.call("chat", arguments)
        try:
            reply = await outcome
        except asyncio.CancelledError:
            self._channel.send(Cancel(number))
            raise
        if isinstance(reply, Result):
            return _replies.decode(reply.value)  # type: ignore[no-any-return]
        raise _chat_exception(reply)


def _chat_exception(failed: Failed) -> Exception:
    """Return the exception that the environment would see in the parent; other types become `ChatFailed`."""
    if failed.reason is None:
        return ChatFailed(failed.number, failed.fault.kind, failed.fault.message)
    text = failed.fault.message
    error = PromptTooLong(text) if failed.reason == PromptTooLong.REASON else EpisodeError(failed.reason, text)
    error.call = failed.number
    return error


def main() -> int:
    parent = connect_to_parent()
    setup_logging()
    return asyncio.run(Worker().serve(parent))


if __name__ == "__main__":
    sys.exit(main())
