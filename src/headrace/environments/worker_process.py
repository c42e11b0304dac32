"""The parent's side of one worker process: starts it, sends it jobs, and handles its end."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from headrace.environments.base import Context, EpisodeError
from headrace.environments.channel import (
    SCHEMA,
    Cancel,
    CancelChat,
    Channel,
    ChatCall,
    ChatError,
    ChatReply,
    Failed,
    FromWorker,
    Load,
    LoadFailed,
    Ready,
    Result,
    Run,
    Score,
)
from headrace.environments.child_process import describe_exit, kill_group, parent_ends, resident_mb
from headrace.environments.fault import fault_of
from headrace.rollout.types import printable

log = logging.getLogger(__name__)

T = TypeVar("T")


class WorkerLimits(msgspec.Struct, frozen=True):
    """When a worker is replaced, and its timeouts in seconds."""

    recycle_after: int = 10_000
    """Episodes."""
    max_memory_mb: float | None = None
    """Resident memory, checked after each episode."""
    grace: float = 10.0
    """Seconds to stop a cancelled episode, or to end when the channel closes, before the worker is killed."""
    start_timeout: float = 300.0
    """Seconds to load the environment."""


class Job:
    """A request to a worker: the episode's context, and the outcome."""

    def __init__(self, context: Context | None) -> None:
        self.context = context
        self.outcome: asyncio.Future[Result | Failed] = asyncio.get_running_loop().create_future()
        self.chats: dict[int, asyncio.Task[None]] = {}
        self.chat_errors: dict[int, BaseException] = {}

    def end(self, outcome: Result | Failed) -> None:
        if not self.outcome.done():  # else it was cancelled
            self.outcome.set_result(outcome)


class WorkerProcess:
    """One process, from its start to its end. `left` is set when it takes no more jobs, for any reason."""

    def __init__(self, identifier: str, args: dict[str, Any], limits: WorkerLimits) -> None:
        self.jobs: dict[int, Job] = {}
        self.ready = False
        self.retired = False
        self.left = asyncio.Event()
        self.ended = False
        self.finished = 0
        """Jobs that have ended regularly."""
        self.cause = ""
        """How or why it ended, such as "was ended by SIGKILL"."""
        self.refusal = ""
        """The traceback of an environment that cannot be loaded in the worker."""
        self._identifier = identifier
        self._args = args
        self._limits = limits
        self._numbers = itertools.count()
        self._taken = 0
        self._loaded = asyncio.Event()
        self._lost = asyncio.Event()
        self._closing = False
        self._channel = Channel(FromWorker, self._receive, self._connection_lost)
        self._following: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process
        self._lifeline: int

    async def start(self) -> None:
        """Start it and wait until it is ready, or has ended and `cause` is set."""
        try:
            await self._spawn()
        except Exception as error:  # no memory, descriptors or threads left: may succeed later
            self.cause = f"could not be started: {type(error).__name__}: {error}"
            self.ended = True
            self.left.set()
            return
        self._following = asyncio.create_task(self._follow())
        self._channel.send(Load(SCHEMA, self._identifier, self._args, sys.path))
        try:
            async with asyncio.timeout(self._limits.start_timeout):
                await self._loaded.wait()
        except TimeoutError:
            self._kill(f"did not load the environment within {self._limits.start_timeout:g} s")
        if not self.ready:
            await asyncio.shield(self._following)

    async def ask(
        self,
        request: Callable[[int], Run | Score],
        result: msgspec.msgpack.Decoder[T],
        context: Context | None = None,
    ) -> T:
        """Run one job and return its decoded result. Cancelling this cancels the job."""
        number, job = next(self._numbers), Job(context)
        self._channel.send(request(number))
        self.jobs[number] = job
        self._taken += 1
        if self._taken >= self._limits.recycle_after:
            self.retire()
        try:
            outcome = await job.outcome
        except asyncio.CancelledError:
            if number in self.jobs:
                self._channel.send(Cancel(number))
                asyncio.get_running_loop().call_later(self._limits.grace, self._kill_if_running, number)
            raise
        finally:
            for chat in job.chats.values():
                chat.cancel()
        if isinstance(outcome, Result):
            try:
                return result.decode(outcome.value)
            except msgspec.DecodeError as error:  # such as a text in place of a number
                text = f"the environment's result is malformed: {error}"
                raise EpisodeError("environment", text, place=text) from error
        if outcome.call in job.chat_errors:
            raise job.chat_errors[outcome.call]
        raise EpisodeError(outcome.reason, outcome.text, place=outcome.place, remote_traceback=outcome.traceback)

    def retire(self) -> None:
        """Take no more jobs, finish the current ones, and end."""
        self.retired = True
        self.ready = False
        self.left.set()
        self._close_if_drained()

    async def close(self) -> None:
        """End it, even while jobs run."""
        if self._following is not None:
            self._closing = True
            self._channel.close()
            await self._following

    async def _spawn(self) -> None:
        with parent_ends() as (ours, self._lifeline, descriptors):
            await self._channel.open(ours)
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "headrace.environments.worker", *map(str, descriptors)),
                    pass_fds=descriptors,
                    stdin=asyncio.subprocess.DEVNULL,
                    start_new_session=True,  # so that it can be killed with all that it has started
                )
            except BaseException:
                self._channel.abort()
                raise

    async def _follow(self) -> None:
        """Wait for its end and clean up."""
        exited, lost = asyncio.ensure_future(self._process.wait()), asyncio.ensure_future(self._lost.wait())
        await asyncio.wait({exited, lost}, return_when=asyncio.FIRST_COMPLETED)
        self.ready = False
        if not exited.done():
            await asyncio.wait({exited}, timeout=self._limits.grace)
        self._kill("" if exited.done() else f"did not end within {self._limits.grace:g} s")
        status = await exited
        await asyncio.wait({lost}, timeout=self._limits.grace)  # its last messages may still arrive
        self._channel.abort()
        os.close(self._lifeline)
        self._fail_jobs(status)

    def _fail_jobs(self, status: int) -> None:
        if not self._closing or status != 0:
            self.cause = self.cause or describe_exit(status)
            log.warning("a worker of %s %s; %d episodes failed with it", self._identifier, self.cause, len(self.jobs))
        for number, job in self.jobs.items():
            job.end(Failed(number, "worker", f"the worker process {self.cause or 'was closed'}"))
        self.jobs.clear()
        self.ended = True
        self.left.set()
        self._loaded.set()

    def _receive(self, message: FromWorker) -> None:
        match message:
            case Ready():
                self.ready = not self.cause
                self._loaded.set()
            case LoadFailed():
                self.cause, self.refusal = f"cannot load the environment: {message.text}", message.traceback
                self._channel.close()  # it has `grace` seconds to close what it had opened
            case ChatCall():
                self._start_chat(message)
            case CancelChat(job, call):
                if job in self.jobs and call in self.jobs[job].chats:
                    self.jobs[job].chats[call].cancel()
            case Result(job) | Failed(job):
                self._finish(job, message)

    def _finish(self, number: int, outcome: Result | Failed) -> None:
        job = self.jobs.pop(number, None)
        if job is not None:  # else it has already failed because of a message that could not be decoded
            job.end(outcome)
            self.finished += 1
            limit = self._limits.max_memory_mb
            if limit is not None and not self.retired and resident_mb(self._process.pid) > limit:
                log.info("a worker of %s has grown beyond %g MB and is replaced", self._identifier, limit)
                self.retire()
            self._close_if_drained()

    def _start_chat(self, message: ChatCall) -> None:
        job = self.jobs.get(message.job)
        if job is None or job.context is None or job.outcome.done():
            self._channel.send(ChatError(message.call, "CancelledError", "the episode has ended"))
            return
        chat = job.chats[message.call] = asyncio.create_task(self._chat(job, job.context, message))
        chat.add_done_callback(lambda _: job.chats.pop(message.call))

    async def _chat(self, job: Job, context: Context, message: ChatCall) -> None:
        """Call the model; keep the original exception in case the environment re-raises it."""
        try:
            reply = await context.chat(message.messages, message.tools, message.max_tokens)
            self._channel.send(ChatReply(message.call, reply))
        except (Exception, asyncio.CancelledError) as error:
            job.chat_errors[message.call] = error
            fault = fault_of(error)
            reason = printable(str(error.reason)) if isinstance(error, EpisodeError) else None
            self._channel.send(ChatError(message.call, fault.kind, fault.message, reason))

    def _kill_if_running(self, number: int) -> None:
        if number in self.jobs:
            self._kill(f"was killed: a cancelled episode did not stop within {self._limits.grace:g} s")

    def _close_if_drained(self) -> None:
        if self.retired and not self.jobs:
            self._closing = True
            self._channel.close()

    def _connection_lost(self) -> None:
        self.ready = False
        self.cause = self.cause or self._channel.cause
        self._lost.set()

    def _kill(self, cause: str) -> None:
        """Kill it and all that it has started."""
        self.ready = False
        self.cause = self.cause or cause
        kill_group(self._process.pid)
