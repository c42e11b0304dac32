"""A run in one process: the real sampler, engine, environment, algorithm, filters, packing and learner, in lock step.

It reads the run files of `headrace rl`. Sampling and training take turns, so that a seed repeats a run, and a batch is
sampled with the weights of exactly `staleness` updates before. Left out on purpose: processes, HTTP, files of weights
and batches, and everything that only matters when parts of a run are concurrent.
"""

from __future__ import annotations

import asyncio
import math
import random
import shutil
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
from headrace.algorithms.kl import make_algorithm
from headrace.environments.base import Environment, tasks_of
from headrace.environments.registry import load_environment
from headrace.inference.client.engine_client import EngineClient
from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.loading import eos_token_ids, load_model
from headrace.inference.latents import DECAY, GATES, LatentGates, add_gates, write_gates
from headrace.inference.schema import Completion, LatentParams, SamplingParams, Scores, WeightVersionSpan
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
from headrace.trainer.rl import make_losses

T = TypeVar("T")
Played = Sequence[Sequence[Rollout]]
"""The rollouts of each evaluated task."""
Measure = Callable[[Played], dict[str, float]]

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
    retention: float | None = None
    """With `model.latents`: about how much of a token's embedding the gates keep at the start; None: their default."""

    def load(self, seed: int) -> RunConfig:
        for file in self.files:
            if (folder := str(Path(file).resolve().parent)) not in sys.path:
                sys.path.append(folder)  # as a run does
        overrides = [word for key, value in self.keys.items() for word in (f"--{key}", str(value))]
        return load(RunConfig, [Path(file) for file in self.files], [*overrides, "--seed", str(seed)])[0]


class InProcessEngine:
    """An engine behind the interface of `EngineClient`; `Miniature.run_until` makes its steps."""

    def __init__(
        self, directory: Path, tokenizer: Tokenizer, max_model_len: int, seed: int, has_gates: bool = False
    ) -> None:
        model = load_model(directory)
        if has_gates:
            add_gates(model, directory)
        self.engine = Engine(
            model,
            max_model_len=max_model_len,
            max_running=MAX_RUNNING,
            eos_token_ids=eos_token_ids(model, tokenizer.eos_token_id),
            seed=seed,
            decode=tokenizer.decode,
            special_tokens=tokenizer.control_tokens,
        )

    def join(self, session: str) -> None:
        """Do nothing: there is one engine."""

    leave = join

    async def generate(
        self, token_ids: list[int], sampling: SamplingParams, cache_salt: str | None = None, session: str | None = None
    ) -> Completion:
        result = await asyncio.wrap_future(self.engine.submit(token_ids, sampling).future)
        spans = [WeightVersionSpan(str(version), start, end) for version, start, end in result.version_spans]
        latents = result.latents and np.frombuffer(result.latents, "<f2").reshape(len(result.token_ids), -1)
        return Completion(result.token_ids, result.logprobs, spans, result.finish_reason, latents=latents)

    async def score(self, token_ids: list[int], temperature: float = 1.0, *, urgent: bool = False) -> Scores:
        params = SamplingParams(temperature=temperature, max_tokens=1, prompt_logprobs=0)
        result = await asyncio.wrap_future(self.engine.submit(token_ids, params, urgent=urgent).future)
        assert result.prompt_logprobs is not None
        return Scores(result.prompt_logprobs, self.engine.version)


class Miniature:
    """A policy in training. One object makes one run."""

    def __init__(self, setting: Setting, seed: int, scratch: Path) -> None:
        config = setting.load(seed)
        start = resolve(config.model)
        if setting.retention is not None:
            start = str(with_gates(Path(start), scratch / "start", setting.retention))
        self.config = config = pin(config, scratch, start)
        orchestrator, self.seed, self.seq_len = config.orchestrator, seed, config.trainer.seq_len
        directory = Path(config.model.name)
        self.tokenizer = Tokenizer(directory)
        renderer = config.orchestrator.renderer
        self.renderer = make_renderer(
            directory, self.tokenizer, renderer.name, renderer.enable_thinking, renderer.thinking_retention
        )
        trainer, latents = config.trainer, config.model.latents
        self.learner = Learner(trainer, make_losses(trainer), scratch / "checkpoints", reference=trainer.reference)
        self.latents = None if latents is None else LatentParams(**latents.request)
        longest, has_gates = 3 * self.seq_len, latents is not None and latents.has_gates  # hints precede samples
        self.policy = InProcessEngine(directory, self.tokenizer, longest, seed, has_gates)
        self.engines = [self.policy.engine]
        self.versions = deque([self._copy()], maxlen=setting.staleness + 1)
        (env,) = orchestrator.train.env
        self.environment = load_environment(env.id, env.args)
        self.tasks = tasks_of(self.environment, env.name)
        self.sampling = env.sampling.over(orchestrator.train.sampling)
        self.draws = random.Random(f"draws-{seed}")
        teacher = setting.teacher and Path(resolve(config.model.__class__(sft=Path(setting.teacher))))
        context = MakeContext(self.seq_len, lambda model: self._frozen(teacher))
        self.algorithm = make_algorithm(orchestrator.algo_of(env), context)
        policy, temperature = PolicyReference(cast(EngineClient, self.policy)), self.sampling.temperature
        self.host = Host(env.name, policy, self.renderer, self.tokenizer, self.seq_len, seed, temperature)
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
        self,
        environment: Environment,
        tasks: Sequence[Task],
        group_size: int,
        sampling: Any,
        name: str,
        latents: LatentParams | None,
    ) -> list[tuple[Group, list[Rollout]]]:
        """Return a group of rollouts of each task."""
        options = sampling.model_dump(exclude_none=True) | {"latents": latents}
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
        played = await self.play(
            self.environment, tasks, config.group_size, self.sampling, f"step-{step}", self.latents
        )
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

    async def evaluate(self, measure: Measure) -> dict[str, float]:
        """Return what the newest weights achieve; `NAME without latents`: if the latents of their thoughts are zero."""
        values = measure(await self._evaluated(self.latents))
        if self.latents is not None:
            plain = measure(await self._evaluated(None))
            values |= {f"{name} without latents": value for name, value in plain.items()}
        return values

    async def _evaluated(self, latents: LatentParams | None) -> Played:
        """Return the rollouts of the newest weights on the tasks of the evaluation environment."""
        config = self.config.orchestrator.eval
        (env,) = config.env
        environment = load_environment(env.id, env.args)
        await environment.start()
        tasks = tasks_of(environment, env.name)[: config.num_examples]
        self.policy.engine.install(self.versions[-1])
        size, sampling = env.group_size or config.group_size, env.sampling.over(config.sampling)
        played = await self.play(environment, tasks, size, sampling, "eval", latents)
        scorer = GroupScorer({env.name: environment}, {})
        for group, rollouts in played:
            await scorer.score(group, rollouts)
        await environment.close()
        return [rollouts for _, rollouts in played]


def with_gates(model: Path, directory: Path, retention: float) -> Path:
    """Copy a model, with gates that keep about `retention` of a token's embedding."""
    shutil.copytree(model, directory)
    gates = LatentGates(load_model(model).get_input_embeddings().embedding_dim)
    bound = retention**2  # r is .5 on average
    gates.retention.data.fill_(-math.log(bound ** (-1 / DECAY) - 1))
    write_gates(directory, {f"{GATES}.{name}": tensor for name, tensor in gates.state_dict().items()})
    return directory


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
    await miniature.algorithm.start(miniature.host)
    record(0, await miniature.evaluate(measure))
    last, interval = miniature.config.max_steps, miniature.config.orchestrator.eval.interval
    for step in range(1, last + 1):
        counts = await miniature.step(step)
        if step % interval == 0 or step == last:
            record(step, counts | await miniature.evaluate(measure))
    await miniature.algorithm.stop()
    await miniature.environment.close()
    return {"curves": curves, "seconds": round(time.process_time() - started, 1)}
