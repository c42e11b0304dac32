"""All models of an evaluation, as many at once as there are engines. The environment is loaded once.

Each model has a folder with its episodes and with what they were made under. Another evaluation does not mix with
them: it is refused. A model that cannot be evaluated says why in its result, and the next one follows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, closing
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headrace.environments.base import Environment, tasks_of
from headrace.environments.registry import load_environment
from headrace.environments.workers import WorkerPool
from headrace.errors import BadInput, Failure
from headrace.inference.client.engine_client import EngineClient
from headrace.inference.client.errors import EngineCallError
from headrace.launch.saved_config import read_run
from headrace.launch.server_target import key_in
from headrace.orchestrator.shutdown import wait_until_closed
from headrace.rollout.types import Task
from headrace.tools.evaluate.completions import CompletionsFile, Scored
from headrace.tools.evaluate.engines import Team, gpus_per_engine, teams_of, this_machine
from headrace.tools.evaluate.exam import Conditions, Examples, Tags, examine, missing
from headrace.tools.evaluate.models import Candidate
from headrace.tools.evaluate.results import Result, failures, result_of, unmatched_tags
from headrace.tools.evaluate.rollouts import saving_rollouts
from headrace.tools.evaluate.serving import engine_urls, serving
from headrace.transport.files import MARKER, write_atomically

log = logging.getLogger(__name__)

COMPLETIONS = "completions.jsonl"

Progress = Callable[[str, int, int], AbstractContextManager[Callable[[], None]]]
"""Shows how far a model has come, from so many episodes to all of them; called back as each one ends."""


class Evaluation(NamedTuple):
    output: Path
    env: str
    args: dict[str, Any]
    workers: int
    """Processes for an environment that computes; 0: none."""
    num_examples: int | None
    conditions: Conditions
    renderer: dict[str, Any]
    """Options over those of the run that a model is of."""
    serve_options: Sequence[str]
    key_var: str
    engines: int | None = None
    """Engines on this machine at once; unset: one on each GPU, or what the cores have room for."""

    def settings(self, candidate: Candidate, weights: Any, tags: Sequence[Tags]) -> dict[str, Any]:
        """What its episodes depend on. More examples or samples are only more of the same."""
        given = self.conditions
        return {
            "model": str(Path(candidate.source).resolve()) if Path(candidate.source).exists() else candidate.source,
            "weights": weights,
            "environment": self.env,
            "args": self.args,
            "sampling": given.sampling,
            "seq_len": given.seq_len,
            "seed": given.seed,
            "tags": list(tags[0]) if len(tags) == 1 else [list(pair) for pair in tags],
            "correct": given.correct.name,
            **({} if given.correct.solved is None else {"solved": given.correct.solved}),
            "renderer": self.renderer,
            **({} if given.endpoint_model is None else {"endpoint_model": given.endpoint_model}),
        }


class Outcome(NamedTuple):
    result: Result
    scored: list[Scored]
    error: Exception | None = None
    """Why the model could not be evaluated; `result.failure` has its message."""


async def evaluate(evaluation: Evaluation, candidates: Sequence[Candidate], progress: Progress) -> list[Outcome]:
    """Return what each candidate came to, in their order. As many are evaluated at once as there are engines for."""
    environment = load_environment(evaluation.env, evaluation.args)
    examples = examples_of(environment, evaluation)
    started_here = 0
    for candidate in candidates:  # before the first of them takes an hour
        await _settings(evaluation, candidate, examples)
        started_here += candidate.kind != "endpoint" and _is_incomplete(evaluation, candidate, environment, examples)
    teams: asyncio.Queue[Team] = asyncio.Queue()
    if started_here:
        each = gpus_per_engine(evaluation.serve_options)
        for team in teams_of(this_machine(), evaluation.engines, each, started_here):
            teams.put_nowait(team)
    if evaluation.workers:
        environment = WorkerPool(environment, evaluation.env, evaluation.args, size=evaluation.workers)
    try:
        await environment.start()
        async with asyncio.TaskGroup() as group:
            jobs = [
                group.create_task(_outcome(evaluation, candidate, environment, examples, teams, progress))
                for candidate in candidates
            ]
        return [job.result() for job in jobs]
    finally:
        await wait_until_closed({asyncio.create_task(_close(environment)): f"the environment {evaluation.env}"})


async def _close(environment: Environment) -> None:
    await environment.close()


def _is_incomplete(evaluation: Evaluation, candidate: Candidate, environment: Environment, examples: Examples) -> bool:
    """Whether episodes are left to run, so that the candidate needs an engine."""
    path = evaluation.output / candidate.name / COMPLETIONS
    if not path.is_file():
        return True
    with closing(CompletionsFile(path)) as done:
        samples = evaluation.conditions.samples
        return bool(missing(examples.tasks, samples, done, together=environment.scores_groups))


def examples_of(environment: Environment, evaluation: Evaluation) -> Examples:
    """The tasks that are asked for, each once, with the tags around thoughts: those given, else the environment's."""
    tasks = list({task.key: task for task in tasks_of(environment, evaluation.env)}.values())[: evaluation.num_examples]
    given = evaluation.conditions.tags
    return Examples(tasks, {task.key: given or _tags(environment, task) for task in tasks})


def _tags(environment: Environment, task: Task) -> Tags:
    tags: Any = environment.thinking_tags(task)
    if not (isinstance(tags, tuple | list) and len(tags) == 2 and all(isinstance(tag, str) and tag for tag in tags)):
        raise BadInput(
            "must be two texts, the tags around thoughts", key=f"{type(environment).__name__}.thinking_tags", value=tags
        )
    return tags[0], tags[1]


async def _outcome(
    evaluation: Evaluation,
    candidate: Candidate,
    environment: Environment,
    examples: Examples,
    teams: asyncio.Queue[Team],
    progress: Progress,
) -> Outcome:
    """What a model came to; whatever it fails with costs the others nothing."""
    try:
        return await _evaluate(evaluation, candidate, environment, examples, teams, progress)
    except (Failure, EngineCallError) as error:
        failure: Exception = error
        message = str(error)
    except Exception as error:
        log.exception("%s could not be evaluated", candidate.name)
        failure, message = error, f"{type(error).__name__}: {error}"
    return Outcome(Result(candidate.name, candidate.source, failure=message), [], failure)


async def _evaluate(
    evaluation: Evaluation,
    candidate: Candidate,
    environment: Environment,
    examples: Examples,
    teams: asyncio.Queue[Team],
    progress: Progress,
) -> Outcome:
    folder, tasks = evaluation.output / candidate.name, examples.tasks
    settings, given = await _settings(evaluation, candidate, examples), evaluation.conditions
    write_atomically(folder / "settings.json", msgspec.json.format(msgspec.json.encode(settings)) + b"\n")
    with closing(CompletionsFile(folder / COMPLETIONS)) as done:
        if left := missing(tasks, given.samples, done, together=environment.scores_groups):
            total = len(tasks) * given.samples
            renderer = _renderer_of(candidate) | evaluation.renderer
            options = evaluation.serve_options, evaluation.key_var, folder / "serve.log"
            async with _team_for(candidate, teams) as team:
                with progress(candidate.name, total - sum(map(len, left.values())), total) as ended:
                    saving = saving_rollouts(folder / "rollouts", candidate.step or 0)
                    async with serving(candidate, *options, team) as served, saving as save:
                        await examine(environment, examples, served, renderer, given, done, save, ended)
        scored = [done.scored[task.key, sample] for task in tasks for sample in range(given.samples)]
    result = result_of(candidate.name, candidate.source, scored, given.samples, given.correct)
    if all(episode.error for episode in scored):
        reasons = ", ".join(f"{count} {reason}" for reason, count in result.errors.items())
        return Outcome(Result(candidate.name, candidate.source, failure=f"every episode failed: {reasons}"), [])
    result.run, result.step = str(candidate.run or ""), candidate.step
    result.thinking_tags = examples.pairs
    result.notices = list(filter(None, [unmatched_tags(scored, examples.pairs), failures(result)]))
    return Outcome(result, scored)


@asynccontextmanager
async def _team_for(candidate: Candidate, teams: asyncio.Queue[Team]) -> AsyncIterator[Team]:
    """Wait for a team of engines that no other model is using; an endpoint needs none."""
    if candidate.kind == "endpoint":
        yield ()
        return
    team = await teams.get()
    try:
        yield team
    finally:
        teams.put_nowait(team)


async def _settings(evaluation: Evaluation, candidate: Candidate, examples: Examples) -> dict[str, Any]:
    """What its episodes are made under; refused if those that it has were made otherwise."""
    is_served = candidate.kind == "endpoint"
    weights = await _served(candidate, evaluation.key_var) if is_served else _age(candidate)
    return _agreed(evaluation.output / candidate.name, evaluation.settings(candidate, weights, examples.pairs))


def _agreed(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    path = folder / "settings.json"
    if not path.is_file() or not (folder / COMPLETIONS).is_file():
        return settings
    was = msgspec.json.decode(path.read_bytes())
    if settings["weights"] is None:  # a server that is gone, say: what it has answered can still be looked at
        settings["weights"] = was.get("weights")
    now = msgspec.json.decode(msgspec.json.encode(settings))
    changed = [
        BadInput(
            f"the episodes in this folder were made with {was.get(key)!r}",
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


async def _served(endpoint: Candidate, key_var: str) -> list[str] | None:
    """The weights that servers of ours say they have; of others, and if none answers, nothing is known."""
    client = EngineClient(engine_urls(endpoint), api_key=key_in(key_var))
    answers = await client.health_by_url()
    await client.close()
    return sorted({f"{health.model} {health.version}" for health in answers.values()}) or None


def _age(candidate: Candidate) -> int | None:
    """When the newest of its weights were written: a model that was trained further is another one."""
    files = Path(candidate.source).glob(MARKER if candidate.kind == "checkpoint" else "*.safetensors")
    return max((file.stat().st_mtime_ns for file in files), default=None)


def _renderer_of(candidate: Candidate) -> dict[str, Any]:
    """How the run that it is of made prompts; nothing for a model of no run."""
    if candidate.run is None or not (candidate.run / "config.toml").is_file():
        return {}
    config = read_run(candidate.run)
    renderer = config.orchestrator.renderer if hasattr(config, "orchestrator") else config.renderer
    return renderer.model_dump(exclude={"pool_size"}, exclude_none=True)
