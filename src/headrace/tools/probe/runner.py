"""Run scripted completions through an environment in another process, which is restarted when an episode kills it."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from pydantic import Field

from headrace.config.base import Config
from headrace.config.model import RendererConfig
from headrace.environments.base import evenly_spaced
from headrace.environments.fault import dumped_code_location, is_idle_in_event_loop
from headrace.environments.registry import location_of
from headrace.environments.sandbox import CallFailed, CallTimeout, Sandbox
from headrace.errors import BadInput, Failure
from headrace.rollout.types import Task
from headrace.tools.common import ReportProgress
from headrace.tools.probe.completions import COMPLETIONS, ScriptedCompletion
from headrace.tools.probe.report import EpisodeProblem, LoadResult, ProbeEpisode, ProbeReport
from headrace.tools.probe.worker import TIMEOUT_TEXT, TRACE_DELAY_S

WORKER_MODULE = "headrace.tools.probe.worker"
LOAD_TIMEOUT_S = 600.0
MEMORY_MB = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2 >> 20
"""Memory limit of the environment's process: half of the machine's memory."""
PLAIN = ("gold", "mistake", "empty")
"""Kinds that run on many tasks; the others run on a few."""
LATE = ("timeout", "blocked", "not_cancelled")
"""Reasons of episodes that took too long: cancelled while waiting; killed because they blocked the event loop; killed
because they did not stop when cancelled."""
REWARD_TOLERANCE = 1e-9

T = TypeVar("T")


class ProbeConfig(Config):
    """The settings that `headrace probe` takes as `--args.key value` and `--renderer.key value`."""

    args: dict[str, Any] = Field(default_factory=dict)
    """As in the environment's section of a run file."""
    renderer: RendererConfig = Field(default_factory=RendererConfig)
    """As in the run file."""


class ProbeFailed(Failure):
    """The environment could not be probed at all."""


class ProbeRunner:
    """The process of the environment. It is restarted after an episode that killed it."""

    def __init__(
        self, identifier: str, args: dict[str, Any], timeout: float, scratch: Path, load_timeout: float = LOAD_TIMEOUT_S
    ) -> None:
        self._identifier, self._args = identifier, args
        self._timeout, self._load_timeout = timeout, load_timeout
        self._trace = scratch / "trace"
        self._folder = ""
        self._is_new_process = self._warms_up = True
        self._sandbox = Sandbox(processes=1, memory_mb=MEMORY_MB)

    async def load(self) -> LoadResult | None:
        """Load the environment in the process; return None if it is loaded already."""
        limit = self._load_timeout
        arguments = self._identifier, self._args, str(self._trace), limit
        try:
            result = await self._sandbox.call(f"{WORKER_MODULE}:load", *arguments, timeout=limit + TRACE_DELAY_S)
        except CallTimeout as error:
            module = location_of(self._identifier)[0].partition(":")[0]
            spec = importlib.util.find_spec(module.partition(".")[0])
            folder = str(Path(spec.origin).parent) if spec is not None and spec.origin else ""
            location = dumped_code_location(self._trace.read_text(), folder)
            where = f"; it was at {location}" if location else ""
            raise ProbeFailed(
                f"environment {self._identifier!r} did not load within {limit:g} s{where}. "
                "If it needs longer, set --load-timeout S"
            ) from error
        except CallFailed as error:
            trace = f"\n{error.remote_traceback.rstrip()}" if error.remote_traceback else ""
            raise ProbeFailed(f"environment {self._identifier!r} cannot be loaded: {error}{trace}") from error
        if isinstance(result, str):
            raise BadInput(result)
        if result is None:
            return None
        loaded = msgspec.convert(result, LoadResult)
        self._folder, self._is_new_process = loaded.folder, True
        return loaded

    async def keys(self) -> list[str]:
        await self.load()
        return await self._call("keys", timeout=self._load_timeout, kind=list[str])

    async def tasks(self, indices: Sequence[int]) -> list[Task]:
        await self.load()
        return await self._call("tasks_at", list(indices), timeout=self._load_timeout, kind=list[Task])

    async def run(self, completion: ScriptedCompletion, task: int, keep: bool = False) -> ProbeEpisode:
        """Run one episode. A new process first runs a warm-up episode, which is slower because of imports."""
        await self.load()
        if self._is_new_process and self._warms_up:
            first = await self._run(COMPLETIONS[0], task, keep=False)
            self._warms_up = first.problem is None or first.problem.reason not in LATE
            await self.load()
        self._is_new_process = False
        return await self._run(completion, task, keep)

    async def close(self) -> EpisodeProblem | None:
        """Close the environment and the process; return what the environment's `close` raised."""
        try:
            await self.load()
            timeout = self._timeout + 2 * TRACE_DELAY_S
            problems = await self._call("close", timeout=timeout, kind=list[EpisodeProblem])
            return problems[0] if problems else None
        except CallTimeout:
            return EpisodeProblem("timeout", TIMEOUT_TEXT.format(self._timeout))
        except CallFailed as error:
            return EpisodeProblem("exception", str(error))
        finally:
            await self.kill()

    async def kill(self) -> None:
        await self._sandbox.close()

    async def _run(self, completion: ScriptedCompletion, task: int, keep: bool) -> ProbeEpisode:
        started = time.perf_counter()
        blocked = 0.0
        limit = self._timeout
        try:
            arguments = task, completion.name, limit, keep
            return await self._call("run_episode", *arguments, timeout=limit + 2 * TRACE_DELAY_S, kind=ProbeEpisode)
        except CallTimeout:
            trace = self._trace.read_text()
            if is_idle_in_event_loop(trace):
                problem = EpisodeProblem("not_cancelled", f"does not stop when it is cancelled after {limit:g} s")
            else:
                location = dumped_code_location(trace, self._folder)
                problem = EpisodeProblem("blocked", TIMEOUT_TEXT.format(limit), location)
                blocked = limit
        except CallFailed as error:
            problem = EpisodeProblem("process" if error.kind == "process" else "exception", str(error))
        return ProbeEpisode(
            completion.name,
            task,
            problem=problem,
            seconds=time.perf_counter() - started,
            cpu_seconds=None,
            blocked_seconds=blocked,
        )

    async def _call(self, method: str, *args: Any, timeout: float, kind: type[T]) -> T:
        """Call a method of the worker's `EnvironmentRunner`, and convert its result to `kind`."""
        result = await self._sandbox.call(f"{WORKER_MODULE}:call", method, *args, timeout=timeout)
        return msgspec.convert(result, kind)


async def probe(
    identifier: str,
    args: dict[str, Any],
    *,
    tasks: int = 16,
    examples: int = 3,
    timeout: float = 10.0,
    load_timeout: float = LOAD_TIMEOUT_S,
    sampled: int = 0,
    progress: ReportProgress = lambda activity, done, total: None,
) -> tuple[ProbeReport, list[Task]]:
    """Run gold, mistake and empty completions on `tasks` tasks and the others on `examples` tasks.

    Return the report, and `sampled` tasks for a model.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-probe-") as scratch:
        runner = ProbeRunner(identifier, args, timeout, Path(scratch), load_timeout)
        # In another process, sets have another order, and clocks and random seeds have other values.
        second = ProbeRunner(identifier, args, load_timeout, Path(scratch), load_timeout)
        try:
            progress("loading", 0, 0)
            loaded = await runner.load()
            assert loaded is not None, "this is the first call of load()"
            keys = await runner.keys()
            progress("loading again, in another process", 0, 0)
            try:
                difference = first_difference(keys, await second.keys())
            finally:
                await second.kill()
            many = evenly_spaced(len(keys), max(tasks, examples))
            few = [many[index] for index in evenly_spaced(len(many), examples)]
            episodes, unstable = await _run_completions(runner, many, few, progress)
            to_sample = await runner.tasks(evenly_spaced(len(keys), sampled)) if sampled else []
            closing = await runner.close()
        finally:
            await runner.kill()
    report = ProbeReport(
        identifier,
        args,
        loaded,
        [keys[index] for index in many],
        many,
        len(keys) - len(set(keys)),
        difference,
        episodes,
        unstable,
        closing,
    )
    return report, to_sample


async def _run_completions(
    runner: ProbeRunner, many: Sequence[int], few: Sequence[int], progress: ReportProgress
) -> tuple[list[ProbeEpisode], list[str]]:
    """Return all episodes, and the completions whose reward on the first task differed the second time."""
    episodes: list[ProbeEpisode] = []
    unstable: list[str] = []
    has_gold = offers_tools = True
    for done, completion in enumerate(COMPLETIONS):
        if (completion.from_gold and not has_gold) or (completion.kind == "tool call" and not offers_tools):
            continue
        progress(completion.name, done, len(COMPLETIONS))
        results: list[ProbeEpisode] = []
        for task in many if completion.kind in PLAIN else few:
            results.append(await runner.run(completion, task, keep=completion.kind in PLAIN))
            problem = results[-1].problem
            if problem is not None and problem.reason in LATE:
                break  # other tasks would take too long as well
        problems = [episode.problem for episode in results if episode.problem is not None]
        if len(problems) == len(results) and all(problem.reason == "no_gold" for problem in problems):
            has_gold = False
            continue
        episodes += results
        offers_tools = any(episode.offers_tools for episode in episodes)
        if not problems and not same_reward(results[0], await runner.run(completion, results[0].task)):
            unstable.append(completion.name)
    return episodes, unstable


def same_reward(first: ProbeEpisode, second: ProbeEpisode) -> bool:
    if first.rewards.keys() != second.rewards.keys() or len(first.earned) != len(second.earned):
        return False
    pairs = [(first.rewards[name], second.rewards[name]) for name in first.rewards]
    pairs += zip(first.earned, second.earned, strict=True)
    return all(abs(once - again) <= REWARD_TOLERANCE for once, again in pairs)


def first_difference(first: Sequence[str], second: Sequence[str]) -> int | None:
    """Return the first index at which two lists of keys differ, or None."""
    for index, (left, right) in enumerate(zip(first, second, strict=False)):
        if left != right:
            return index
    return None if len(first) == len(second) else min(len(first), len(second))
