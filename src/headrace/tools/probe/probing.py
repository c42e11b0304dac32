"""Playing completions through an environment, from outside: whatever it does, the probe goes on."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.environments.base import evenly_spaced
from headrace.environments.fault import dumped_code_location, is_idle_in_event_loop
from headrace.environments.registry import location_of
from headrace.environments.sandbox import CallFailed, CallTimeout, Sandbox
from headrace.errors import BadInput, Failure
from headrace.rollout.types import Task
from headrace.tools.probe.completions import COMPLETIONS, Completion
from headrace.tools.probe.report import Episode, Opening, Problem, Report
from headrace.tools.probe.stage import HOLD, TOO_LONG

STAGE = "headrace.tools.probe.stage"
LOAD_TIMEOUT = 600.0
"""Seconds to load an environment and its tasks."""
MEMORY_MB = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2 >> 20
"""What the environment's process may write to: half of what the machine has."""
PLAIN = ("gold", "mistake", "empty")
"""Kinds that are played on many tasks; the others on a few."""
UNSTOPPABLE = "does not stop when it is cancelled, after {:g} s"
LATE = ("timeout", "blocked", "not_cancelled")
"""Reasons of episodes that took too long: they waited for something, or held their process and were killed with it, or
were killed because they still waited when they were to stop."""
TOLERANCE = 1e-9

Progress = Callable[[str, int, int], None]
"""Told what is being done, and how many of how many steps are behind."""


class ProbeFailed(Failure):
    """The environment could not be probed at all."""


class Theatre:
    """The process in which the environment lives, started again when an episode has cost it its life."""

    def __init__(
        self,
        identifier: str,
        args: dict[str, Any],
        timeout: float,
        scratch: Path,
        load_timeout: float = LOAD_TIMEOUT,
    ) -> None:
        self._identifier = identifier
        self._args = args
        self._timeout = timeout
        self._load_timeout = load_timeout
        self._trace = scratch / "trace"
        self._folder = ""
        self._is_fresh = True
        self._warms_up = True
        self._sandbox = Sandbox(processes=1, memory_mb=MEMORY_MB)

    async def open(self) -> Opening | None:
        """Have the environment there; None if it was there already."""
        limit = self._load_timeout
        given = self._identifier, self._args, str(self._trace), limit
        try:
            told = await self._call("prepare", *given, timeout=limit + HOLD)
        except CallTimeout as error:
            place = dumped_code_location(self._trace.read_text(), _folder_of(self._identifier))
            where = f"; it was at {place}" if place else ""
            raise ProbeFailed(
                f"environment {self._identifier!r} did not load within {limit:g} s{where}. "
                "If it needs longer, give --load-timeout S"
            ) from error
        except CallFailed as error:
            trace = f"\n{error.remote_traceback.rstrip()}" if error.remote_traceback else ""
            raise ProbeFailed(f"environment {self._identifier!r} cannot be loaded: {error}{trace}") from error
        if isinstance(told, str):
            raise BadInput(told)
        if told is None:
            return None
        opening = msgspec.convert(told, Opening)
        self._folder, self._is_fresh = opening.folder, True
        return opening

    async def keys(self) -> list[str]:
        await self.open()
        keys: list[str] = await self._call("keys", timeout=self._load_timeout)
        return keys

    async def tasks(self, numbers: Sequence[int]) -> list[Task]:
        await self.open()
        told = await self._call("tasks", list(numbers), timeout=self._load_timeout)
        return [Task(self._identifier, data, key) for data, key in told]

    async def play(self, completion: Completion, task: int, keep: bool = False) -> Episode:
        """One episode. One that nobody looks at comes first in each process: it is slower, for what it imports."""
        await self.open()
        if self._is_fresh and self._warms_up:
            first = await self._play(COMPLETIONS[0], task, keep=False)
            self._warms_up = first.problem is None or first.problem.reason not in LATE
            await self.open()
        self._is_fresh = False
        return await self._play(completion, task, keep)

    async def close(self) -> Problem | None:
        """What the environment's own `close` raised, if it did."""
        try:
            await self.open()
            problem = await self._call("close", timeout=self._timeout + 2 * HOLD)
            return None if problem is None else msgspec.convert(problem, Problem)
        except CallTimeout:
            return Problem("timeout", TOO_LONG.format(self._timeout))
        except CallFailed as error:
            return Problem("exception", str(error))
        finally:
            await self.kill()

    async def kill(self) -> None:
        await self._sandbox.close()

    async def _play(self, completion: Completion, task: int, keep: bool) -> Episode:
        started = time.perf_counter()
        held = 0.0
        try:
            told = await self._call(
                "play", task, completion.name, self._timeout, keep, timeout=self._timeout + 2 * HOLD
            )
            return msgspec.convert(told, Episode)
        except CallTimeout:
            trace = self._trace.read_text()
            if is_idle_in_event_loop(trace):
                problem = Problem("not_cancelled", UNSTOPPABLE.format(self._timeout))
            else:
                problem = Problem("blocked", TOO_LONG.format(self._timeout), dumped_code_location(trace, self._folder))
                held = self._timeout
        except CallFailed as error:
            problem = Problem("process" if error.kind == "process" else "exception", str(error))
        seconds = time.perf_counter() - started
        return Episode(completion.name, task, problem=problem, seconds=seconds, cpu_seconds=None, blocked_seconds=held)

    async def _call(self, function: str, *args: Any, timeout: float) -> Any:
        return await self._sandbox.call(f"{STAGE}:{function}", *args, timeout=timeout)


async def probe(
    identifier: str,
    args: dict[str, Any],
    *,
    tasks: int = 16,
    examples: int = 3,
    timeout: float = 10.0,
    load_timeout: float = LOAD_TIMEOUT,
    sampled: int = 0,
    progress: Progress = lambda what, done, total: None,
) -> tuple[Report, list[Task]]:
    """Every completion on some tasks: gold, mistakes and silence on `tasks` of them, the rest on `examples`.

    Comes with `sampled` tasks for a model to play.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-probe-") as scratch:
        theatre = Theatre(identifier, args, timeout, Path(scratch), load_timeout)
        try:
            progress("loading", 0, 0)
            opening = await theatre.open()
            assert opening is not None, "it was not there before"
            keys = await theatre.keys()
            progress("loading again, in another process", 0, 0)
            difference = first_difference(keys, await _keys_elsewhere(identifier, args, Path(scratch), load_timeout))
            many = evenly_spaced(len(keys), max(tasks, examples))
            few = [many[place] for place in evenly_spaced(len(many), examples)]
            episodes, unstable = await _play_all(theatre, many, few, progress)
            to_sample = await theatre.tasks(evenly_spaced(len(keys), sampled)) if sampled else []
            closing = await theatre.close()
        finally:
            await theatre.kill()
    report = Report(
        identifier,
        args,
        opening,
        [keys[number] for number in many],
        many,
        len(keys) - len(set(keys)),
        difference,
        episodes,
        unstable,
        closing,
    )
    return report, to_sample


async def _keys_elsewhere(identifier: str, args: dict[str, Any], scratch: Path, load_timeout: float) -> list[str]:
    """In a process of its own, where sets have another order and a clock or a random seed has another value."""
    theatre = Theatre(identifier, args, load_timeout, scratch, load_timeout)
    try:
        return await theatre.keys()
    finally:
        await theatre.kill()


async def _play_all(
    theatre: Theatre, many: Sequence[int], few: Sequence[int], progress: Progress
) -> tuple[list[Episode], list[str]]:
    """All episodes, and the completions whose reward on the first task was another one the second time."""
    episodes: list[Episode] = []
    unstable: list[str] = []
    gold = offers_tools = True
    for done, completion in enumerate(COMPLETIONS):
        if (completion.from_gold and not gold) or (completion.kind == "tool call" and not offers_tools):
            continue
        progress(completion.name, done, len(COMPLETIONS))
        found = await _play_on(theatre, completion, many if completion.kind in PLAIN else few)
        reasons = {episode.problem.reason for episode in found if episode.problem is not None}
        if all(episode.problem is not None and episode.problem.reason == "no_gold" for episode in found):
            gold = False
            continue
        episodes += found
        offers_tools = any(episode.offers_tools for episode in episodes)
        if not reasons and not same_reward(found[0], await theatre.play(completion, found[0].task)):
            unstable.append(completion.name)
    return episodes, unstable


async def _play_on(theatre: Theatre, completion: Completion, tasks: Sequence[int]) -> list[Episode]:
    """On each of the tasks, until one takes too long: the others would, too."""
    episodes = []
    for task in tasks:
        episodes.append(await theatre.play(completion, task, keep=completion.kind in PLAIN))
        problem = episodes[-1].problem
        if problem is not None and problem.reason in LATE:
            break
    return episodes


def same_reward(first: Episode, second: Episode) -> bool:
    if first.rewards.keys() != second.rewards.keys() or len(first.earned) != len(second.earned):
        return False
    pairs = [(first.rewards[name], second.rewards[name]) for name in first.rewards]
    pairs += zip(first.earned, second.earned, strict=True)
    return all(abs(once - again) <= TOLERANCE for once, again in pairs)


def _folder_of(identifier: str) -> str:
    """Where an environment's code is that has not been loaded."""
    module = location_of(identifier)[0].partition(":")[0]
    found = importlib.util.find_spec(module.partition(".")[0])
    return str(Path(found.origin).parent) if found is not None and found.origin else ""


def first_difference(once: Sequence[str], again: Sequence[str]) -> int | None:
    """The first place at which two lists of keys differ."""
    for number, (left, right) in enumerate(zip(once, again, strict=False)):
        if left != right:
            return number
    return None if len(once) == len(again) else min(len(once), len(again))
