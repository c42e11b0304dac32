"""What the simulated processes do: a server, a trainer that trains nothing, and the real orchestrator.

The orchestrator is the real one from its engine client to its journal; environment and tokenizer are replaced by
episodes that only sample. The trainer follows the real one's order: batch, weights, metrics, checkpoint.
"""

from __future__ import annotations

import asyncio
import math
import shutil
from pathlib import Path
from typing import Any

from headrace.algorithms.grpo import Grpo
from headrace.environments.base import Environment
from headrace.inference.client.engine_client import EngineClient
from headrace.inference.schema import SamplingParams
from headrace.observe.metrics import MetricsLog
from headrace.orchestrator.commits import Commits
from headrace.orchestrator.dispatcher import EpisodeRunner
from headrace.orchestrator.drift import Drift
from headrace.orchestrator.evaluation import EvalSource
from headrace.orchestrator.journal_buffer import JournalBuffer
from headrace.orchestrator.main import RESTART_SETTLE_S, _reconcile
from headrace.orchestrator.orchestrator import Orchestrator
from headrace.orchestrator.pipeline import Pipeline, PipelineSettings
from headrace.orchestrator.processing import EvalProcessing, TrainProcessing
from headrace.orchestrator.source import TrainSource, TrainTasks
from headrace.orchestrator.watcher import WeightWatcher
from headrace.rollout.digest import seal
from headrace.rollout.types import Rollout, Task, Turn
from headrace.rollout.version import Version
from headrace.transport.checkpoint_files import CheckpointMarker
from headrace.transport.endpoint import Endpoint, write_endpoint
from headrace.transport.epochs import take_epoch
from headrace.transport.files import MARKER, write_directory
from headrace.transport.journal import take_over
from tests.simulation.processes import SimulatedProcess, SimulatedStatus, kill_in_commits
from tests.simulation.servers import Server
from tests.simulation.world import ENV, World

POLL_S = 0.5
PROMPT = [1, 2, 3]
KEEP_CHECKPOINTS = 2
REQUEST_TIMEOUT_S, RETRY_FOR_S, START_TIMEOUT_S, UPDATE_TIMEOUT_S = 600.0, 300.0, 600.0, 600.0
"""The defaults of `orchestrator.client`."""


# -- server -----------------------------------------------------------------------------------------------------------


async def serve(process: SimulatedProcess) -> None:
    world, host = process.world, process.host
    status = SimulatedStatus(world.run, process)
    await world.load(world.settings.server_start_s)
    newest = world.run.weights.latest() or Version(0, 0)
    url = f"http://{host.name}:{process.pid}"
    tokens = world.settings.mean_tokens
    server = Server(world.network, host, url, newest, world.fetch_weights, world.checksum, world.rng, tokens)
    world.network.hosts[url], world.network.servers[url] = host, server
    process.on_end.append(lambda: world.on_server_end(server))
    world.on_server_start(server)
    write_endpoint(world.run.endpoints / f"{process.name}.{process.pid}.json", Endpoint(url, process.pid))
    process.is_up = True
    status.set("serving")
    await asyncio.Event().wait()


# -- trainer ----------------------------------------------------------------------------------------------------------


async def train(process: SimulatedProcess) -> None:
    """Train on the first member of the group; the others compute with it and write nothing."""
    world, settings = process.world, process.world.settings
    await world.load(settings.trainer_start_s)
    process.is_up = True
    if process.node_rank:
        await world.trained.wait()
    else:
        await _train(process)
        world.trained.set()


async def _train(process: SimulatedProcess) -> None:
    world, run, settings = process.world, process.world.run, process.world.settings
    status = SimulatedStatus(run, process)
    await world.collective()
    step = run.latest_checkpoint_step()
    seen = [version.incarnation for version in run.weights.published()]
    acknowledged = run.weights.acknowledged()
    if acknowledged is not None and acknowledged.step:
        seen.append(acknowledged.incarnation)
    incarnation = 1 + max(seen, default=-1)
    if incarnation:
        run.batches.delete_through(step)
        run.weights.delete_incomplete()
        _publish(world, Version(incarnation, step))
    metrics = MetricsLog(run.metrics, "trainer")
    while step < settings.max_steps:
        status.set(f"waiting for batch {step + 1}")
        while not run.batches.exists(step + 1):
            await asyncio.sleep(POLL_S)
        batch = run.batches.read(step + 1)
        status.set(f"training step {step + 1}")
        await asyncio.sleep(settings.step_s)
        await world.collective()
        step += 1
        world.on_trained(step, batch)
        _publish(world, Version(incarnation, step))
        run.weights.retire(keep_last=2)
        metrics.log(step, {"loss": 0.1, "time/step": settings.step_s, "progress/incarnation": incarnation})
        if step % settings.checkpoint_interval == 0 or step == settings.max_steps:
            await asyncio.sleep(settings.checkpoint_s)
            await world.collective()
            _save(world, step)


def _publish(world: World, version: Version) -> None:
    world.run.weights.publish(version, lambda draft: (draft / "model.safetensors").write_bytes(b"weights") and None)


def _save(world: World, step: int) -> None:
    def fill(draft: Path) -> None:
        (draft / MARKER).write_bytes(seal(CheckpointMarker(step)))

    checkpoints = world.run.checkpoints
    write_directory(checkpoints / f"step-{step:08d}", fill)
    world.run.batches.delete_through(step)
    for old in sorted(checkpoints.glob("step-*"))[:-KEEP_CHECKPOINTS]:
        shutil.rmtree(old)


# -- orchestrator -----------------------------------------------------------------------------------------------------


class _Context:
    """Samples from the engines without rendering text."""

    def __init__(self, client: EngineClient, session: str) -> None:
        self._client, self._session = client, session

    async def sample(self, prompt: list[int]) -> Turn:
        completion = await self._client.generate(prompt, SamplingParams(), session=self._session)
        return Turn(prompt, completion.token_ids, completion.logprobs, completion.steps, 1.0)


class _Contexts:
    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def open(self, session: str, episode: str) -> Any:
        self._client.join(session)
        return _Context(self._client, session)

    def close(self, session: str) -> None:
        self._client.leave(session)


class Sampling(Environment):
    """Episodes of one turn, or of two with a tool call between them."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def run(self, task: Task, context: Any) -> list[Rollout]:
        rng = self._world.rng
        turns = [await context.sample(PROMPT)]
        if rng.random() < self._world.settings.two_turns:
            await asyncio.sleep(rng.expovariate(1 / self._world.settings.tool_s))
            turns.append(await context.sample([*PROMPT, *turns[0].completion_ids.tolist(), 9]))
        return [Rollout(rewards={"r": float(rng.random() < 0.5)}, turns=turns)]


async def orchestrate(process: SimulatedProcess) -> None:
    world, run, settings = process.world, process.world.run, process.world.settings
    status = SimulatedStatus(run, process)
    await world.load(settings.orchestrator_start_s)
    epoch = take_epoch(run.root, "orchestrator", take_over=True, on_fenced=world.errors.append)
    run.batches.adopt(epoch.number)
    journal = take_over(run.root, epoch.number)
    kill_in_commits(process, journal)
    journal.start("simulated")
    _reconcile(run, journal, status)
    Commits(run, journal, settings.keep_rollouts).delete_uncommitted()
    client = EngineClient(run.endpoints, timeout=REQUEST_TIMEOUT_S, retry_for=RETRY_FOR_S)
    status.set("waiting for the inference servers")
    await client.wait_ready(START_TIMEOUT_S, settings.servers, RESTART_SETTLE_S if journal.epoch > 1 else math.inf)
    watcher = WeightWatcher(run.weights, client, status, deadline_s=UPDATE_TIMEOUT_S, poll_s=POLL_S)
    await watcher.synchronize()
    now = world.loop.time()
    tasks = [Task(ENV, {"n": n}) for n in range(1000)]
    source = TrainSource([TrainTasks(ENV, tasks, 1.0)], 0, journal.drawn_per_env(), journal.open_draws())
    pipeline = Pipeline(
        PipelineSettings(
            max_steps=settings.max_steps,
            batch_size=settings.batch_size,
            token_batch_size=None,
            seq_len=64,
            group_sizes={ENV: settings.group_size},
            max_inflight=settings.in_flight,
            max_async_level=settings.max_async_level,
            max_off_policy_steps=settings.max_off_policy_steps,
        ),
        source,
        EvalSource([], {}),
        JournalBuffer(journal.totals(), journal.clock(), journal.next_credit(), now),
        watcher.version,
        journal.last_step() + 1,
        now,
        journal.epoch,
        None,
        journal.results(),
    )
    environment = Sampling(world)
    processing = TrainProcessing({ENV: Grpo()}, {ENV: environment}, [], [], 64)
    runner = EpisodeRunner(environment, _Contexts(client), None, processing.process_rollout)
    world.on_orchestrator(pipeline)
    orchestrator = Orchestrator(
        pipeline,
        run,
        processing,
        EvalProcessing({}),
        {("train", ENV): runner},
        watcher,
        journal,
        status,
        Drift(client, run.probes, completions=0, max_model_len=64),
        log_loop_interval=60.0,
        keep_rollouts=settings.keep_rollouts,
    )
    await orchestrator.run()
    await client.close()
