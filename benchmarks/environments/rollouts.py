"""What one rollout costs the process that makes it, from the environment to its credit, and how late its loop runs.

    python benchmarks/environments/rollouts.py [--concurrent 1000] [--rollouts 3000] [--only calculator/1000]

Dispatcher, sampler, client, environment, merging and GRPO are the orchestrator's own, in groups of eight; the engine is
another process on this machine. All episodes start at once, then each that ends makes room for another. `start` is the
longest that the event loop stood still while the first ones began; the other lags are those of all the time after that.
`CPU ms` is this process alone: with a worker, the environment's own work is elsewhere. Lags are in milliseconds, too. A
case is an environment, the characters of a system message before its prompt, and worker processes.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headrace.algorithms.grpo import Grpo
from headrace.environments.base import Context, Environment, Reply, tasks_of
from headrace.environments.registry import load_environment
from headrace.environments.workers import WorkerPool
from headrace.inference.client.engine_client import EngineClient
from headrace.orchestrator.dispatcher import Dispatcher, EpisodeRunner
from headrace.orchestrator.orchestrator import GC_THRESHOLDS
from headrace.orchestrator.processing import TrainProcessing
from headrace.orchestrator.sampler import Sampler
from headrace.orchestrator.signals import Arrival, Episode, Kind
from headrace.rollout.types import Group, Message, Rollout, Task
from headrace.text.renderer import make_renderer
from headrace.text.tokenizer import Tokenizer
from headrace.trainer.tiny import write_tiny_model

GROUP = 8
SEQ_LEN = 8192
LAG_PROBE = 0.005
SETTLED = 0.05
"""Seconds after which a new lag no longer counts as the start's."""
COLUMNS = ("turns", "prompt", "sampled", "per second", "CPU ms", "lag p50", "p99", "max", "start")


class Case(NamedTuple):
    """`system` characters are put before each conversation; a reply has about `tokens`."""

    environment: str
    system: int
    tokens: int
    workers: int

    @property
    def name(self) -> str:
        return f"{self.environment}/{self.system}/{self.workers}"


CASES = [
    Case(environment, system, tokens, workers)
    for environment, sizes in (("arithmetic", ((0, 16), (1000, 412))), ("calculator", ((0, 96), (1000, 412))))
    for system, tokens in sizes
    for workers in (0, 1)
]


class Padded(Environment):
    """An environment whose conversations begin with a system message of so many characters."""

    def __init__(self, identifier: str, characters: int) -> None:
        self._environment = load_environment(identifier, {})
        words = ("Think before you answer. " * 1000)[:characters]
        self._before: list[Message] = [{"role": "system", "content": words}] if words else []

    def tasks(self) -> Any:
        return self._environment.tasks()

    async def run(self, task: Task, context: Context) -> list[Rollout]:
        return await self._environment.run(task, _Prefixed(self._before, context))


class _Prefixed:
    def __init__(self, messages: list[Message], context: Context) -> None:
        self._messages = messages
        self._context = context

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), max_tokens: int | None = None
    ) -> Reply:
        return await self._context.chat([*self._messages, *messages], tools, max_tokens)


class Bench:
    """Keeps `concurrent` episodes in flight until `rollouts` have arrived and been credited."""

    def __init__(self, tasks: Sequence[Task], processing: TrainProcessing, concurrent: int, rollouts: int) -> None:
        self.arrived: list[Rollout] = []
        self.dispatcher: Dispatcher
        self._processing = processing
        self._concurrent = concurrent
        self._rollouts = rollouts
        self._episodes = self._endless(tasks)
        self._open: dict[str, list[Rollout]] = {}
        self._credits: set[asyncio.Task[Any]] = set()
        self._done = asyncio.Event()

    def _endless(self, tasks: Sequence[Task]) -> Any:
        numbers = itertools.count()
        for draw, task in enumerate(itertools.cycle(tasks)):
            group = Group(f"g{draw}", task, GROUP, 0, draw)
            yield from (Episode(next(numbers), Kind.TRAIN, group, index) for index in range(GROUP))

    async def run(self) -> None:
        for episode in itertools.islice(self._episodes, self._concurrent):
            self.dispatcher.start(episode)
        await self._done.wait()
        failures = [rollout.error for rollout in self.arrived if rollout.error is not None]
        if failures:
            raise SystemExit(f"an episode failed: {failures[0]}")

    def receive(self, arrival: Arrival) -> None:
        if self._done.is_set():
            return
        self.arrived += arrival.rollouts
        if any(rollout.error is not None for rollout in arrival.rollouts) or len(self.arrived) >= self._rollouts:
            self._done.set()
            return
        self.dispatcher.start(next(self._episodes))
        group = arrival.episode.group
        members = self._open.setdefault(group.id, [])
        members += arrival.rollouts
        if len(members) == GROUP:
            credit = asyncio.create_task(self._processing.process_group(group, self._open.pop(group.id)))
            self._credits.add(credit)
            credit.add_done_callback(self._credits.discard)


async def watch_lag(lags: list[tuple[float, float]]) -> None:
    while True:
        before = time.monotonic()
        await asyncio.sleep(LAG_PROBE)
        lags.append((before, time.monotonic() - before - LAG_PROBE))


@asynccontextmanager
async def engine_process(model: Path, case: Case, median: float) -> AsyncIterator[EngineClient]:
    with tempfile.TemporaryDirectory() as directory:
        program = str(Path(__file__).with_name("talking_engine.py"))
        options = ("--tokens", str(case.tokens), "--median", str(median))
        endpoint = Path(directory) / "inference.json"
        process = await asyncio.create_subprocess_exec(sys.executable, program, str(model), str(endpoint), *options)
        client = EngineClient(Path(directory))
        try:
            await client.wait_ready(60)
            yield client
        finally:
            await client.close()
            process.terminate()
            await process.wait()


@asynccontextmanager
async def environment_of(case: Case) -> AsyncIterator[tuple[Environment, list[Task]]]:
    identifier, args = "rollouts:Padded", {"identifier": case.environment, "characters": case.system}
    environment: Environment = Padded(**args)
    tasks = tasks_of(environment, case.environment)
    if case.workers:
        environment = WorkerPool(environment, identifier, args, size=case.workers)
    await environment.start()
    try:
        yield environment, tasks
    finally:
        await environment.close()


async def measure(model: Path, case: Case, arguments: argparse.Namespace) -> str:
    tokenizer = Tokenizer(model)
    renderer = make_renderer(model, tokenizer)
    lags: list[tuple[float, float]] = []
    async with engine_process(model, case, arguments.median) as client, environment_of(case) as (environment, tasks):
        processing = TrainProcessing({case.environment: Grpo()}, {case.environment: environment}, [], [], SEQ_LEN)
        bench = Bench(tasks, processing, arguments.concurrent, arguments.rollouts)
        sampler = Sampler(client, renderer, tokenizer, SEQ_LEN)
        runner = EpisodeRunner(environment, sampler, 600.0, processing.process_rollout)
        bench.dispatcher = Dispatcher({(Kind.TRAIN, case.environment): runner}, bench.receive)
        watch = asyncio.create_task(watch_lag(lags))
        await asyncio.sleep(0.1)
        cpu, began = time.process_time(), time.monotonic()
        await bench.run()
        cpu, seconds = time.process_time() - cpu, time.monotonic() - began
        watch.cancel()
        await bench.dispatcher.close()
    return line(case, bench.arrived[: arguments.rollouts], cpu, seconds, lags, began)


def line(
    case: Case, rollouts: Sequence[Rollout], cpu: float, seconds: float, lags: list[tuple[float, float]], began: float
) -> str:
    count = len(rollouts)
    settled = began + SETTLED
    later = np.quantile([lag for before, lag in lags if before >= settled], [0.5, 0.99, 1.0])
    values = [
        np.mean([len(rollout.turns) for rollout in rollouts]),
        np.mean([len(rollout.turns[-1].prompt_ids) for rollout in rollouts]),
        np.mean([rollout.completion_tokens for rollout in rollouts]),
        count / seconds,
        1e3 * cpu / count,
        *1e3 * later,
        1e3 * max(lag for before, lag in lags if before < settled),
    ]
    return f"{case.name:<20}" + "".join(f"{value:>11.2f}" for value in values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--concurrent", type=int, default=1000)
    parser.add_argument("--rollouts", type=int, default=3000)
    parser.add_argument("--median", type=float, default=2.0, help="seconds that the engine takes over a reply")
    parser.add_argument("--only", default="", help="how a case's name begins: calculator/1000/0")
    arguments = parser.parse_args()
    sys.path.append(str(Path(__file__).parent))  # where workers find the environment
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_model(Path(directory))
        gc.freeze()  # what came with torch, which the orchestrator has not
        gc.set_threshold(*GC_THRESHOLDS)
        print(f"{'case':<20}" + "".join(f"{name:>11}" for name in COLUMNS), flush=True)
        for case in CASES:
            if case.name.startswith(arguments.only):
                print(asyncio.run(measure(Path(directory), case, arguments)), flush=True)


if __name__ == "__main__":
    main()
