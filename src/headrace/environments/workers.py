"""An environment whose episodes run in worker processes, so that this process's event loop only moves data.

Rendering and sampling stay in this process. An episode is not moved to another worker when its own dies: what it had
sampled is lost, so it fails.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from headrace.environments.base import Context, Demonstration, Environment, EpisodeError, Reply
from headrace.environments.channel import CANCELLED, Call, Cancel, Channel, Failed, Outcome, encode, make_decoder
from headrace.environments.child_process import connect_to_child, describe_exit, kill_group, resident_mb
from headrace.environments.fault import CANCELLED_ITSELF, Fault
from headrace.environments.worker import SCHEMA, Scores
from headrace.errors import Failure
from headrace.inference.schema import StructuredOutputs
from headrace.observe import tracing
from headrace.rollout.types import Rollout, Task

log = logging.getLogger(__name__)

MIN_RESTART_DELAY_S = 0.1
MAX_RESTART_DELAY_S = 30.0
"""The delay before a worker is restarted doubles each time one dies without having finished a job."""
MAX_FAILED_STARTS = 3
"""Workers in a row that may die without having finished a job before the waiting episodes fail."""

_rollouts = make_decoder(list[Rollout])
_scores = make_decoder(list[Scores])
_chat_arguments = make_decoder(tuple[int, Any, Any, Any, StructuredOutputs | None])


class WorkerLimits(msgspec.Struct, frozen=True):
    """When a worker is replaced, and its timeouts in seconds."""

    recycle_after: int = 10_000
    """Episodes that a worker runs before it is replaced."""
    max_memory_mb: float | None = None
    """Resident memory above which a worker is replaced, checked after each episode."""
    grace: float = 10.0
    """Seconds to stop a cancelled episode, or to end when the channel closes, before the worker is killed."""
    start_timeout: float = 300.0
    """Seconds to load the environment."""


class WorkersFailed(Failure):
    """The environment loads in this process but does not start in a worker process."""


class WorkerPool(Environment):
    """Runs episodes in `size` worker processes, which load the environment from `identifier` and `args`.

    `environment` is the instance in this process.
    """

    def __init__(
        self, environment: Environment, identifier: str, args: dict[str, Any], *, size: int,
        limits: WorkerLimits | None = None,
    ) -> None:  # fmt: skip
        if size < 1:
            raise ValueError(f"size = {size}: a pool needs at least one worker")
        self._environment, self._size = environment, size
        self._identifier, self._args, self._limits = identifier, args, limits or WorkerLimits()
        self._workers: list[WorkerProcess] = []
        """Workers that are starting, running or draining."""
        self._supervisors: list[asyncio.Task[None]] = []
        self._waiting: set[asyncio.Future[str]] = set()
        self._reported: set[str] = set()

    def tasks(self) -> Iterable[dict[str, Any]]:
        return self._environment.tasks()

    def thinking_tags(self, task: Task) -> tuple[str, str]:
        return self._environment.thinking_tags(task)

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        return self._environment.demonstrations(seed)

    @property
    def scores_groups(self) -> bool:
        return self._environment.scores_groups

    async def start(self) -> None:
        """Start all workers; if one fails, close them all and raise."""
        workers = [self._new_worker() for _ in range(self._size)]
        try:
            await asyncio.gather(*(worker.start() for worker in workers))
            for worker in workers:
                if not worker.ready:
                    self._report_load_error(worker)
                    raise WorkersFailed(f"a worker process of environment {self._identifier!r} {worker.cause}")
        except BaseException:
            await self.close()
            raise
        self._supervisors = [asyncio.create_task(self._supervise(worker)) for worker in workers]

    async def close(self) -> None:
        """End all workers; episodes that still run fail."""
        supervisors, self._supervisors = self._supervisors, []
        for supervisor in supervisors:
            supervisor.cancel()
        ends = await asyncio.gather(*supervisors, return_exceptions=True)
        self._wake_waiting("the worker pool was closed")
        await asyncio.gather(*(worker.close() for worker in self._workers))
        self._workers.clear()
        for end in ends:
            if isinstance(end, Exception):  # a bug: supervisors end by cancellation
                raise end

    async def run(self, task: Task, context: Context) -> list[Rollout]:
        worker = await self._wait_for_worker()
        rollouts: list[Rollout] = await worker.run_job("run", task, _rollouts, context)
        return rollouts

    async def score_group(self, rollouts: Sequence[Rollout]) -> None:
        worker = await self._wait_for_worker()
        scores: list[Scores] = await worker.run_job("score", list(rollouts), _scores)
        for rollout, changed in zip(rollouts, scores, strict=True):
            rollout.rewards, rollout.metrics, rollout.error = changed.rewards, changed.metrics, changed.error

    async def _wait_for_worker(self) -> WorkerProcess:
        """Wait for a ready worker and return the one with the fewest jobs."""
        while not (ready := [worker for worker in self._workers if worker.ready]):
            if all(supervisor.done() for supervisor in self._supervisors):
                raise RuntimeError("the worker pool is not running: call start() first")
            wakeup: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            self._waiting.add(wakeup)
            try:
                if error := await wakeup:
                    raise EpisodeError("worker", error)
            finally:
                self._waiting.discard(wakeup)
        return min(ready, key=lambda worker: len(worker.jobs))

    def _wake_waiting(self, error: str = "") -> None:
        """Wake the episodes that wait for a worker; with an `error`, they fail."""
        for wakeup in self._waiting:
            if not wakeup.done():
                wakeup.set_result(error)

    async def _supervise(self, worker: WorkerProcess) -> None:
        """Replace a worker whenever it leaves the pool."""
        failures, delay = 0, MIN_RESTART_DELAY_S
        while True:
            await worker.left_pool.wait()
            if worker.retired or worker.jobs_finished:
                failures, delay = 0, MIN_RESTART_DELAY_S
            else:
                failures += 1
                self._report_load_error(worker)
                if failures >= MAX_FAILED_STARTS:
                    text = f"{failures} worker processes in a row ended without a finished job; the last {worker.cause}"
                    self._wake_waiting(text)
                await asyncio.sleep(delay)
                delay = min(2 * delay, MAX_RESTART_DELAY_S)
            worker = self._new_worker()
            await worker.start()
            if worker.ready:
                self._wake_waiting()

    def _new_worker(self) -> WorkerProcess:
        worker = WorkerProcess(self._identifier, self._args, self._limits)
        self._workers = [*(other for other in self._workers if not other.ended), worker]
        return worker

    def _report_load_error(self, worker: WorkerProcess) -> None:
        if worker.load_error and worker.load_error not in self._reported:
            self._reported.add(worker.load_error)
            log.error("a worker process cannot load %s:\n%s", self._identifier, worker.load_error.rstrip())


class Job:
    """An episode or a group to score: its context, and its calls to the model."""

    def __init__(self, context: Context | None) -> None:
        self.context = context
        self.chats: set[asyncio.Task[Any]] = set()
        self.trace = tracing.headers()
        self.chat_errors: dict[int | None, BaseException] = {}

    def end(self) -> None:
        self.context = None
        for chat in self.chats:
            chat.cancel()


class WorkerProcess:
    """One process, from its start to its end. `left_pool` is set when it takes no more jobs, for any reason."""

    def __init__(self, identifier: str, args: dict[str, Any], limits: WorkerLimits) -> None:
        self.jobs: dict[int, Job] = {}
        self.ready = False
        self.retired = False
        self.left_pool = asyncio.Event()
        self.ended = False
        self.jobs_finished = 0
        """Jobs that have ended regularly."""
        self.cause = ""
        """How or why it ended, such as "was ended by SIGKILL"."""
        self.load_error = ""
        """The traceback of an environment that cannot be loaded in the worker."""
        self._identifier = identifier
        self._args = args
        self._limits = limits
        self._jobs_taken = 0
        self._lost = asyncio.Event()
        self._closing = False
        self._channel = Channel(self._connection_lost, self._chat)
        self._exit_watcher: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process
        self._lifeline: int

    async def start(self) -> None:
        """Start the process and wait until it is ready, or has ended and `cause` is set."""
        try:
            await self._spawn()
        except Exception as error:  # no memory, descriptors or threads left: may succeed later
            self.cause = f"could not be started: {type(error).__name__}: {error}"
            self.ended = True
            self.left_pool.set()
            return
        self._exit_watcher = asyncio.create_task(self._wait_for_exit())
        _, loading = self._channel.call("load", encode((SCHEMA, self._identifier, self._args, sys.path)))
        await asyncio.wait({loading}, timeout=self._limits.start_timeout)
        if not loading.done():
            self._kill(f"did not load the environment within {self._limits.start_timeout:g} s")
        elif isinstance(failed := loading.result(), Failed):
            self.cause = self.cause or f"cannot load the environment: {failed.fault.text}"
            self.load_error = failed.fault.traceback
            self._channel.close()  # the worker then has `grace` seconds to release its resources
        else:
            self.ready = not self.cause
        if not self.ready:
            await asyncio.shield(self._exit_watcher)

    async def run_job(
        self, method: str, argument: Any, result: msgspec.msgpack.Decoder[Any], context: Context | None = None
    ) -> Any:
        """Run one job and return its decoded result. Cancelling the caller cancels the job."""
        number, pending = self._channel.call(method, encode((argument,)))
        job = self.jobs[number] = Job(context)
        pending.add_done_callback(partial(self._finish, number))
        self._jobs_taken += 1
        if self._jobs_taken >= self._limits.recycle_after:
            self.retire()
        try:
            outcome = await asyncio.shield(pending)
        except asyncio.CancelledError:
            if number in self.jobs:
                self._channel.send(Cancel(number))
                asyncio.get_running_loop().call_later(self._limits.grace, self._kill_if_running, number)
            raise
        finally:
            job.end()
        if isinstance(outcome, Failed):
            fault, reason = outcome.fault, outcome.reason
            if (original := job.chat_errors.get(outcome.call)) is not None:
                raise original
            if reason is not None:
                raise EpisodeError(reason, fault.message)
            text = CANCELLED_ITSELF if fault == CANCELLED else fault.text
            raise EpisodeError("environment", text, place=fault.place, remote_traceback=fault.traceback)
        try:
            return result.decode(outcome.value)
        except msgspec.DecodeError as error:  # such as a text in place of a number
            text = f"the environment's result is malformed: {error}"
            raise EpisodeError("environment", text, place=text) from error

    def retire(self) -> None:
        """Take no more jobs, finish the current ones, and end."""
        self.retired = True
        self.ready = False
        self.left_pool.set()
        self._close_if_drained()

    async def close(self) -> None:
        """End the process, even while jobs run."""
        if self._exit_watcher is not None:
            self._closing = True
            self._channel.close()
            await self._exit_watcher

    async def _spawn(self) -> None:
        with connect_to_child() as (ours, self._lifeline, descriptors):
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

    async def _wait_for_exit(self) -> None:
        """Wait until the process has ended, and clean up."""
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
        """Fail the jobs of a process that has ended with this exit status."""
        if not self._closing or status != 0:
            self.cause = self.cause or describe_exit(status)
            log.warning("a worker of %s %s; %d episodes failed with it", self._identifier, self.cause, len(self.jobs))
        fault = Fault("", f"the worker process {self.cause or 'was closed'}", "", "")
        self.jobs.clear()
        for number, pending in self._channel.pending.items():
            if not pending.done():
                pending.set_result(Failed(number, fault, "worker"))
        self.ended = True
        self.left_pool.set()

    def _finish(self, number: int, pending: asyncio.Future[Outcome]) -> None:
        """Count a finished job, and retire the worker if it uses too much memory."""
        if self.jobs.pop(number, None) is None:  # the process has ended
            return
        self.jobs_finished += 1
        limit = self._limits.max_memory_mb
        if limit is not None and not self.retired and resident_mb(self._process.pid) > limit:
            log.info("a worker of %s has grown beyond %g MB and is replaced", self._identifier, limit)
            self.retire()
        self._close_if_drained()

    async def _chat(self, call: Call) -> Reply:
        """Call the model for an episode; keep the original exception in case the environment re-raises it."""
        number, messages, tools, *settings = _chat_arguments.decode(call.arguments)
        job, chat = self.jobs.get(number), asyncio.current_task()
        if job is None or job.context is None or chat is None:
            raise RuntimeError("the episode has ended")
        job.chats.add(chat)
        try:
            with tracing.continued(job.trace):
                return await job.context.chat(messages, tools, *settings)
        except (Exception, asyncio.CancelledError) as error:
            job.chat_errors[call.number] = error
            raise
        finally:
            job.chats.discard(chat)

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
        """Kill the process and all that it has started."""
        self.ready = False
        self.cause = self.cause or cause
        kill_group(self._process.pid)
