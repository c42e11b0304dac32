"""A run in one process: the real sampler, engine, environment, algorithm, filters, packing and learner, in lock step.

It reads the run files of `headrace rl`. Sampling and training take turns, so that a seed repeats a run, and a batch is
sampled with the weights of exactly `staleness` updates before. Left out on purpose: processes, HTTP, files of weights
and batches, and everything that only matters when parts of a run are concurrent.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, cast

import numpy as np

from headrace.algorithms.base import Host, MakeContext
from headrace.environments.base import Environment, tasks_of
from headrace.environments.registry import load_environment
from headrace.inference.client.engine_client import EngineClient
from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.loading import eos_token_ids, load_model
from headrace.inference.schema import Completion, SamplingParams, Scores, WeightVersionSpan
from headrace.inference.weights.published import PublishedWeights
from headrace.launch.origin import resolve
from headrace.launch.saved_config import pin
from headrace.orchestrator.crediting import PolicyReference
from headrace.orchestrator.processing import Filter, GroupScorer, TrainProcessing
from headrace.orchestrator.sampler import Sampler
from headrace.orchestrator.signals import TrainBatch
from headrace.rollout.checks import check_rollout
from headrace.rollout.types import Group, Rollout, Task
from headrace.runfile.reading import load
from headrace.runfile.run import RunConfig
from headrace.text.renderer import make_renderer
from headrace.text.tokenizer import Tokenizer
from headrace.trainer.learner import Learner
from headrace.trainer.rl import losses

T = TypeVar("T")
Played = Sequence[Sequence[Rollout]]
"""The rollouts of each evaluated task."""

MAX_RUNNING = 256
"""Requests that an engine decodes at once."""


@dataclass(frozen=True)
class Setting:
    """One contender: run files, keys over them, and what only a miniature can choose."""

    files: tuple[str, ...]
    keys: Mapping[str, Any] = field(default_factory=dict)
    staleness: int = 0
    """Updates between the weights that sample a batch and those that it is trained on."""
    teacher: str = ""
    """The SFT run file of the frozen model that the algorithm refers to."""

    def load(self, seed: int) -> RunConfig:
        for file in self.files:
            if (folder := str(Path(file).resolve().parent)) not in sys.path:
                sys.path.append(folder)  # as a run does
        overrides = [word for key, value in self.keys.items() for word in (f"--{key}", str(value))]
        return load(RunConfig, [Path(file) for file in self.files], [*overrides, "--seed", str(seed)])[0]


class InProcessEngine:
    """An engine behind the interface of `EngineClient`; `Miniature.run_until` makes its steps."""

    def __init__(self, directory: Path, tokenizer: Tokenizer, max_model_len: int, seed: int) -> None:
        model = load_model(directory)
        stops = eos_token_ids(model, tokenizer.eos_token_id)
        self.engine = Engine(
            model, max_model_len=max_model_len, max_running=MAX_RUNNING, eos_token_ids=stops, seed=seed
        )

    def join(self, session: str) -> None:
        """Do nothing: there is one engine."""

    leave = join

    async def generate(
        self, token_ids: list[int], sampling: SamplingParams, cache_salt: str | None = None, session: str | None = None
    ) -> Completion:
        result = await asyncio.wrap_future(self.engine.submit(token_ids, sampling).future)
        spans = [WeightVersionSpan(str(version), start, end) for version, start, end in result.version_spans]
        return Completion(result.token_ids, result.logprobs, spans, result.finish_reason)

    async def score(self, token_ids: list[int], temperature: float = 1.0, *, urgent: bool = False) -> Scores:
        params = SamplingParams(temperature=temperature, max_tokens=1, prompt_logprobs=0)
        result = await asyncio.wrap_future(self.engine.submit(token_ids, params, urgent=urgent).future)
        assert result.prompt_logprobs is not None
        return Scores(result.prompt_logprobs, self.engine.version)


class Miniature:
    """A policy in training. One object makes one run."""

    def __init__(self, setting: Setting, seed: int, scratch: Path) -> None:
        config = setting.load(seed)
        self.config = config = pin(config, scratch, resolve(config.model))
        orchestrator, self.seed, self.seq_len = config.orchestrator, seed, config.trainer.seq_len
        directory = Path(config.model.name)
        self.tokenizer = Tokenizer(directory)
        renderer = config.orchestrator.renderer
        self.renderer = make_renderer(
            directory, self.tokenizer, renderer.name, renderer.enable_thinking, renderer.thinking_retention
        )
        self.learner = Learner(config.trainer, losses(config.trainer), scratch / "checkpoints")
        self.policy = InProcessEngine(directory, self.tokenizer, 3 * self.seq_len, seed)  # hints precede samples
        self.engines = [self.policy.engine]
        self.versions = deque([self._copy()], maxlen=setting.staleness + 1)
        (env,) = orchestrator.train.env
        self.environment = load_environment(env.id, env.args)
        self.tasks = tasks_of(self.environment, env.name)
        self.sampling = env.sampling.over(orchestrator.train.sampling)
        self.draws = random.Random(f"draws-{seed}")
        teacher = setting.teacher and Path(resolve(config.model.__class__(sft=Path(setting.teacher))))
        self.algorithm = orchestrator.algo_of(env).make(MakeContext(self.seq_len, lambda model: self._frozen(teacher)))
        policy, temperature = PolicyReference(cast(EngineClient, self.policy)), self.sampling.temperature
        self.algorithm.host = Host(env.name, policy, self.renderer, self.tokenizer, self.seq_len, seed, temperature)
        self.processing = TrainProcessing(
            {env.name: self.algorithm}, {env.name: self.environment}, *self._filters(), self.seq_len
        )

    def _frozen(self, directory: Path) -> PolicyReference:
        client = InProcessEngine(directory, self.tokenizer, 3 * self.seq_len, self.seed)
        self.engines.append(client.engine)
        return PolicyReference(cast(EngineClient, client))

    def _filters(self) -> list[list[Filter]]:
        size, config = self.policy.engine.vocab_size, self.config.orchestrator
        slots = (config.pre_batch_filters, config.post_batch_filters)
        return [[Filter(entry.label, entry.make_test(size), entry.enforce) for entry in entries] for entries in slots]

    def _copy(self) -> PublishedWeights:
        tensors = {name: tensor.clone() for name, tensor in self.learner.model.tensors().items()}
        return PublishedWeights(self.learner.version, "", tensors)

    async def run_until(self, work: Awaitable[T]) -> T:
        """Step the engines until `work`, which waits for them, is done."""
        task = asyncio.ensure_future(work)
        while not task.done():
            for engine in self.engines:
                if engine.has_work:
                    engine.step()
            await asyncio.sleep(0)
        return task.result()

    async def play(
        self, environment: Environment, tasks: Sequence[Task], group_size: int, sampling: Any, name: str
    ) -> list[tuple[Group, list[Rollout]]]:
        """Return a group of rollouts of each task."""
        options = sampling.model_dump(exclude_none=True)
        client = cast(EngineClient, self.policy)
        sampler = Sampler(client, self.renderer, self.tokenizer, self.seq_len, **options)
        version = self.learner.state.step
        groups = [Group(f"{name}-{n}", task, group_size, version, n) for n, task in enumerate(tasks)]

        async def episode(group: Group, index: int) -> Rollout:
            context = sampler.open(group.id, f"{group.id}-{index}")
            (rollout,) = await environment.run(group.task, context)
            rollout.env, rollout.task_key, rollout.group_id = group.task.env, group.task.key, group.id
            rollout.draw_id, rollout.episode = group.draw_id, index
            check_rollout(rollout, scored_later=environment.scores_groups)
            return rollout

        episodes = asyncio.gather(*[episode(group, index) for group in groups for index in range(group_size)])
        rollouts = await self.run_until(episodes)
        return [(group, rollouts[n * group_size :][:group_size]) for n, group in enumerate(groups)]

    async def step(self, step: int) -> dict[str, float]:
        """Sample a batch, credit it, train on it; return what the algorithm counted."""
        config = self.config.orchestrator
        tasks = self.draws.sample(self.tasks, config.batch_size // config.group_size)
        self.policy.engine.install(self.versions[0])
        played = await self.play(self.environment, tasks, config.group_size, self.sampling, f"step-{step}")
        scored = []
        for group, rollouts in played:
            for rollout in rollouts:
                await self.processing.process_rollout(rollout, group.task)
            scored.append(await self.processing.process_group(group, rollouts))
        batch = TrainBatch(scored)
        await self.run_until(self.processing.process_batch(batch))
        samples = [sample for rollout in batch.kept for sample in rollout.samples]
        counts = {name.rpartition("/")[2]: value for name, value in batch.tallies.items()}
        if samples:  # else no rollout has an advantage, and the weights stay
            result = self.learner.learn(samples)
            assert result is not None
            counts |= result.metrics
        self.versions.append(self._copy())
        return counts | {"train/reward": float(np.mean([r.reward for _, rollouts in played for r in rollouts]))}

    async def evaluate(self) -> Played:
        """Return the rollouts of the newest weights on the tasks of the evaluation environment."""
        config = self.config.orchestrator.eval
        (env,) = config.env
        environment = load_environment(env.id, env.args)
        await environment.start()
        tasks = tasks_of(environment, env.name)[: config.num_examples]
        self.policy.engine.install(self.versions[-1])
        size, sampling = env.group_size or config.group_size, env.sampling.over(config.sampling)
        played = await self.play(environment, tasks, size, sampling, "eval")
        scorer = GroupScorer({env.name: environment}, {})
        for group, rollouts in played:
            await scorer.apply(group, rollouts)
        await environment.close()
        return [rollouts for _, rollouts in played]


Measure = Callable[[Played], dict[str, float]]


def run(setting: Setting, seed: int, measure: Measure) -> dict[str, Any]:
    """Return the curves of one run by measure, as [step, value] pairs, and the CPU seconds that it took."""
    with TemporaryDirectory() as scratch:
        return asyncio.run(_run(Miniature(setting, seed, Path(scratch)), measure))


async def _run(miniature: Miniature, measure: Measure) -> dict[str, Any]:
    started = time.process_time()
    curves: dict[str, list[list[float]]] = {}

    def record(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            curves.setdefault(name, []).append([step, round(float(value), 6)])

    await miniature.environment.start()
    await miniature.algorithm.setup()
    record(0, measure(await miniature.evaluate()))
    last, interval = miniature.config.max_steps, miniature.config.orchestrator.eval.interval
    for step in range(1, last + 1):
        counts = await miniature.step(step)
        if step % interval == 0 or step == last:
            record(step, counts | measure(await miniature.evaluate()))
    await miniature.algorithm.close()
    await miniature.environment.close()
    return {"curves": curves, "seconds": round(time.process_time() - started, 1)}
