"""A worker process: it loads one environment and runs its episodes, as many at once as the pool asks for.

`python -m headrace.environments.worker CHANNEL LIFELINE` takes two inherited descriptors: the socket on which the pool
speaks, and the read end of a pipe to which nobody writes. It samples nothing itself: `chat` is a call to the parent.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from headrace.environments.base import ChatFailed, Environment, EpisodeError, Reply
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
from headrace.environments.registry import load_environment
from headrace.observe.logs import setup_logging
from headrace.rollout.types import Message, Rollout

FRAMES = 30
"""The innermost frames of a traceback that are sent; a runaway recursion has thousands."""


class Worker:
    """The environment, its jobs, and their calls to the model that wait for an answer."""

    def __init__(self) -> None:
        self.channel = Channel(ToWorker, self._receive, self._parent_left)
        self.calls: dict[int, asyncio.Future[Reply]] = {}
        self.call_numbers = itertools.count()
        self._jobs: dict[int, asyncio.Task[None]] = {}
        self._environment: Environment
        self._loading: asyncio.Task[None] | None = None
        self._end: asyncio.Future[int]

    async def serve(self, end: socket.socket) -> int:
        """Work until the parent closes the channel; returns the exit status. What still runs then is cancelled."""
        self._end = asyncio.get_running_loop().create_future()
        await self.channel.open(end)
        status = await self._end
        if status == 0 and self._loading is not None and self._loading.done():
            await self._close()
        return status

    async def _close(self) -> None:
        """Let the episodes end, and then the environment; the parent waits for a while."""
        for job in self._jobs.values():
            job.cancel()
        await asyncio.gather(*self._jobs.values(), return_exceptions=True)
        await self._environment.close()

    def _parent_left(self) -> None:
        if not self._end.done():
            self._end.set_result(0)

    def _receive(self, message: ToWorker) -> None:
        match message:
            case Load():
                self._loading = asyncio.create_task(self._load(message))
            case Run(job, task):
                self._begin(job, partial(self._environment.run, task, Line(self, job)))
            case Score(job, rollouts):
                self._begin(job, partial(self._score, rollouts))
            case Cancel(job):
                if job in self._jobs:  # else its result is on the way
                    self._jobs[job].cancel()
            case Answer(call, reply):
                if self._awaited(call):
                    self.calls[call].set_result(reply)
            case NoAnswer(call, kind, text):
                if self._awaited(call):
                    self.calls[call].set_exception(ChatFailed(call, kind, text))

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
            self.channel.send(Refused(*_text_and_traceback(error)))
            self._end.set_result(1)
        else:
            self.channel.send(Ready())

    def _begin(self, job: int, work: Callable[[], Awaitable[Any]]) -> None:
        task = self._jobs[job] = asyncio.create_task(self._work(job, work))
        task.add_done_callback(partial(self._ended, job))

    async def _work(self, job: int, work: Callable[[], Awaitable[Any]]) -> None:
        try:
            outcome: Result | Failed = Result(job, msgspec.Raw(encode(await work())))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # sys.exit() in a checker costs its episode, not the worker
            outcome = _failure(job, error)
        self.channel.send(outcome)

    def _ended(self, job: int, task: asyncio.Task[None]) -> None:
        del self._jobs[job]
        if task.cancelled():  # perhaps before its first step; the parent reads the words only if it did not ask for it
            self.channel.send(Failed(job, "environment", "CancelledError: the environment cancelled its own episode"))

    async def _score(self, rollouts: list[Rollout]) -> list[Scores]:
        await self._environment.score_group(rollouts)
        return [Scores(rollout.rewards, rollout.metrics) for rollout in rollouts]


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
    if isinstance(error, EpisodeError):
        return Failed(job, error.reason, printable(str(error)))
    text, trace = _text_and_traceback(error)
    frame = traceback.extract_tb(error.__traceback__, limit=-1)[0]
    place = f"{type(error).__name__} {frame.filename}:{frame.lineno}"
    return Failed(job, "environment", text, place, trace, error.call if isinstance(error, ChatFailed) else None)


def _text_and_traceback(error: BaseException) -> tuple[str, str]:
    """Also of an exception whose own `__str__` raises."""
    summary = traceback.TracebackException.from_exception(error, limit=-FRAMES)
    return printable(f"{type(error).__name__}: {summary}"), printable("".join(summary.format()))


def end_with_parent(lifeline: int) -> None:
    """Have the kernel end this process group when the parent's end of the pipe closes.

    A thread that waits for it could not run while C code (a regular expression, a huge power) holds the interpreter.
    """
    if sys.platform == "linux":
        signal.signal(signal.SIGIO, signal.SIG_DFL)  # ends the process
    else:  # where the default is to ignore it
        signal.signal(signal.SIGIO, lambda number, frame: os._exit(1))
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # it was closed before we asked
        os._exit(1)


def main() -> int:
    channel, lifeline = int(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    for descriptor in (channel, lifeline):
        os.set_inheritable(descriptor, False)  # what the environment starts must not hold them open
    end_with_parent(lifeline)
    setup_logging()
    return asyncio.run(Worker().serve(socket.socket(fileno=channel)))


if __name__ == "__main__":
    sys.exit(main())
