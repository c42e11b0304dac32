"""Evaluation of several models on one environment, as many concurrently as there are engines.

Each model has a folder with its episodes and their settings. An evaluation with other settings in the same folder is
refused. A model that cannot be evaluated has the reason in its result, and the others continue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, closing
from typing import Any, NamedTuple

import msgspec

from headrace.environments.base import Environment, tasks_of
from headrace.environments.isolation import fallback_notice
from headrace.environments.registry import load_environment
from headrace.environments.workers import WorkerPool
from headrace.errors import BadInput, Failure
from headrace.inference.client.engine_client import EngineClient
from headrace.inference.client.errors import EngineCallError
from headrace.inference.schema import LatentParams
from headrace.launch.saved_config import read_run
from headrace.launch.server_target import key_in
from headrace.orchestrator.shutdown import wait_until_closed
from headrace.rollout.types import Task
from headrace.tools.evaluate.candidates import Candidate
from headrace.tools.evaluate.completions import CompletionsFile, ScoredEpisode
from headrace.tools.evaluate.episodes import Evaluation, Examples, Tags, missing, run_episodes, save_rollouts
from headrace.tools.evaluate.results import ModelResult, compute_result, notices
from headrace.tools.evaluate.servers import EngineSet, Machine, engine_urls, gpus_per_engine, plan_engine_sets, serving
from headrace.transport.files import write_atomically

log = logging.getLogger(__name__)

COMPLETIONS = "completions.jsonl"

ShowProgress = Callable[[str, int, int], AbstractContextManager[Callable[[], None]]]
"""Shows the progress of a model from its name, finished and total episodes; yields a callback per finished episode."""


class EvaluationOutcome(NamedTuple):
    """The result of one model, and its episodes."""

    result: ModelResult
    scored: list[ScoredEpisode]
    error: Exception | None = None
    """The exception whose message is `result.failure`."""


async def evaluate(
    evaluation: Evaluation, candidates: Sequence[Candidate], progress: ShowProgress
) -> list[EvaluationOutcome]:
    """Evaluate all candidates; return their outcomes in order."""
    environment = load_environment(evaluation.env, evaluation.args)
    if (notice := fallback_notice()) is not None:
        log.warning("%s", notice)
    examples = select_examples(environment, evaluation)
    started_here = 0
    for candidate in candidates:  # refuse invalid settings before the first episode
        await _settings(evaluation, candidate, examples)
        started_here += candidate.kind != "endpoint" and _is_incomplete(evaluation, candidate, environment, examples)
    free_engines: asyncio.Queue[EngineSet] = asyncio.Queue()
    if started_here:
        gpus_each = gpus_per_engine(evaluation.serve_options)
        for engines in plan_engine_sets(Machine.local(), evaluation.engines, gpus_each, started_here):
            free_engines.put_nowait(engines)
    if evaluation.workers:
        environment = WorkerPool(environment, evaluation.env, evaluation.args, size=evaluation.workers)

    async def evaluate_one(candidate: Candidate) -> EvaluationOutcome:
        try:
            return await _evaluate(evaluation, candidate, environment, examples, free_engines, progress)
        except Exception as error:  # the other models continue
            message = str(error)
            if not isinstance(error, Failure | EngineCallError):
                log.exception("%s could not be evaluated", candidate.name)
                message = f"{type(error).__name__}: {error}"
            return EvaluationOutcome(ModelResult(candidate.name, candidate.source, failure=message), [], error)

    try:
        await environment.start()
        async with asyncio.TaskGroup() as group:
            jobs = [group.create_task(evaluate_one(candidate)) for candidate in candidates]
        return [job.result() for job in jobs]
    finally:

        async def close() -> None:
            await environment.close()

        await wait_until_closed({asyncio.create_task(close()): f"the environment {evaluation.env}"})


def _is_incomplete(evaluation: Evaluation, candidate: Candidate, environment: Environment, examples: Examples) -> bool:
    """Return whether episodes are left to run, so that the candidate needs an engine."""
    path = evaluation.output / candidate.name / COMPLETIONS
    if not path.is_file():
        return True
    with closing(CompletionsFile(path)) as done:
        samples = evaluation.samples
        return bool(missing(examples.tasks, samples, done, together=environment.scores_groups))


def select_examples(environment: Environment, evaluation: Evaluation) -> Examples:
    """Return the first tasks without duplicates, and their reasoning tags: those configured, else the environment's."""
    tasks = list({task.key: task for task in tasks_of(environment, evaluation.env)}.values())[: evaluation.num_examples]
    configured = evaluation.tags
    return Examples(tasks, {task.key: configured or _tags(environment, task) for task in tasks})


def _tags(environment: Environment, task: Task) -> Tags:
    tags: Any = environment.thinking_tags(task)
    if not (isinstance(tags, tuple | list) and len(tags) == 2 and all(isinstance(tag, str) and tag for tag in tags)):
        key = f"{type(environment).__name__}.thinking_tags"
        raise BadInput("must be two texts, the tags around reasoning", key=key, value=tags)
    return tags[0], tags[1]


async def _evaluate(
    evaluation: Evaluation,
    candidate: Candidate,
    environment: Environment,
    examples: Examples,
    free_engines: asyncio.Queue[EngineSet],
    progress: ShowProgress,
) -> EvaluationOutcome:
    folder, tasks = evaluation.output / candidate.name, examples.tasks
    settings = await _settings(evaluation, candidate, examples)
    write_atomically(folder / "settings.json", msgspec.json.format(msgspec.json.encode(settings)) + b"\n")
    with closing(CompletionsFile(folder / COMPLETIONS)) as done:
        if left := missing(tasks, evaluation.samples, done, together=environment.scores_groups):
            total = len(tasks) * evaluation.samples
            run = candidate.run
            config: Any = read_run(run) if run is not None and (run / "config.toml").is_file() else None
            options_of_run = config and (config.orchestrator if hasattr(config, "orchestrator") else config).renderer
            renderer = options_of_run.model_dump(exclude={"pool_size"}, exclude_none=True) if options_of_run else {}
            sampling = evaluation.sampling | _latents(evaluation, config, examples)
            own = evaluation._replace(renderer={**renderer, **evaluation.renderer}, sampling=sampling)
            options = evaluation.serve_options, evaluation.key_var, folder / "serve.log"
            async with _acquire_engines(candidate, free_engines) as engines:
                with progress(candidate.name, total - sum(map(len, left.values())), total) as ended:
                    saving = save_rollouts(folder / "rollouts", candidate.step or 0)
                    async with serving(candidate, *options, engines) as served, saving as save:
                        await run_episodes(environment, examples, served, own, done, save, ended)
        scored = [done.scored[task.key, sample] for task in tasks for sample in range(evaluation.samples)]
    result = compute_result(candidate.name, candidate.source, scored, evaluation.samples, evaluation.correct)
    if all(episode.error for episode in scored):
        reasons = ", ".join(f"{count} {reason}" for reason, count in result.errors.items())
        failed = ModelResult(candidate.name, candidate.source, failure=f"every episode failed: {reasons}")
        return EvaluationOutcome(failed, [])
    result.run, result.step = str(candidate.run or ""), candidate.step
    result.thinking_tags = examples.pairs
    result.notices = list(notices(result, scored))
    return EvaluationOutcome(result, scored)


@asynccontextmanager
async def _acquire_engines(candidate: Candidate, free_engines: asyncio.Queue[EngineSet]) -> AsyncIterator[EngineSet]:
    """Wait for a free set of engines; an endpoint needs none."""
    if candidate.kind == "endpoint":
        yield ()
        return
    engines = await free_engines.get()
    try:
        yield engines
    finally:
        free_engines.put_nowait(engines)


async def _settings(evaluation: Evaluation, candidate: Candidate, examples: Examples) -> dict[str, Any]:
    """Return the settings that a candidate's episodes depend on, without the numbers of examples and samples.

    Raises `BadInput` if its saved episodes have others.
    """
    weights: Any  # the newest modification time: a model that was trained further is another model
    model, weights = candidate.on_disk
    if candidate.kind == "endpoint":  # names and versions from Headrace servers; None from others or if they are gone
        client = EngineClient(engine_urls(candidate), api_key=key_in(evaluation.key_var))
        health = await client.health_by_url()
        await client.close()
        weights = sorted({f"{each.model} {each.version}" for each in health.values()}) or None
    tags, correct = examples.pairs, evaluation.correct
    settings = {
        "model": model,
        "weights": weights,
        "environment": evaluation.env,
        "args": evaluation.args,
        "sampling": evaluation.sampling,
        "seq_len": evaluation.seq_len,
        "seed": evaluation.seed,
        "tags": list(tags[0]) if len(tags) == 1 else [list(pair) for pair in tags],
        "correct": correct.name,
        **({} if correct.solved is None else {"solved": correct.solved}),
        "renderer": dict(evaluation.renderer),
        **({} if evaluation.latents is None else {"latents": evaluation.latents}),
        **({} if evaluation.endpoint_model is None else {"endpoint_model": evaluation.endpoint_model}),
    }
    folder = evaluation.output / candidate.name
    path = folder / "settings.json"
    if not path.is_file() or not (folder / COMPLETIONS).is_file():
        return settings
    was = msgspec.json.decode(path.read_bytes())
    if settings["weights"] is None:  # finished episodes of a server that is gone can still be reported
        settings["weights"] = was.get("weights")
    now = msgspec.json.decode(msgspec.json.encode(settings))
    changed = [
        BadInput(
            f"the episodes in this folder were sampled with {was.get(key)!r}",
            key=key,
            value=now[key],
            file=folder,
            fix="Choose another --output, or delete the folder.",
        )
        for key in now
        if was.get(key) != now[key]
    ]
    if changed:
        raise BadInput.combine(changed)
    return settings


def _latents(evaluation: Evaluation, config: Any, examples: Examples) -> dict[str, LatentParams]:
    """Return the sampling parameter of thoughts in latent space: by default as the model's run trained them."""
    trained = None if config is None else config.model.latents
    if not (trained is not None and trained.has_gates if evaluation.latents is None else evaluation.latents):
        return {}
    closing = examples.pairs[0][1]
    return {"latents": LatentParams(until=closing) if trained is None else LatentParams(**trained.request)}
