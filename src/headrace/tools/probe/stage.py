"""Where a probed environment lives: functions that the probe calls in a process which it can kill.

An environment under a probe may never return, may end its process and may print; none of that reaches the probe. The
process keeps one environment and an event loop of its own between calls.
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
from typing import Any

import msgspec

from headrace import imports
from headrace.environments.base import Environment, EpisodeError, PromptTooLong, Reply, tasks_of
from headrace.environments.fault import user_code_location
from headrace.environments.registry import load_environment, location_of
from headrace.environments.script import as_reply
from headrace.errors import Failure
from headrace.rollout.types import Message, Rollout, Task, printable
from headrace.tools.probe.completions import BY_NAME, Completion, NoGold, Scene
from headrace.tools.probe.report import Episode, Exchange, Opening, Problem, rewards_of

MOST_REPLIES = 64
"""Replies of one episode; then the conversation is said to be full, as it would be within some `seq_len`."""
GOLD_FAILED = "gold_failed"
"""The reason of an episode that got no reply, for what `gold` or `mistake` raised."""
TICK = 0.005
HOLD = 0.5
"""Seconds past the time limit after which an episode that still runs is asked where it is."""
TOO_LONG = "it took longer than {:g} s"
LONGEST_TEXT = 300
"""Characters of an exception's text."""


class Stage:
    """An environment, its tasks, and the event loop on which its episodes run."""

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
        self.opening = Opening(
            imported - started,
            loaded - imported,
            time.perf_counter() - loaded,
            len(self.tasks),
            sum(len(msgspec.json.encode(task.data)) for task in self.tasks),
            self.environment.scores_groups,
            _folder(self.environment),
        )

    async def play(self, number: int, completion: Completion, timeout: float, keep: bool) -> Episode:
        """One episode, measured."""
        task = self.tasks[number]
        held = LoopWatch()
        watching = asyncio.create_task(held.watch())
        unwatched = self.loop.call_later(timeout, watching.cancel)  # then the loop is still, unless it is held
        actor = Actor(self.environment, task, completion, held)
        episode = Episode(completion.name, number)
        started, cpu_started = time.perf_counter(), time.process_time()
        limit = asyncio.timeout(timeout)
        try:
            async with limit:
                rollouts = await self._scored(task, actor)
            episode.rewards, episode.earned = rewards_of(rollouts)
            episode.reward = fmean(episode.earned)
        except (Exception, SystemExit) as error:
            expired = limit.expired()
            episode.problem = Problem("timeout", TOO_LONG.format(timeout)) if expired else self._problem(error, actor)
        held.note()
        watching.cancel()
        unwatched.cancel()
        episode.seconds = time.perf_counter() - started - actor.seconds
        episode.cpu_seconds = time.process_time() - cpu_started - actor.cpu_seconds
        episode.blocked_seconds = held.longest
        episode.replies, episode.endless = actor.replies, actor.endless
        episode.offers_tools, episode.says_gold = bool(actor.tools), actor.says_gold
        if keep and actor.prompt is not None:
            episode.exchange = Exchange(actor.prompt, actor.tools, actor.conversation)
        return episode

    async def _scored(self, task: Task, actor: Actor) -> list[Rollout]:
        """The episode's rollouts. Where groups are scored, its group has a gold and an empty episode besides."""
        rollouts = await self.environment.run(task, actor)
        if self.environment.scores_groups:
            group = list(rollouts)
            for name in ("gold", "empty"):
                with contextlib.suppress(NoGold):
                    group += await self.environment.run(task, Actor(self.environment, task, BY_NAME[name], actor.held))
            await self.environment.score_group(group)
        return rollouts

    def close(self) -> Problem | None:
        try:
            self.loop.run_until_complete(self.environment.close())
        except Exception as error:
            return self._problem(error)
        return None

    def _problem(self, error: BaseException, actor: Actor | None = None) -> Problem:
        if isinstance(error, EpisodeError):
            return Problem(error.reason, _short(str(error)), error.place)
        frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
        summary = traceback.TracebackException.from_exception(error, limit=-1)  # also of one whose own __str__ raises
        text = _short(f"{type(error).__name__}: {summary}")
        reason = GOLD_FAILED if actor is not None and actor.speechless else "exception"
        return Problem(reason, text, user_code_location(frames[::-1], self.opening.folder))


class Actor:
    """An episode's context: the model is played by a completion."""

    def __init__(self, environment: Environment, task: Task, completion: Completion, held: LoopWatch) -> None:
        self.held = held
        self.seconds = self.cpu_seconds = 0.0
        self.replies = 0
        self.endless = False
        self.speechless = False
        """Whether the completion itself failed."""
        self.says_gold = True
        self.prompt: list[Message] | None = None
        self.tools: list[dict[str, Any]] = []
        self.conversation: list[Message] = []
        self._environment = environment
        self._task = task
        self._completion = completion

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), max_tokens: int | None = None
    ) -> Reply:
        if self.replies == MOST_REPLIES:
            self.endless = True
            raise PromptTooLong(f"a probe gives {MOST_REPLIES} replies at most")
        started, cpu_started = time.perf_counter(), time.process_time()
        self.held.note()
        rng = random.Random(f"{self._task.key}-{self._completion.name}-{self.replies}")
        scene = Scene(self._environment, self._task, list(messages), list(tools), rng)
        if self.prompt is None:
            self.prompt, self.tools = list(messages), list(tools)
        self.speechless = True
        reply = as_reply(self._completion.answer(scene))
        self.speechless = False
        self.says_gold = self.says_gold and _is_gold(scene, reply.message)
        self.conversation = [*messages, reply.message]
        self.replies += 1
        self.held.restart()
        self.seconds += time.perf_counter() - started
        self.cpu_seconds += time.process_time() - cpu_started
        return reply


def _is_gold(scene: Scene, message: Message) -> bool:
    """Whether this is the gold reply: to repeat a text is to echo it."""
    with contextlib.suppress(Exception):  # what gold() raises is told where gold is played
        return as_reply(scene.gold()).message == message
    return False


class LoopWatch:
    """How long the event loop was held at a stretch: a task that wants to run every `TICK` seconds, and cannot."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._last = time.perf_counter()

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            self.note()

    def note(self) -> None:
        now = time.perf_counter()
        self.longest = max(self.longest, now - self._last - TICK)
        self._last = now

    def restart(self) -> None:
        self._last = time.perf_counter()


def _short(text: str) -> str:
    text = printable(text)
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}..."


def _folder(environment: Environment) -> str:
    file = sys.modules[type(environment).__module__].__file__
    return str(Path(file).parent) if file else ""


_stage: Stage | None = None
_trace: Any = None


def prepare(identifier: str, args: dict[str, Any], trace: str, timeout: float) -> dict[str, Any] | str | None:
    """Have the environment here. How it loaded, or a refusal in words; nothing if it was here already.

    Where loading takes too long, or an episode holds the interpreter, the place is written to the file `trace` before
    the process is killed.
    """
    global _stage, _trace
    if _stage is not None:
        return None
    os.dup2(2, 1)  # the probe's own output has no room for what an environment prints
    _trace = open(trace, "w")  # noqa: SIM115 - as long as the process
    faulthandler.dump_traceback_later(timeout, file=_trace)
    try:
        _stage = Stage(identifier, args)
    except Failure as error:
        return str(error)
    finally:
        faulthandler.cancel_dump_traceback_later()
    opening: dict[str, Any] = msgspec.to_builtins(_stage.opening)
    return opening


def keys() -> list[str]:
    """Of all tasks, in their order."""
    assert _stage is not None, "prepare() comes first"
    return [task.key for task in _stage.tasks]


def tasks(numbers: list[int]) -> list[tuple[dict[str, Any], str]]:
    """Data and keys of these."""
    assert _stage is not None, "prepare() comes first"
    return [(_stage.tasks[number].data, _stage.tasks[number].key) for number in numbers]


def play(number: int, name: str, timeout: float, keep: bool) -> dict[str, Any]:
    """The completion `name` on task `number`; with `keep`, what was asked comes along."""
    assert _stage is not None, "prepare() comes first"
    faulthandler.dump_traceback_later(timeout + HOLD, file=_trace)
    try:
        episode = _stage.loop.run_until_complete(_stage.play(number, BY_NAME[name], timeout, keep))
    finally:
        faulthandler.cancel_dump_traceback_later()
    told: dict[str, Any] = msgspec.to_builtins(episode)
    return told


def close() -> dict[str, Any] | None:
    """Have the environment give back what it opened; what went wrong with that, if something did."""
    assert _stage is not None, "prepare() comes first"
    told: dict[str, Any] | None = msgspec.to_builtins(_stage.close())
    return told
