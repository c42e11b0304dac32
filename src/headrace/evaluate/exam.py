"""The episodes of one model: run as an evaluation in training runs them, many at once, and kept as they end."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headrace.environments.base import Environment
from headrace.errors import BadInput
from headrace.evaluate.completions import CompletionsFile, Thinking, completion_of
from headrace.evaluate.serving import Served
from headrace.inference.client.engine_client import EngineClient
from headrace.orchestrator.dispatcher import Dispatcher, EpisodeRunner
from headrace.orchestrator.processing import EvalProcessing
from headrace.orchestrator.sampler import Sampler
from headrace.orchestrator.signals import Arrival, Episode, Kind
from headrace.rollout.types import Group, Rollout, Task
from headrace.text.hub import model_directory
from headrace.text.renderer import make_renderer
from headrace.text.tokenizer import Tokenizer

RETRY_FOR = 20.0
"""Seconds for which a server that does not answer is asked again."""
REPLY_TIMEOUT = 1800.0


class Conditions(NamedTuple):
    """What is the same for every model."""

    samples: int
    """Episodes per example."""
    sampling: dict[str, Any]
    """`temperature`, `top_p`, `top_k`, `max_tokens`, as far as they are set."""
    seq_len: int | None
    """Tokens of a conversation; unset: what the server takes."""
    seed: int | None
    tags: tuple[str, str]
    """Around thoughts."""
    correct: str | None
    """The reward or metric that says whether an answer is right."""
    concurrency: int
    timeout: float | None
    """Seconds of one episode."""
    tokenizer: str | None
    """The model directory for endpoints that do not name theirs."""


def missing(tasks: Sequence[Task], samples: int, done: CompletionsFile, *, together: bool) -> dict[str, list[int]]:
    """By task key, the samples that are still to be run; all of them where a group is scored `together`."""
    lacking = {task.key: [s for s in range(samples) if done.lacks(task.key, s)] for task in tasks}
    return {key: list(range(samples)) if together else found for key, found in lacking.items() if found}


async def examine(
    environment: Environment,
    tasks: Sequence[Task],
    served: Served,
    renderer: dict[str, Any],
    conditions: Conditions,
    done: CompletionsFile,
    progress: Callable[[], None],
) -> None:
    """Run what is missing; every episode that ends is in the file before `progress` hears of it."""
    client = EngineClient(served.urls, timeout=REPLY_TIMEOUT, retry_for=RETRY_FOR, api_key=served.key)
    try:
        sampler = await _sampler(client, served, renderer, conditions)
        prompter = sampler.prompter
        thinking = Thinking(*conditions.tags, prompter.raw, lambda text: len(prompter.tokenizer.encode(text)))

        def keep(key: str, sample: int, rollouts: Sequence[Rollout]) -> None:
            done.append(completion_of(key, sample, rollouts, thinking, conditions.correct))
            progress()

        exam = Exam(environment, tasks[0].env, sampler, conditions.timeout, conditions.concurrency, keep)
        left = missing(tasks, conditions.samples, done, together=environment.scores_groups)
        await exam.run([(task, left[task.key]) for task in tasks if task.key in left])
    finally:
        await client.close()


async def _sampler(client: EngineClient, served: Served, renderer: dict[str, Any], conditions: Conditions) -> Sampler:
    engines = await client.wait_ready(RETRY_FOR)
    longest = min(engine.max_model_len for engine in engines)
    if conditions.seq_len is not None and conditions.seq_len > longest:
        raise BadInput(f"--seq-len is {conditions.seq_len}, but the server takes at most {longest} tokens")
    directory = _directory(served.directory or conditions.tokenizer, engines[0].model)
    tokenizer = Tokenizer(directory)
    try:
        made = make_renderer(directory, tokenizer, **renderer)
    except ValueError as error:
        raise BadInput(f"its chat format cannot be written: {error}") from error
    seq_len = conditions.seq_len or longest
    return Sampler(client, made, tokenizer, seq_len, **conditions.sampling, seed=conditions.seed)


def _directory(given: str | None, told: str) -> Path:
    """Where the tokenizer is: in what was given, else in what the server calls its model."""
    if given is None and not Path(told).is_dir():
        raise BadInput(f"the server calls its model {told}, which is no directory here: give it with --tokenizer DIR")
    return model_directory(given or told)


class Exam:
    """Runs episodes, at most so many at once; `keep` gets each one's rollouts when they are scored."""

    def __init__(
        self,
        environment: Environment,
        env: str,
        line: Sampler,
        timeout: float | None,
        concurrency: int,
        keep: Callable[[str, int, Sequence[Rollout]], None],
    ) -> None:
        runner = EpisodeRunner(environment, line, timeout)
        self._together = environment.scores_groups
        self._dispatcher = Dispatcher({(Kind.EVAL, env): runner}, self._arrive)
        self._processing = EvalProcessing({env: environment}, {env: timeout})
        self._permits = asyncio.Semaphore(concurrency)
        self._keep = keep
        self._ids = itertools.count()
        self._running: dict[int, asyncio.Future[list[Rollout]]] = {}

    async def run(self, work: Sequence[tuple[Task, Sequence[int]]]) -> None:
        groups = [
            (Group(f"eval-{task.key}", task, len(samples), 0, together=self._together), samples)
            for task, samples in work
        ]
        jobs = [asyncio.create_task(self._run_group(group, samples)) for group, samples in groups]
        try:
            await asyncio.gather(*jobs)
        finally:
            for job in jobs:
                job.cancel()
            await self._dispatcher.close()

    async def _run_group(self, group: Group, samples: Sequence[int]) -> None:
        if not self._together:
            await asyncio.gather(*(self._run_and_keep(group, sample) for sample in samples))
            return
        arrived = await asyncio.gather(*(self._run_episode(group, sample) for sample in samples))
        await self._processing.process_group(group, [rollout for rollouts in arrived for rollout in rollouts])
        for sample, rollouts in zip(samples, arrived, strict=True):
            self._keep(group.task.key, sample, rollouts)

    async def _run_and_keep(self, group: Group, sample: int) -> None:
        self._keep(group.task.key, sample, await self._run_episode(group, sample))

    async def _run_episode(self, group: Group, sample: int) -> list[Rollout]:
        async with self._permits:
            episode = Episode(next(self._ids), Kind.EVAL, group, sample)
            self._running[episode.id] = asyncio.get_running_loop().create_future()
            self._dispatcher.start(episode)
            return await self._running[episode.id]

    def _arrive(self, arrival: Arrival) -> None:
        future = self._running.pop(arrival.episode.id)
        if not future.done():  # else the evaluation is being stopped
            future.set_result(arrival.rollouts)
