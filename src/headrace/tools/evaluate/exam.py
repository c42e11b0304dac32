"""The episodes of one model: run as an evaluation in training runs them, many at once, and kept as they end."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from headrace.environments.base import Environment
from headrace.errors import BadInput
from headrace.inference.client.engine_client import EngineClient
from headrace.inference.client.errors import EngineFailed, EngineRejected
from headrace.inference.client.served_model import ServedModel, sampling_keys
from headrace.inference.schema import Health
from headrace.orchestrator.dispatcher import ContextFactory, Dispatcher, EpisodeRunner
from headrace.orchestrator.processing import EvalProcessing
from headrace.orchestrator.sampler import Sampler
from headrace.orchestrator.signals import Arrival, Episode, Kind
from headrace.rollout.types import Group, Rollout, Task
from headrace.text.hub import model_directory
from headrace.text.renderer import make_renderer
from headrace.text.tokenizer import Tokenizer
from headrace.tools.evaluate.completions import CompletionsFile, Correctness, Thinking, completion_of, counted_of
from headrace.tools.evaluate.serving import Served
from headrace.tools.evaluate.words import WordsLine, find_model

log = logging.getLogger(__name__)

RETRY_FOR = 20.0
"""Seconds for which a server that does not answer is asked again."""
REPLY_TIMEOUT = 1800.0


Tags = tuple[str, str]
"""What stands before and after the thoughts of a reply."""


class Examples(NamedTuple):
    """What every model is asked."""

    tasks: Sequence[Task]
    tags: Mapping[str, Tags]
    """By task key, those around thoughts."""

    @property
    def pairs(self) -> list[Tags]:
        """Every pair of tags once, in the order of the tasks."""
        return list(dict.fromkeys(self.tags.values()))


class Conditions(NamedTuple):
    """What is the same for every model."""

    samples: int
    """Episodes per example."""
    sampling: dict[str, Any]
    """`temperature`, `top_p`, `top_k`, `min_p`, `max_tokens`, as far as they are set."""
    seq_len: int | None
    """Tokens of a conversation; unset: what the server takes."""
    seed: int | None
    tags: Tags | None
    """Around thoughts; unset: those of the environment."""
    correct: Correctness
    concurrency: int
    """Episodes at once on each engine."""
    timeout: float | None
    """Seconds of one episode."""
    tokenizer: str | None
    """The model directory for endpoints that do not name theirs."""
    endpoint_model: str | None = None
    """Which model of an endpoint that has several."""


def missing(tasks: Sequence[Task], samples: int, done: CompletionsFile, *, together: bool) -> dict[str, list[int]]:
    """By task key, the samples that are still to be run; all of them where a group is scored `together`."""
    lacking = {task.key: [s for s in range(samples) if done.lacks(task.key, s)] for task in tasks}
    return {key: list(range(samples)) if together else found for key, found in lacking.items() if found}


class Way(NamedTuple):
    """How episodes reach a model, and how what it wrote is read and measured."""

    line: ContextFactory
    thinking: Thinking
    tokens: Callable[[Episode, Sequence[Rollout]], int | None]
    """What an episode's replies took; None where nobody knows."""


async def examine(
    environment: Environment,
    examples: Examples,
    served: Served,
    renderer: dict[str, Any],
    conditions: Conditions,
    done: CompletionsFile,
    save: Callable[[Sequence[Rollout]], None],
    progress: Callable[[], None],
) -> None:
    """Run what is missing. Every episode that ends is in `done`, and goes to `save`, before `progress` hears of it."""
    async with _way(served, renderer, conditions) as way:

        def keep(episode: Episode, rollouts: Sequence[Rollout]) -> None:
            key, tokens = episode.group.task.key, way.tokens(episode, rollouts)
            tags, correct = examples.tags[key], conditions.correct
            done.append(completion_of(key, episode.index, rollouts, way.thinking, tags, correct, tokens))
            save(rollouts)
            progress()

        tasks = examples.tasks
        at_once = conditions.concurrency * len(served.urls)
        exam = Exam(environment, tasks[0].env, way.line, conditions.timeout, at_once, keep)
        left = missing(tasks, conditions.samples, done, together=environment.scores_groups)
        await exam.run([(task, left[task.key]) for task in tasks if task.key in left])


@asynccontextmanager
async def _way(served: Served, renderer: dict[str, Any], conditions: Conditions) -> AsyncIterator[Way]:
    """In tokens where the servers can, as ours do; else in words."""
    client = EngineClient(served.urls, timeout=REPLY_TIMEOUT, retry_for=RETRY_FOR, api_key=served.key)
    try:
        engines = await _engines(client, served)
        if engines is not None:
            yield _in_tokens(_sampler(client, engines, served, renderer, conditions), conditions)
            return
    finally:
        await client.close()
    model = await _words_model(served, renderer, conditions)
    try:
        yield _in_words(model, conditions)
    finally:
        await model.close()


async def _engines(client: EngineClient, served: Served) -> list[Health] | None:
    """None where somebody answers who is none of ours."""
    try:
        return await client.wait_ready(RETRY_FOR)
    except (EngineRejected, EngineFailed):
        if not served.chat_urls:
            raise
        return None


def _sampler(
    client: EngineClient,
    engines: Sequence[Health],
    served: Served,
    renderer: dict[str, Any],
    conditions: Conditions,
) -> Sampler:
    longest = min(engine.max_model_len for engine in engines)
    if conditions.seq_len is not None and conditions.seq_len > longest:
        raise BadInput(
            f"the server takes at most {longest} tokens",
            key="--seq-len",
            value=conditions.seq_len,
            fix=f"Lower it to {longest}, or leave it out.",
        )
    directory = _directory(served.directory or conditions.tokenizer, engines[0].model)
    tokenizer = Tokenizer(directory)
    try:
        made = make_renderer(directory, tokenizer, **renderer)
    except ValueError as error:
        raise BadInput(
            f"the chat format cannot be rendered: {error}", key="--renderer", value=renderer or None
        ) from error
    seq_len = conditions.seq_len or longest
    return Sampler(client, made, tokenizer, seq_len, **conditions.sampling, seed=conditions.seed)


def _in_tokens(sampler: Sampler, conditions: Conditions) -> Way:
    prompter = sampler.prompter

    def written(rollout: Rollout) -> list[str]:
        return [
            prompter.parser.raw_text(turn.prompt_ids.tolist(), turn.completion_ids.tolist()) for turn in rollout.turns
        ]

    def tokens(episode: Episode, rollouts: Sequence[Rollout]) -> int:
        return sum(rollout.completion_tokens for rollout in counted_of(rollouts))

    thinking = Thinking(written, lambda text: len(prompter.tokenizer.encode(text)))
    return Way(sampler, thinking, tokens)


async def _words_model(served: Served, renderer: dict[str, Any], conditions: Conditions) -> ServedModel:
    """The model of servers that deal in words alone, once it has answered."""
    where = ", ".join(served.chat_urls)
    if conditions.seq_len is not None or renderer:
        option, value = ("--renderer", renderer) if renderer else ("--seq-len", conditions.seq_len)
        raise BadInput(
            f"{where} has chat completions alone, without token ids", key=option, value=value, fix="Leave it out."
        )
    name = await find_model(served.chat_urls, served.key_var, conditions.endpoint_model, RETRY_FOR)
    model = ServedModel(name, served.chat_urls, api_key_var=served.key_var, timeout=REPLY_TIMEOUT, retry_for=RETRY_FOR)
    sampling = {key: value for key, value in conditions.sampling.items() if key != "max_tokens"}
    await model.check_chat(sampling_keys(**sampling), 0)
    log.info("%s deals in words alone: lengths in tokens are those that it tells", where)
    return model


def _in_words(model: ServedModel, conditions: Conditions) -> Way:
    line = WordsLine(model, conditions.sampling, conditions.seed)
    tokenizer = None if conditions.tokenizer is None else Tokenizer(model_directory(conditions.tokenizer))
    count = None if tokenizer is None else lambda text: len(tokenizer.encode(text))

    def written(rollout: Rollout) -> list[str]:
        """A prompt may have replies of others in it: the model's own are the last ones."""
        replies = [message for message in rollout.messages if message.get("role") == "assistant"]
        own = replies[len(replies) - len(rollout.turns) :]
        return [str(message.get("content") or "") for message in own]

    def tokens(episode: Episode, rollouts: Sequence[Rollout]) -> int | None:
        told = line.tokens.pop(episode.name, None)
        if told is not None and len(counted_of(rollouts)) == len(rollouts):  # else it is of others, too
            return told
        texts = [text for rollout in counted_of(rollouts) for text in written(rollout)]
        return None if count is None else sum(map(count, texts))

    return Way(line, Thinking(written, count), tokens)


def _directory(given: str | None, served_name: str) -> Path:
    """Return the directory of the tokenizer: what was given, else what the server calls its model."""
    if given is None and not Path(served_name).is_dir():
        raise BadInput(
            f"the server calls its model {served_name}, which is not a directory on this machine",
            key="--tokenizer",
            fix="Give the model's directory with --tokenizer DIR.",
        )
    return model_directory(given or served_name)


class Exam:
    """Runs episodes, at most so many at once; `keep` gets each one's rollouts when they are scored."""

    def __init__(
        self,
        environment: Environment,
        env: str,
        line: ContextFactory,
        timeout: float | None,
        concurrency: int,
        keep: Callable[[Episode, Sequence[Rollout]], None],
    ) -> None:
        in_words = isinstance(line, WordsLine)
        runner = EpisodeRunner(environment, line, timeout, text_only=in_words)
        self._together = environment.scores_groups
        self._dispatcher = Dispatcher({(Kind.EVAL, env): runner}, self._arrive)
        self._processing = EvalProcessing({env: environment}, {env: timeout}, text_only=in_words)
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
        episodes = [Episode(next(self._ids), Kind.EVAL, group, sample) for sample in samples]
        if not self._together:
            await asyncio.gather(*map(self._run_and_keep, episodes))
            return
        arrived = await asyncio.gather(*map(self._run_episode, episodes))
        await self._processing.process_group(group, [rollout for rollouts in arrived for rollout in rollouts])
        for episode, rollouts in zip(episodes, arrived, strict=True):
            self._keep(episode, rollouts)

    async def _run_and_keep(self, episode: Episode) -> None:
        self._keep(episode, await self._run_episode(episode))

    async def _run_episode(self, episode: Episode) -> list[Rollout]:
        async with self._permits:
            self._running[episode.id] = asyncio.get_running_loop().create_future()
            self._dispatcher.start(episode)
            return await self._running[episode.id]

    def _arrive(self, arrival: Arrival) -> None:
        future = self._running.pop(arrival.episode.id)
        if not future.done():  # else the evaluation is being stopped
            future.set_result(arrival.rollouts)
