"""A worker process: loads one environment and runs its episodes concurrently.

`python -m headrace.environments.worker CHANNEL LIFELINE` takes the two descriptors of `child_process.py`. It samples
nothing itself: `chat` is a call to the parent.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from headrace.environments.base import ChatFailed, Environment, EpisodeError, PromptTooLong, Reply
from headrace.environments.channel import (
    SCHEMA,
    Cancel,
    CancelChat,
    Channel,
    ChatCall,
    ChatError,
    ChatReply,
    Failed,
    Load,
    LoadFailed,
    Ready,
    Result,
    Run,
    Score,
    Scores,
    ToWorker,
    encode,
)
from headrace.environments.child_process import connect_to_parent
from headrace.environments.fault import CANCELLED_ITSELF, fault_of
from headrace.environments.registry import load_environment
from headrace.observe.logs import setup_logging
from headrace.rollout.checks import checked_rollouts, normalize_fields
from headrace.rollout.types import Message, Rollout, printable

log = logging.getLogger(__name__)


class Worker:
    """The environment, its jobs, and their pending calls to the model."""

    def __init__(self) -> None:
        self.channel = Channel(ToWorker, self._receive, self._parent_left)
        self.calls: dict[int, asyncio.Future[Reply]] = {}
        self.call_numbers = itertools.count()
        self._jobs: dict[int, asyncio.Task[None]] = {}
        self._environment: Environment | None = None
        self._loading: asyncio.Task[None] | None = None
        self._end: asyncio.Future[int]

    async def serve(self, parent: socket.socket) -> int:
        """Work until the parent closes the channel, then cancel what still runs and return the exit status."""
        self._end = asyncio.get_running_loop().create_future()
        await self.channel.open(parent)
        status = await self._end
        running = [*self._jobs.values(), *([self._loading] if self._loading is not None else [])]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if self._environment is not None:  # perhaps half started
            await self._environment.close()
        return status

    def _parent_left(self) -> None:
        if self.channel.cause:
            log.error("the parent %s; this worker ends", self.channel.cause)
        self._stop(1 if self.channel.cause else 0)

    def _stop(self, status: int) -> None:
        if not self._end.done():
            self._end.set_result(status)

    def _receive(self, message: ToWorker) -> None:
        match message:
            case Load():
                self._loading = asyncio.create_task(self._load(message))
            case Run(job) | Score(job):
                task = self._jobs[job] = asyncio.create_task(self._execute(message))
                task.add_done_callback(partial(self._ended, job))
            case Cancel(job):
                if job in self._jobs:  # else its result is on the way
                    self._jobs[job].cancel()
            case ChatReply(call) | ChatError(call):
                future = self.calls.get(call)
                if future is None or future.done():  # the environment has cancelled the call
                    return
                if isinstance(message, ChatReply):
                    future.set_result(message.reply)
                else:
                    future.set_exception(_chat_exception(message))
            case Failed():
                self.channel.send(message)

    async def _load(self, message: Load) -> None:
        sys.path[:] = message.module_path
        try:
            if message.schema != SCHEMA:
                raise RuntimeError(f"the pool uses schema {message.schema}, this worker {SCHEMA}: restart the run")
            self._environment = load_environment(message.identifier, message.args)
            await self._environment.start()
        except BaseException as error:  # sys.exit() included: the parent must be notified
            fault = fault_of(error)
            self.channel.send(LoadFailed(fault.text, fault.traceback))
            self._stop(1)
        else:
            self.channel.send(Ready())

    async def _execute(self, request: Run | Score) -> None:
        """Run an episode or score a group, and send the outcome."""
        assert self._environment is not None, "the pool sends jobs once it is loaded"
        result: list[Rollout] | list[Scores]
        try:
            if isinstance(request, Run):
                context = WorkerContext(self, request.job)
                result = rollouts = checked_rollouts(await self._environment.run(request.task, context))
                for rollout in rollouts:
                    normalize_fields(rollout)
            else:
                await self._environment.score_group(request.rollouts)
                for rollout in request.rollouts:
                    normalize_fields(rollout)
                result = [Scores(rollout.rewards, rollout.metrics, rollout.error) for rollout in request.rollouts]
            self.channel.send(Result(request.job, msgspec.Raw(encode(result))))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # sys.exit() in a checker fails its episode, not the worker
            fault = fault_of(error)
            if isinstance(error, EpisodeError):
                failed = Failed(request.job, printable(str(error.reason)), fault.message, call=error.call)
            else:
                call = error.call if isinstance(error, ChatFailed) else None
                failed = Failed(request.job, "environment", fault.text, fault.place, fault.traceback, call)
            self.channel.send(failed)

    def _ended(self, job: int, task: asyncio.Task[None]) -> None:
        del self._jobs[job]
        if task.cancelled():  # perhaps before its first step; the parent ignores the text of what it cancelled
            self.channel.send(Failed(job, "environment", CANCELLED_ITSELF))
        elif (error := task.exception()) is not None:  # the failure could not be encoded in full
            self.channel.send(Failed(job, "environment", fault_of(error).text))


class WorkerContext:
    """The context of one episode: its calls go through the parent."""

    def __init__(self, worker: Worker, job: int) -> None:
        self._worker = worker
        self._job = job

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), max_tokens: int | None = None
    ) -> Reply:
        call = next(self._worker.call_numbers)
        self._worker.channel.send(ChatCall(self._job, call, list(messages), list(tools), max_tokens))
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._worker.calls[call] = reply
        try:
            return await reply
        except asyncio.CancelledError:
            self._worker.channel.send(CancelChat(self._job, call))
            raise
        finally:
            del self._worker.calls[call]


def _chat_exception(message: ChatError) -> Exception:
    """Return the exception that the environment would see in the parent; other types become `ChatFailed`."""
    if message.reason is None:
        return ChatFailed(message.call, message.kind, message.text)
    is_too_long = message.reason == PromptTooLong.REASON
    error = PromptTooLong(message.text) if is_too_long else EpisodeError(message.reason, message.text)
    error.call = message.call
    return error


def main() -> int:
    parent = connect_to_parent()
    setup_logging()
    return asyncio.run(Worker().serve(parent))


if __name__ == "__main__":
    sys.exit(main())
