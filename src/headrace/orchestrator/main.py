"""The orchestrator process: load everything, construct the `Orchestrator`, run it to the end or to a signal."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
from collections.abc import Sequence
from contextlib import AsyncExitStack, closing
from functools import partial

from headrace.config.headers import find_invalid_header
from headrace.config.orchestrator import EnvConfig, OrchestratorConfig
from headrace.environments.base import tasks_of
from headrace.environments.registry import load_environment
from headrace.environments.workers import WorkerLimits, WorkerPool
from headrace.errors import BadInput
from headrace.inference.client.engine_client import EngineClient
from headrace.machine import frozen_gc
from headrace.observe.status import Status, wait_for
from headrace.orchestrator.commits import Commits
from headrace.orchestrator.crediting import PastPolicy, PolicyReference, open_sources, set_up_algorithms
from headrace.orchestrator.event_loop import watch_loop
from headrace.orchestrator.orchestrator import Orchestrator
from headrace.orchestrator.shutdown import EnvironmentLifecycle, run_loop
from headrace.orchestrator.signals import Kind
from headrace.orchestrator.watcher import WeightWatcher
from headrace.orchestrator.wiring import (
    Environments,
    Policy,
    build_orchestrator,
    notify_changed_tasks,
    settings_digest,
    startup_lines,
)
from headrace.text.hub import model_directory
from headrace.text.renderer import make_renderer
from headrace.text.tokenizer import Tokenizer
from headrace.transport.epochs import hold_epoch
from headrace.transport.journal import Journal, take_over
from headrace.transport.journal_files import delete_journal
from headrace.transport.run_dir import RunDir
from headrace.transport.verification import lost_commits

log = logging.getLogger(__name__)

RESTART_SETTLE_S = 10.0
"""Seconds for which a restarted orchestrator waits for the rest of the inference servers."""


def run(
    config: OrchestratorConfig, *, run: RunDir, status: Status, servers: int = 1, shares_device: bool = False
) -> bool:
    """Run until `max_steps`, SIGTERM or SIGINT; return whether the run is complete, rather than stopped.

    Waits for this number of `servers`. With `shares_device` they pause while the trainer computes. Without a training
    environment, published versions are only evaluated. Environments that ignore their cancellation are abandoned.
    """
    return run_loop(_run(config, run, status, servers, shares_device))


async def _run(
    config: OrchestratorConfig, run: RunDir, status: Status, servers: int = 1, shares_device: bool = False
) -> bool:
    starting, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert starting is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, starting.cancel)
    async with AsyncExitStack() as stack:
        try:
            orchestrator = await _start(config, run, status, servers, shares_device, stack)
        except asyncio.CancelledError:
            log.info("stopped before the run began")
            return False
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, orchestrator.stop)
        async with watch_loop(status):
            with frozen_gc():
                return await orchestrator.run()


async def _start(
    config: OrchestratorConfig, run: RunDir, status: Status, servers: int, shares_device: bool, stack: AsyncExitStack
) -> Orchestrator:
    """Load and connect everything that a run needs; the stack closes it."""
    assert config.model.name is not None
    directory = model_directory(config.model.name)
    tokenizer = Tokenizer(directory)
    renderer = make_renderer(directory, tokenizer, **config.renderer.model_dump(exclude={"pool_size"}))
    epoch = stack.enter_context(hold_epoch(run.root, "orchestrator"))
    run.batches.adopt(epoch.number)
    journal = stack.enter_context(closing(take_over(run.root, epoch.number)))
    journal.start(settings_digest(config))
    environments = await _load_environments(config, status, stack)
    for line in startup_lines(config, {slot: len(tasks) for slot, (_, _, tasks) in environments.items()}):
        status.notify(line, logging.INFO)
    notify_changed_tasks(environments, journal, status)
    if config.train.env:
        _reconcile(run, journal, status)
        if config.max_async_level == 0:
            journal.rewind(journal.last_step(), keep_clock=True)  # an interrupted step is repeated from its beginning
        Commits(run, journal, config.keep_rollouts).delete_uncommitted()
    timeout, retry_for = config.client.resolve_timeouts(alternating=shares_device)
    connect = partial(
        EngineClient,
        config.client.base_url or run.endpoints,
        timeout=timeout,
        retry_for=retry_for,
        api_key=_read_key(config.client.api_key_var),
        admin_key=_read_key(config.client.admin_key_var),
        keys_file=config.client.keys_file,
    )
    client = connect()
    stack.push_async_callback(client.close)
    past = None
    if config.past_policy is not None:
        past_client = connect(past=True)
        stack.push_async_callback(past_client.close)
        every = None if config.past_policy == "start" else config.past_policy.every
        past = PastPolicy(past_client, run.weights, every, config.max_async_level)
    # First, because it is quick: a missing teacher is reported before the long wait for the servers.
    reference = PolicyReference(client)
    setup = set_up_algorithms(config, reference, renderer, tokenizer, journal, stack, status.notify, past)
    algorithms = await wait_for(setup, "an answer", "the models that the algorithms refer to", status)
    opening = open_sources(config, stack)
    sources = await wait_for(opening, "an answer", "the models that episodes are sampled from", status)
    # At a restart some servers may be down for long, and the others are idle.
    settle_s = RESTART_SETTLE_S if journal.epoch > 1 else math.inf
    ready = client.wait_ready(config.client.start_timeout, servers, settle_s)
    name = "the inference server" if servers == 1 else f"{servers} inference servers"
    engines = await wait_for(ready, "an answer", name, status)
    reference.check_engines(engines)
    if past is not None:
        ready = past_client.wait_ready(config.client.start_timeout)
        past.check_engines(await wait_for(ready, "an answer", "the server of the past policy", status))
    watcher = WeightWatcher(run.weights, client, status, deadline_s=config.client.update_timeout)
    await watcher.synchronize()
    policy = Policy(client, engines, watcher, tokenizer, renderer, shares_device, past)
    return build_orchestrator(config, run, status, journal, environments, policy, algorithms, sources)


def _read_key(variable: str) -> str | None:
    """Return the API key in an environment variable, if it is set."""
    key = os.environ.get(variable) or None
    if key is not None and find_invalid_header({"Authorization": key}) is not None:
        fact = "not a key: it begins or ends with a space, or has a line break or a character beyond ASCII"
        raise BadInput(fact, key=variable)
    return key


async def _load_environments(config: OrchestratorConfig, status: Status, stack: AsyncExitStack) -> Environments:
    """Load and start the environments, those with `workers` in worker processes; the stack closes them."""
    loaded: Environments = {}
    shutdown = EnvironmentLifecycle(status)
    stack.push_async_callback(shutdown.close)
    slots: list[tuple[Kind, Sequence[EnvConfig]]] = [(Kind.TRAIN, config.train.env), (Kind.EVAL, config.eval.env)]
    for kind, entries in slots:
        for entry in entries:
            environment = load_environment(entry.id, entry.args)
            tasks = tasks_of(environment, entry.name)
            if entry.workers:
                limits = WorkerLimits(max_memory_mb=entry.worker_memory_mb)
                environment = WorkerPool(environment, entry.id, entry.args, size=entry.workers, limits=limits)
            await shutdown.start(f"the {kind} environment {entry.name}", environment)
            loaded[kind, entry.name] = (entry, environment, tasks)
    return loaded


def _reconcile(run: RunDir, journal: Journal, status: Status) -> None:
    """Make journal, batches and checkpoints consistent: rewind the journal to before the first missing batch."""
    last, covered = journal.last_step(), run.latest_checkpoint_step()
    if last < (newest := run.newest_step()):
        journal.close()
        delete_journal(journal.path)  # a copy of the newest journal, which the user is asked to restore
        raise lost_commits(run, last, newest)
    run.batches.recover(last)
    missing = [step for step in range(covered + 1, last + 1) if not run.batches.exists(step)]
    missing = [step for step in missing if step > run.latest_checkpoint_step()]  # a checkpoint was saved meanwhile
    if missing:
        status.notify(
            f"{run.batches.path(missing[0])} is missing, and the newest checkpoint is of step {covered}: the journal "
            f"goes back to step {missing[0] - 1}, and the prompts of the {last - missing[0] + 1} steps after it are "
            "sampled again"
        )
        run.batches.delete_after(missing[0] - 1)
        journal.rewind(missing[0] - 1)
