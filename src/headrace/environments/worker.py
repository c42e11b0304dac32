"""A worker process: it loads one environment and runs its episodes, as many at once as the pool asks for.

`python -m headrace.environments.worker CHANNEL LIFELINE` takes two inherited descriptors: the socket on which the pool
speaks, and the read end of a pipe to which nobody writes. It samples nothing itself: `chat` is a call to the parent.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from headrace.environments.base import ChatFailed, Environment, EpisodeError, PromptTooLong, Reply
from headrace.environments.channel import (
    SCHEMA,
    Answer,
    Cancel,
    Channel,
    Chat,
    Failed,
    HangUp,
    Load,
    NoAnswer,
    Ready,
    Refused,
    Result,
    Run,
    Score,
    Scores,
    ToWorker,
    encode,
    printable,
)
from headrace.environments.child import parents_end
from headrace.environments.fault import CANCELLED_ITSELF, fault_of
from headrace.environments.registry import load_environment
from headrace.observe.logs import setup_logging
from headrace.rollout.checks import checked_rollouts, normalize_fields
from headrace.rollout.types import Message, Rollout, Task

log = logging.getLogger(__name__)


class Worker:
    """The environment, its jobs, and their calls to the model that wait for an answer."""

    def __init__(self) -> None:
        self.channel = Channel(ToWorker, self._receive, self._parent_left)
        self.calls: dict[int, asyncio.Future[Reply]] = {}
        self.call_numbers = itertools.count()
        self._jobs: dict[int, asyncio.Task[None]] = {}
        self._environment: Environment | None = None
        self._loading: asyncio.Task[None] | None = None
        self._end: asyncio.Future[int]

    async def serve(self, end: socket.socket) -> int:
        """Work until the parent closes the channel; returns the exit status. What still runs then is cancelled."""
        self._end = asyncio.get_running_loop().create_future()
        await self.channel.open(end)
        status = await self._end
        await self._close()
        return status

    async def _close(self) -> None:
        """Let what runs end, and then the environment, be it half started; the parent waits for a while."""
        running = [*self._jobs.values(), *([self._loading] if self._loading is not None else [])]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if self._environment is not None:
            await self._environment.close()

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
            case Run(job, task):
                self._begin(job, partial(self._run, task, Line(self, job)))
            case Score(job, rollouts):
                self._begin(job, partial(self._score, rollouts))
            case Cancel(job):
                if job in self._jobs:  # else its result is on the way
                    self._jobs[job].cancel()
            case Answer(call, reply):
                if self._awaited(call):
                    self.calls[call].set_result(reply)
            case NoAnswer(call):
                if self._awaited(call):
                    self.calls[call].set_exception(_chat_error(message))
            case Failed():
                self.channel.send(message)

    def _awaited(self, call: int) -> bool:
        """Whether the environment has not hung up."""
        return call in self.calls and not self.calls[call].done()

    async def _load(self, message: Load) -> None:
        sys.path[:] = message.module_path
        try:
            if message.schema != SCHEMA:
                raise RuntimeError(f"the pool speaks schema {message.schema}, this worker {SCHEMA}: restart the run")
            self._environment = load_environment(message.identifier, message.args)
            await self._environment.start()
        except BaseException as error:  # whatever it is, sys.exit() included, the parent has to hear of it
            fault = fault_of(error)
            self.channel.send(Refused(fault.text, fault.traceback))
            self._stop(1)
        else:
            self.channel.send(Ready())

    def _begin(self, job: int, work: Callable[[], Awaitable[Any]]) -> None:
        task = self._jobs[job] = asyncio.create_task(self._work(job, work))
        task.add_done_callback(partial(self._ended, job))

    async def _work(self, job: int, work: Callable[[], Awaitable[Any]]) -> None:
        try:
            self.channel.send(Result(job, msgspec.Raw(encode(await work()))))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # sys.exit() in a checker costs its episode, not the worker
            self.channel.send(_failure(job, error))

    def _ended(self, job: int, task: asyncio.Task[None]) -> None:
        del self._jobs[job]
        if task.cancelled():  # perhaps before its first step; the parent reads the words only if it did not ask for it
            self.channel.send(Failed(job, "environment", CANCELLED_ITSELF))
        elif (error := task.exception()) is not None:  # its failure was too odd to be told in full
            self.channel.send(Failed(job, "environment", fault_of(error).text))

    async def _run(self, task: Task, line: Line) -> list[Rollout]:
        assert self._environment is not None, "the pool asks once it is loaded"
        rollouts = checked_rollouts(await self._environment.run(task, line))
        for rollout in rollouts:
            normalize_fields(rollout)
        return rollouts

    async def _score(self, rollouts: list[Rollout]) -> list[Scores]:
        assert self._environment is not None, "the pool asks once it is loaded"
        await self._environment.score_group(rollouts)
        for rollout in rollouts:
            normalize_fields(rollout)
        return [Scores(rollout.rewards, rollout.metrics, rollout.error) for rollout in rollouts]


class Line:
    """The context of one episode: its calls go through the parent."""

    def __init__(self, worker: Worker, job: int) -> None:
        self._worker = worker
        self._job = job

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), max_tokens: int | None = None
    ) -> Reply:
        call = next(self._worker.call_numbers)
        self._worker.channel.send(Chat(self._job, call, list(messages), list(tools), max_tokens))
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._worker.calls[call] = answer
        try:
            return await answer
        except asyncio.CancelledError:
            self._worker.channel.send(HangUp(self._job, call))
            raise
        finally:
            del self._worker.calls[call]


def _failure(job: int, error: BaseException) -> Failed:
    fault = fault_of(error)
    if isinstance(error, EpisodeError):
        return Failed(job, printable(str(error.reason)), fault.message, call=error.call)
    call = error.call if isinstance(error, ChatFailed) else None
    return Failed(job, "environment", fault.text, fault.place, fault.traceback, call)


def _chat_error(told: NoAnswer) -> Exception:
    """What the environment would have seen in the parent, as far as it may know that."""
    if told.reason is None:
        return ChatFailed(told.call, told.kind, told.text)
    too_long = told.reason == PromptTooLong.REASON
    error = PromptTooLong(told.text) if too_long else EpisodeError(told.reason, told.text)
    error.call = told.call
    return error


def main() -> int:
    end = parents_end()
    setup_logging()
    return asyncio.run(Worker().serve(end))


if __name__ == "__main__":
    sys.exit(main())
