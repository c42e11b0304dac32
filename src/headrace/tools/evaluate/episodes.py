"""Episodes of one model: run concurrently, as evaluations during training, and saved when they end."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import MappingProxyType
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
from headrace.tools.evaluate.completions import (
    CompletionsFile,
    Correctness,
    Thinking,
    counted_rollouts,
    make_completion,
)
from headrace.tools.evaluate.servers import ServedModelUrls, TextContexts, find_model
from headrace.transport.rollout_files import write_eval_rollouts
from headrace.transport.run_dir import RolloutKind

log = logging.getLogger(__name__)

RETRY_FOR_S = 20.0
"""Time for which requests to a server that does not respond are retried."""
REPLY_TIMEOUT_S = 1800.0
WRITE_INTERVAL_S = 60.0
"""Time between two writes of rollouts: a kill loses what came after the last one."""

Tags = tuple[str, str]
"""The texts before and after the reasoning of a reply."""


class Examples(NamedTuple):
    """The tasks of all models."""

    tasks: Sequence[Task]
    tags: Mapping[str, Tags]
    """Reasoning tags by task key."""

    @property
    def pairs(self) -> list[Tags]:
        """All pairs of tags without duplicates, in the order of the tasks."""
        return list(dict.fromkeys(self.tags.values()))


class Evaluation(NamedTuple):
    """The settings of an evaluation, the same for every model."""

    output: Path
    env: str
    args: dict[str, Any]
    sampling: dict[str, Any]
    """Those of `temperature`, `top_p`, `top_k`, `min_p`, `max_tokens` that are set."""
    samples: int = 1
    """Episodes per example."""
    num_examples: int | None = None
    seq_len: int | None = None
    """Maximum tokens of a conversation; unset: the server's maximum."""
    seed: int | None = None
    tags: Tags | None = None
    """Reasoning tags; unset: those of the environment."""
    correct: Correctness = Correctness()
    concurrency: int = 256
    """Concurrent episodes per engine."""
    timeout: float | None = None
    """Timeout of an episode in seconds."""
    workers: int = 0
    """Worker processes of the environment; 0: none."""
    renderer: Mapping[str, Any] = MappingProxyType({})
    """Options that override those of a model's run."""
    serve_options: Sequence[str] = ()
    engines: int | None = None
    """Concurrent engines on this machine; unset: one per GPU, or as many as the cores allow."""
    key_var: str = "HEADRACE_API_KEY"
    """The environment variable with the API key of endpoints."""
    tokenizer: str | None = None
    """The model directory for endpoints whose model name is not a local directory."""
    endpoint_model: str | None = None
    """The model of an endpoint that has several."""
    latents: bool | None = None
    """Whether replies think in latent space; unset: as in the model's run."""


def missing(tasks: Sequence[Task], samples: int, done: CompletionsFile, *, together: bool) -> dict[str, list[int]]:
    """Return the sample indices left to run by task key; all samples of a task if groups are scored `together`."""
    succeeded = {place for place, episode in done.scored.items() if not episode.error}
    lacking = {task.key: [s for s in range(samples) if (task.key, s) not in succeeded] for task in tasks}
    return {key: list(range(samples)) if together else indices for key, indices in lacking.items() if indices}


class ModelAccess(NamedTuple):
    """The contexts of a model's episodes, and functions that measure its replies."""

    contexts: ContextFactory
    thinking: Thinking
    count_tokens: Callable[[Episode, Sequence[Rollout]], int | None]
    """Returns the number of tokens of an episode's replies; None if it is unknown."""


async def run_episodes(
    environment: Environment,
    examples: Examples,
    served: ServedModelUrls,
    evaluation: Evaluation,
    done: CompletionsFile,
    save: Callable[[Sequence[Rollout]], None],
    progress: Callable[[], None],
) -> None:
    """Run the missing episodes. Each that ends is appended to `done` and saved before `progress` is called."""
    async with _connect(served, evaluation) as access:

        def keep(episode: Episode, rollouts: Sequence[Rollout]) -> None:
            key, tokens = episode.group.task.key, access.count_tokens(episode, rollouts)
            tags, correct = examples.tags[key], evaluation.correct
            done.append(make_completion(key, episode.index, rollouts, access.thinking, tags, correct, tokens))
            save(rollouts)
            progress()

        tasks = examples.tasks
        concurrency = evaluation.concurrency * len(served.urls)
        run = EpisodeRun(environment, tasks[0].env, access.contexts, evaluation.timeout, concurrency, keep)
        left = missing(tasks, evaluation.samples, done, together=environment.scores_groups)
        await run.run([(task, left[task.key]) for task in tasks if task.key in left])


@asynccontextmanager
async def _connect(served: ServedModelUrls, evaluation: Evaluation) -> AsyncIterator[ModelAccess]:
    """Connect with token ids to Headrace servers, and with chat completions to others."""
    client = EngineClient(served.urls, timeout=REPLY_TIMEOUT_S, retry_for=RETRY_FOR_S, api_key=served.key)
    try:
        try:
            engines = await client.wait_ready(RETRY_FOR_S)
        except (EngineRejected, EngineFailed):
            if not served.chat_urls:
                raise
            engines = None  # the server does not have the Headrace API
        if engines is not None:
            yield _token_access(_make_sampler(client, engines, served, evaluation))
            return
    finally:
        await client.close()
    model = await _connect_chat(served, evaluation)
    try:
        yield _text_access(model, evaluation)
    finally:
        await model.close()


def _make_sampler(
    client: EngineClient, engines: Sequence[Health], served: ServedModelUrls, evaluation: Evaluation
) -> Sampler:
    max_model_len = min(engine.max_model_len for engine in engines)
    if evaluation.seq_len is not None and evaluation.seq_len > max_model_len:
        fact, fix = f"the server takes at most {max_model_len} tokens", f"Lower it to {max_model_len}, or leave it out."
        raise BadInput(fact, key="--seq-len", value=evaluation.seq_len, fix=fix)
    configured, served_name = served.directory or evaluation.tokenizer, engines[0].root or engines[0].model
    if configured is None and not Path(served_name).is_dir():
        fact = f"the server calls its model {served_name}, which is not a directory on this machine"
        raise BadInput(fact, key="--tokenizer", fix="Set the model's directory with --tokenizer DIR.")
    directory = model_directory(configured or served_name)
    tokenizer = Tokenizer(directory)
    try:
        chat_format = make_renderer(directory, tokenizer, **evaluation.renderer)
    except ValueError as error:
        fact = f"the chat format cannot be rendered: {error}"
        raise BadInput(fact, key="--renderer", value=evaluation.renderer or None) from error
    seq_len = evaluation.seq_len or max_model_len
    return Sampler(client, chat_format, tokenizer, seq_len, **evaluation.sampling, seed=evaluation.seed)


def _token_access(sampler: Sampler) -> ModelAccess:
    """Return the access to a model through token ids."""
    prompter = sampler.prompter

    def written(rollout: Rollout) -> list[str]:
        return [
            prompter.parser.raw_text(turn.prompt_ids.tolist(), turn.completion_ids.tolist()) for turn in rollout.turns
        ]

    def tokens(episode: Episode, rollouts: Sequence[Rollout]) -> int:
        return sum(rollout.completion_tokens for rollout in counted_rollouts(rollouts))

    thinking = Thinking(written, lambda text: len(prompter.tokenizer.encode(text)))
    return ModelAccess(sampler, thinking, tokens)


async def _connect_chat(served: ServedModelUrls, evaluation: Evaluation) -> ServedModel:
    """Return the model of servers that have only chat completions, after a test request."""
    where = ", ".join(served.chat_urls)
    for option, value in (("--renderer", evaluation.renderer or None), ("--seq-len", evaluation.seq_len)):
        if value is not None:
            fact = f"{where} has only chat completions, without token ids"
            raise BadInput(fact, key=option, value=value, fix="Leave it out.")
    name = await find_model(served.chat_urls, served.key_var, evaluation.endpoint_model, RETRY_FOR_S)
    model = ServedModel(
        name, served.chat_urls, api_key_var=served.key_var, timeout=REPLY_TIMEOUT_S, retry_for=RETRY_FOR_S
    )
    sampling = {key: value for key, value in evaluation.sampling.items() if key != "max_tokens"}
    await model.check_chat(sampling_keys(**sampling), 0)
    log.info("%s has only chat completions: token counts come from its usage reports", where)
    return model


def _text_access(model: ServedModel, evaluation: Evaluation) -> ModelAccess:
    """Return the access to a model through chat completions, which return texts."""
    contexts = TextContexts(model, evaluation.sampling, evaluation.seed)
    tokenizer = None if evaluation.tokenizer is None else Tokenizer(model_directory(evaluation.tokenizer))
    count = None if tokenizer is None else lambda text: len(tokenizer.encode(text))

    def written(rollout: Rollout) -> list[str]:
        """Return the model's own replies, the last ones: a prompt may contain replies of others."""
        replies = [message for message in rollout.messages if message.get("role") == "assistant"]
        own = replies[len(replies) - len(rollout.turns) :]
        return [str(message.get("content") or "") for message in own]

    def tokens(episode: Episode, rollouts: Sequence[Rollout]) -> int | None:
        reported = contexts.tokens.pop(episode.name, None)
        if reported is not None and len(counted_rollouts(rollouts)) == len(rollouts):  # else other agents are included
            return reported
        texts = [text for rollout in counted_rollouts(rollouts) for text in written(rollout)]
        return None if count is None else sum(map(count, texts))

    return ModelAccess(contexts, Thinking(written, count), tokens)


class EpisodeRun:
    """Runs at most `concurrency` episodes concurrently; `keep` is called with the scored rollouts of each."""

    def __init__(
        self,
        environment: Environment,
        env: str,
        contexts: ContextFactory,
        timeout: float | None,
        concurrency: int,
        keep: Callable[[Episode, Sequence[Rollout]], None],
    ) -> None:
        text_only = isinstance(contexts, TextContexts)
        runner = EpisodeRunner(environment, contexts, timeout, text_only=text_only)
        self._together = environment.scores_groups
        self._dispatcher = Dispatcher({(Kind.EVAL, env): runner}, self._arrive)
        self._processing = EvalProcessing({env: environment}, {env: timeout}, text_only=text_only)
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
        arrived = await asyncio.gather(*map(self._run_episode, episodes))
        if self._together:
            await self._processing.process_group(group, [rollout for rollouts in arrived for rollout in rollouts])
            for episode, rollouts in zip(episodes, arrived, strict=True):
                self._keep(episode, rollouts)

    async def _run_episode(self, episode: Episode) -> list[Rollout]:
        """Return the rollouts of an episode, which are kept at once unless its group is scored first."""
        async with self._permits:
            self._running[episode.id] = asyncio.get_running_loop().create_future()
            self._dispatcher.start(episode)
            rollouts = await self._running[episode.id]
        if not self._together:
            self._keep(episode, rollouts)
        return rollouts

    def _arrive(self, arrival: Arrival) -> None:
        future = self._running.pop(arrival.episode.id)
        if not future.done():  # done if the evaluation is being stopped
            future.set_result(arrival.rollouts)


@asynccontextmanager
async def save_rollouts(directory: Path, step: int) -> AsyncIterator[Callable[[Sequence[Rollout]], None]]:
    """Yield a function that saves the rollouts of an episode to `eval-step-N.parquet`, as evaluations of a run.

    All rollouts are written when the context ends. Existing rows of other episodes stay.
    """
    path = RolloutKind.EVAL.path(directory, step)
    waiting: list[Rollout] = []
    ended = asyncio.Event()

    async def write() -> None:
        if waiting:
            batch = waiting.copy()
            waiting.clear()
            await asyncio.to_thread(write_eval_rollouts, path, step, batch, add=True)

    async def write_often() -> None:
        while not ended.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), WRITE_INTERVAL_S)
            await write()

    writing = asyncio.create_task(write_often())
    try:
        yield waiting.extend
    finally:
        ended.set()
        await writing
