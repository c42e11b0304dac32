"""The environment's side of a probe: functions that the probe calls in a process which it can kill.

A probed environment may hang, exit or print; none of that affects the probe. The process keeps one environment and one
event loop between calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import random
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import msgspec

from headrace import imports
from headrace.environments.base import Environment, EpisodeError, PromptTooLong, Reply, tasks_of
from headrace.environments.fault import user_code_location
from headrace.environments.registry import load_environment, location_of
from headrace.environments.script import as_reply
from headrace.errors import Failure
from headrace.inference.schema import StructuredOutputs
from headrace.rollout.types import Message, Rollout, Task
from headrace.safe_text import encodable
from headrace.tools.probe.completions import BY_NAME, ChatState, NoGold, ScriptedCompletion
from headrace.tools.probe.report import EpisodeProblem, Exchange, LoadResult, ProbeEpisode, episode_rewards

MAX_REPLIES = 64
"""Replies of one episode; the next request fails as if the conversation had filled `seq_len`."""
GOLD_FAILED = "gold_failed"
"""Reason of an episode in which `gold` or `mistake` raised."""
LOOP_CHECK_INTERVAL_S = 0.005
TRACE_DELAY_S = 0.5
"""Time after the timeout at which the traceback of an episode that still runs is dumped."""
TIMEOUT_TEXT = "took longer than {:g} s"
MAX_ERROR_CHARS = 300


class EnvironmentRunner:
    """An environment, its tasks, and the event loop of its episodes."""

    def __init__(self, identifier: str, args: dict[str, Any]) -> None:
        started = time.perf_counter()
        location = location_of(identifier)[0]
        if ":" in location:
            imports.load(location, "environment")
        imported = time.perf_counter()
        self.environment = load_environment(identifier, args)
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self.environment.start())
        loaded = time.perf_counter()
        self.tasks = tasks_of(self.environment, identifier)
        file = sys.modules[type(self.environment).__module__].__file__
        self.load_result = LoadResult(
            imported - started,
            loaded - imported,
            time.perf_counter() - loaded,
            len(self.tasks),
            sum(len(msgspec.json.encode(task.data)) for task in self.tasks),
            self.environment.scores_groups,
            str(Path(file).parent) if file else "",
        )

    async def run(self, index: int, completion: ScriptedCompletion, timeout: float, keep: bool) -> ProbeEpisode:
        """Run one episode and measure it; with `keep`, the result has the conversation."""
        task = self.tasks[index]
        monitor = LoopMonitor()
        monitoring = asyncio.create_task(monitor.watch())
        stop_monitoring = self.loop.call_later(timeout, monitoring.cancel)  # an idle loop then shows in the traceback
        context = ScriptedContext(self.environment, task, completion, monitor)
        episode = ProbeEpisode(completion.name, index)
        started, cpu_started = time.perf_counter(), time.process_time()
        limit = asyncio.timeout(timeout)
        try:
            async with limit:
                rollouts = await self._run_and_score(task, context)
            episode.rewards, episode.earned = episode_rewards(rollouts)
            episode.reward = fmean(episode.earned)
        except (Exception, SystemExit) as error:
            timed_out = EpisodeProblem("timeout", TIMEOUT_TEXT.format(timeout))
            episode.problem = timed_out if limit.expired() else self._problem(error, context)
        monitor.record()
        monitoring.cancel()
        stop_monitoring.cancel()
        episode.seconds = time.perf_counter() - started - context.seconds
        episode.cpu_seconds = time.process_time() - cpu_started - context.cpu_seconds
        episode.blocked_seconds = monitor.longest
        episode.replies, episode.endless = context.replies, context.endless
        episode.offers_tools, episode.says_gold = bool(context.tools), context.says_gold
        if keep and context.prompt is not None:
            episode.exchange = Exchange(context.prompt, context.tools, context.conversation)
        return episode

    async def _run_and_score(self, task: Task, context: ScriptedContext) -> list[Rollout]:
        """Return the episode's rollouts; if groups are scored, its group also has a gold and an empty episode."""
        rollouts = await self.environment.run(task, context)
        if self.environment.scores_groups:
            group = list(rollouts)
            for name in ("gold", "empty"):
                with contextlib.suppress(NoGold):
                    other = ScriptedContext(self.environment, task, BY_NAME[name], context.monitor)
                    group += await self.environment.run(task, other)
            await self.environment.score_group(group)
        return rollouts

    def keys(self) -> list[str]:
        """Return the keys of all tasks, in order."""
        return [task.key for task in self.tasks]

    def tasks_at(self, indices: Sequence[int]) -> list[Task]:
        return [self.tasks[index] for index in indices]

    def run_episode(self, index: int, name: str, timeout: float, keep: bool) -> ProbeEpisode:
        """Run the completion `name` on task `index`; dump the traceback if it blocks the interpreter."""
        faulthandler.dump_traceback_later(timeout + TRACE_DELAY_S, file=_trace)
        try:
            return self.loop.run_until_complete(self.run(index, BY_NAME[name], timeout, keep))
        finally:
            faulthandler.cancel_dump_traceback_later()

    def close(self) -> list[EpisodeProblem]:
        """Close the environment; return what it raised, if anything."""
        try:
            self.loop.run_until_complete(self.environment.close())
        except Exception as error:
            return [self._problem(error)]
        return []

    def _problem(self, error: BaseException, context: ScriptedContext | None = None) -> EpisodeProblem:
        if isinstance(error, EpisodeError):
            return EpisodeProblem(error.reason, _shorten(str(error)), error.place)
        frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
        summary = traceback.TracebackException.from_exception(error, limit=-1)  # works if __str__ raises
        text = _shorten(f"{type(error).__name__}: {summary}")
        reason = GOLD_FAILED if context is not None and context.is_making_reply else "exception"
        return EpisodeProblem(reason, text, user_code_location(frames[::-1], self.load_result.folder))


class ScriptedContext:
    """An episode's context whose replies come from a scripted completion."""

    def __init__(
        self, environment: Environment, task: Task, completion: ScriptedCompletion, monitor: LoopMonitor
    ) -> None:
        self.monitor = monitor
        self.seconds = self.cpu_seconds = 0.0
        self.replies = 0
        self.endless = False
        self.is_making_reply = False
        """True after the completion itself has raised."""
        self.says_gold = True
        self.prompt: list[Message] | None = None
        self.tools: list[dict[str, Any]] = []
        self.conversation: list[Message] = []
        self._environment = environment
        self._task = task
        self._completion = completion

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        max_tokens: int | None = None,
        structured_outputs: StructuredOutputs | None = None,
    ) -> Reply:
        if self.replies == MAX_REPLIES:
            self.endless = True
            raise PromptTooLong(f"a probe gives at most {MAX_REPLIES} replies")
        started, cpu_started = time.perf_counter(), time.process_time()
        self.monitor.record()
        rng = random.Random(f"{self._task.key}-{self._completion.name}-{self.replies}")
        state = ChatState(self._environment, self._task, list(messages), list(tools), rng)
        if self.prompt is None:
            self.prompt, self.tools = list(messages), list(tools)
        self.is_making_reply = True
        scripted = self._completion.reply
        reply = as_reply(scripted if isinstance(scripted, str) else scripted(state))
        self.is_making_reply = False
        is_gold = False
        with contextlib.suppress(Exception):  # an exception of gold() is reported by the gold completion
            is_gold = as_reply(state.gold()).message == reply.message
        self.says_gold = self.says_gold and is_gold
        self.conversation = [*messages, reply.message]
        self.replies += 1
        self.monitor.last = time.perf_counter()
        self.seconds += time.perf_counter() - started
        self.cpu_seconds += time.process_time() - cpu_started
        return reply


class LoopMonitor:
    """Measures the longest time for which the event loop was blocked."""

    def __init__(self) -> None:
        self.longest = 0.0
        self.last = time.perf_counter()

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(LOOP_CHECK_INTERVAL_S)
            self.record()

    def record(self) -> None:
        now = time.perf_counter()
        self.longest = max(self.longest, now - self.last - LOOP_CHECK_INTERVAL_S)
        self.last = now


def _shorten(text: str) -> str:
    text = encodable(text)
    return text if len(text) <= MAX_ERROR_CHARS else f"{text[:MAX_ERROR_CHARS]}..."


_runner: EnvironmentRunner | None = None
_trace: Any = None


def load(identifier: str, args: dict[str, Any], trace: str, timeout: float) -> dict[str, Any] | str | None:
    """Load the environment; return its `LoadResult`, an error message, or None if it is loaded already.

    If loading takes longer than `timeout` seconds, or an episode blocks the interpreter, the traceback is written to
    the file `trace`.
    """
    global _runner, _trace
    if _runner is not None:
        return None
    os.dup2(2, 1)  # stdout belongs to the probe
    _trace = open(trace, "w")  # noqa: SIM115 - open as long as the process
    faulthandler.dump_traceback_later(timeout, file=_trace)
    try:
        _runner = EnvironmentRunner(identifier, args)
    except Failure as error:
        return str(error)
    finally:
        faulthandler.cancel_dump_traceback_later()
    return cast(dict[str, Any], msgspec.to_builtins(_runner.load_result))


def call(method: str, *args: Any) -> Any:
    """Call a method of the loaded `EnvironmentRunner`; return its result as JSON types."""
    assert _runner is not None, "load() must be called first"
    return msgspec.to_builtins(getattr(_runner, method)(*args))
