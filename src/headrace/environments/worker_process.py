"""The parent's end of one worker process: starting it, asking it, and noticing how it ends."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from headrace.environments.base import Context, EpisodeError
from headrace.environments.channel import (
    SCHEMA,
    Answer,
    Cancel,
    Channel,
    Chat,
    Failed,
    FromWorker,
    HangUp,
    Load,
    NoAnswer,
    Ready,
    Refused,
    Result,
    Run,
    Score,
    printable,
)
from headrace.environments.fault import fault_of

log = logging.getLogger(__name__)

T = TypeVar("T")


class WorkerLimits(msgspec.Struct, frozen=True):
    """When a worker is replaced, and how long it may take over things."""

    recycle_after: int = 10_000
    """Episodes."""
    max_memory_mb: float | None = None
    """Resident memory, looked at after each episode."""
    grace: float = 10.0
    """Seconds to stop a cancelled episode, or to end when told to, before the worker is killed."""
    start_timeout: float = 300.0
    """Seconds to load the environment."""


class Job:
    """What a worker was asked to do: the episode's line to the model, and the outcome."""

    def __init__(self, context: Context | None) -> None:
        self.context = context
        self.outcome: asyncio.Future[Result | Failed] = asyncio.get_running_loop().create_future()
        self.chats: dict[int, asyncio.Task[None]] = {}
        self.chat_errors: dict[int, BaseException] = {}

    def end(self, outcome: Result | Failed) -> None:
        if not self.outcome.done():  # else nobody waits for it any more
            self.outcome.set_result(outcome)

    def drop_chats(self) -> None:
        for chat in self.chats.values():
            chat.cancel()


class WorkerProcess:
    """One process, from its start to its end. `left` is set when it takes no more jobs, for whatever reason."""

    def __init__(self, identifier: str, args: dict[str, Any], limits: WorkerLimits) -> None:
        self.jobs: dict[int, Job] = {}
        self.ready = False
        self.retired = False
        self.left = asyncio.Event()
        self.ended = False
        self.finished = 0
        """Jobs that have ended in order."""
        self.cause = ""
        """How it ended, or why it was ended: "was ended by SIGKILL"."""
        self.refusal = ""
        """The traceback of an environment that cannot be loaded there."""
        self._identifier = identifier
        self._args = args
        self._limits = limits
        self._numbers = itertools.count()
        self._taken = 0
        self._loaded = asyncio.Event()
        self._lost = asyncio.Event()
        self._closing = False
        self._channel = Channel(FromWorker, self._receive, self._lose)
        self._following: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process
        self._lifeline: int

    async def start(self) -> None:
        """Until it is ready, or has ended: then `cause` says how."""
        try:
            await self._spawn()
        except Exception as error:  # no memory, descriptors or threads left: perhaps later
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
        """Have one thing done there. Cancelling this cancels it there."""
        number, job = next(self._numbers), Job(context)
        self._channel.send(request(number))
        self.jobs[number] = job
        self._taken += 1
        if self._taken >= self._limits.recycle_after:
            self.retire()
        try:
            outcome = await job.outcome
        except asyncio.CancelledError:
            self._cancel(number)
            raise
        finally:
            job.drop_chats()
        if isinstance(outcome, Result):
            return _decode(outcome, result)
        if outcome.call in job.chat_errors:
            raise job.chat_errors[outcome.call]
        raise EpisodeError(outcome.reason, outcome.text, place=outcome.place, remote_traceback=outcome.traceback)

    def retire(self) -> None:
        """Take no more jobs, finish those there are, and end."""
        self.retired = True
        self.ready = False
        self.left.set()
        self._close_if_drained()

    async def close(self) -> None:
        """End it, whatever it does."""
        if self._following is not None:
            self._closing = True
            self._channel.close()
            await self._following

    async def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        watched, self._lifeline = os.pipe()
        descriptors = (theirs.fileno(), watched)
        try:
            await self._channel.open(ours)
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "headrace.environments.worker", *map(str, descriptors)),
                pass_fds=descriptors,
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # so that it can be killed with whatever it has started
            )
        except BaseException:
            self._channel.abort()
            os.close(self._lifeline)
            raise
        finally:
            theirs.close()
            os.close(watched)

    async def _follow(self) -> None:
        """Wait for its end, and leave nothing of it behind."""
        exited, lost = asyncio.ensure_future(self._process.wait()), asyncio.ensure_future(self._lost.wait())
        await asyncio.wait({exited, lost}, return_when=asyncio.FIRST_COMPLETED)
        self.ready = False
        if not exited.done():
            await asyncio.wait({exited}, timeout=self._limits.grace)
        self._kill("" if exited.done() else f"did not end within {self._limits.grace:g} s")
        status = await exited
        await asyncio.wait({lost}, timeout=self._limits.grace)  # what it said last is still on its way
        self._channel.abort()
        os.close(self._lifeline)
        self._bury(status)

    def _bury(self, status: int) -> None:
        if not self._closing or status != 0:
            self.cause = self.cause or how_it_ended(status)
            log.warning("a worker of %s %s; it had %d episodes", self._identifier, self.cause, len(self.jobs))
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
            case Refused():
                self.cause, self.refusal = f"cannot load the environment: {message.text}", message.traceback
                self._channel.close()  # it has a while to close what it had opened
            case Chat():
                self._start_chat(message)
            case HangUp(job, call):
                if job in self.jobs and call in self.jobs[job].chats:
                    self.jobs[job].chats[call].cancel()
            case Result(job) | Failed(job):
                self._finish(job, message)

    def _finish(self, number: int, outcome: Result | Failed) -> None:
        job = self.jobs.pop(number, None)
        if job is not None:  # else it has failed already, over a message that could not be read
            job.end(outcome)
            self.finished += 1
            self._retire_if_too_big()
            self._close_if_drained()

    def _start_chat(self, message: Chat) -> None:
        job = self.jobs.get(message.job)
        if job is None or job.context is None or job.outcome.done():
            self._channel.send(NoAnswer(message.call, "CancelledError", "the episode has ended"))
            return
        chat = job.chats[message.call] = asyncio.create_task(self._chat(job, job.context, message))
        chat.add_done_callback(lambda _: job.chats.pop(message.call))

    async def _chat(self, job: Job, context: Context, message: Chat) -> None:
        """The original of an exception stays here, for the case that the environment passes it on."""
        try:
            reply = await context.chat(message.messages, message.tools, message.max_tokens)
            self._channel.send(Answer(message.call, reply))
        except (Exception, asyncio.CancelledError) as error:
            job.chat_errors[message.call] = error
            fault = fault_of(error)
            reason = printable(str(error.reason)) if isinstance(error, EpisodeError) else None
            self._channel.send(NoAnswer(message.call, fault.kind, fault.message, reason))

    def _cancel(self, number: int) -> None:
        if number in self.jobs:
            self._channel.send(Cancel(number))
            asyncio.get_running_loop().call_later(self._limits.grace, self._expect_end_of, number)

    def _expect_end_of(self, number: int) -> None:
        if number in self.jobs:
            self._kill(f"was killed: a cancelled episode did not stop within {self._limits.grace:g} s")

    def _retire_if_too_big(self) -> None:
        limit = self._limits.max_memory_mb
        if limit is not None and not self.retired and resident_mb(self._process.pid) > limit:
            log.info("a worker of %s has grown beyond %g MB: a fresh one takes its place", self._identifier, limit)
            self.retire()

    def _close_if_drained(self) -> None:
        if self.retired and not self.jobs:
            self._closing = True
            self._channel.close()

    def _lose(self) -> None:
        self.ready = False
        self.cause = self.cause or self._channel.cause
        self._lost.set()

    def _kill(self, cause: str) -> None:
        """End it and whatever it has started."""
        self.ready = False
        self.cause = self.cause or cause
        with suppress(ProcessLookupError, PermissionError):  # nobody is left in its group; macOS says so with EPERM
            os.killpg(self._process.pid, signal.SIGKILL)


def _decode(result: Result, decoder: msgspec.msgpack.Decoder[T]) -> T:
    try:
        return decoder.decode(result.value)
    except msgspec.DecodeError as error:  # of an environment that put a text where a number belongs
        text = f"the environment's result is malformed: {error}"
        raise EpisodeError("environment", text, place=text) from error


def how_it_ended(status: int) -> str:
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"


def resident_mb(pid: int) -> float:
    """0 where the system does not tell, or the process has just ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
