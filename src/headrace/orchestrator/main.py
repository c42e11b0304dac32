"""The orchestrator as a process: configuration in, a wired `Orchestrator` running until the end or a signal."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Sequence
from functools import partial

from renderers.base import Renderer

from headrace.algorithms.base import Algorithm
from headrace.algorithms.grpo import Grpo
from headrace.config.model import SamplingConfig
from headrace.config.orchestrator import (
    AlgoConfig,
    EnvConfig,
    FilterConfig,
    GibberishConfig,
    OrchestratorConfig,
    RepetitionConfig,
)
from headrace.environments.base import Environment
from headrace.environments.registry import load_environment
from headrace.inference.client import EngineClient
from headrace.inference.schema import Health
from headrace.observe.history import Tail
from headrace.observe.status import Status, wait_for
from headrace.orchestrator.dispatcher import EpisodeRunner
from headrace.orchestrator.evaluation import EvalEnv, EvalSource
from headrace.orchestrator.journal import Journal
from headrace.orchestrator.orchestrator import Orchestrator, RunFailed, Settings
from headrace.orchestrator.sampler import Sampler
from headrace.orchestrator.scheduler import Kind
from headrace.orchestrator.source import TrainSource, TrainTasks
from headrace.orchestrator.train_sink import Filter, TrainSink
from headrace.orchestrator.watcher import WeightWatcher
from headrace.rollout.filters import has_no_advantage, is_gibberish, is_repetitive
from headrace.rollout.types import Task
from headrace.text.hub import model_directory
from headrace.text.renderer import make_renderer
from headrace.text.tokenizer import Tokenizer
from headrace.transport.run_dir import RunDir

log = logging.getLogger(__name__)


def run(config: OrchestratorConfig, *, run: RunDir, status: Status) -> None:
    """Run until `max_steps`, or until SIGTERM or SIGINT."""
    asyncio.run(_run(config, run, status))


async def _run(config: OrchestratorConfig, run: RunDir, status: Status) -> None:
    starting = asyncio.current_task()
    assert starting is not None and config.model.name is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, starting.cancel)
    directory = model_directory(config.model.name)
    tokenizer = Tokenizer(directory)
    renderer = make_renderer(directory, tokenizer, **config.renderer.model_dump())
    environments = _load_environments(config)
    journal = Journal(run.journal)
    run.batches.recover(journal.last_step())
    _check_files(run, journal)
    client = EngineClient(config.client.base_url or run.endpoint, timeout=config.client.timeout)
    try:
        ready = client.wait_ready(config.client.start_timeout)
        engines = await wait_for(ready, "an answer", "the inference server", status)
        _check_engines(config, engines)
        watcher = WeightWatcher(run.weights, client, status, deadline=config.client.update_timeout)
        await watcher.synchronize()
        sink = TrainSink(
            {env.name: _algorithm(env.algo or config.algo) for env in config.train.env},
            _filters(config.pre_batch_filters, tokenizer.vocab_size),
            _filters(config.post_batch_filters, tokenizer.vocab_size),
            _seq_len(config),
        )
        orchestrator = Orchestrator(
            _settings(config),
            run,
            _train_source(config, environments, journal),
            _eval_source(config, environments, run),
            sink,
            _runners(config, environments, client, renderer, sink),
            watcher,
            journal,
            status,
            max_inflight=_max_inflight(config, engines),
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, orchestrator.stop)
        await orchestrator.run()
    except asyncio.CancelledError:
        log.info("stopped before the run began")
    finally:
        await client.close()
        journal.close()


Environments = dict[tuple[str, str], tuple[EnvConfig, Environment, list[Task]]]
"""By slot (train or eval) and name."""


def _load_environments(config: OrchestratorConfig) -> Environments:
    loaded: Environments = {}
    for kind, entries in ((Kind.TRAIN, config.train.env), (Kind.EVAL, config.eval.env)):
        for entry in entries:
            environment = load_environment(entry.id, entry.args)
            tasks = [Task(entry.name, data) for data in environment.tasks()]
            loaded[kind, entry.name] = (entry, environment, tasks)
            log.info("%s environment %s: %d tasks", kind, entry.name, len(tasks))
    return loaded


def _check_files(run: RunDir, journal: Journal) -> None:
    """Journal, batches and checkpoints must tell one story before anything is added to it."""
    last, covered = journal.last_step(), run.latest_checkpoint_step()
    if last < covered:
        raise RunFailed(
            f"{run.journal} ends at step {last}, but there is a checkpoint of step {covered}: they belong to two runs"
        )
    missing = [step for step in range(covered + 1, last + 1) if not run.batches.exists(step)]
    missing = [step for step in missing if step > run.latest_checkpoint_step()]  # saved while we looked
    if missing:
        raise RunFailed(
            f"{run.batches.path(missing[0])} is gone, and no checkpoint covers it: the newest is of step {covered}"
        )


def _check_engines(config: OrchestratorConfig, engines: Sequence[Health]) -> None:
    limit = min(health.max_model_len for health in engines)
    if _seq_len(config) > limit:
        raise RunFailed(
            f"seq_len is {_seq_len(config)}, but the inference server takes at most {limit} tokens: "
            "raise inference.max_model_len, or lower seq_len"
        )


def _seq_len(config: OrchestratorConfig) -> int:
    assert config.seq_len is not None
    return config.seq_len


def _max_inflight(config: OrchestratorConfig, engines: Sequence[Health]) -> int:
    """`auto`: what the engines run at once, and half as many in line so that they never run dry."""
    chosen = config.max_inflight_rollouts
    return sum(health.capacity for health in engines) * 3 // 2 if chosen == "auto" else chosen


def _settings(config: OrchestratorConfig) -> Settings:
    assert config.max_steps is not None
    return Settings(
        max_steps=config.max_steps,
        batch_size=config.batch_size,
        token_batch_size=config.token_batch_size,
        seq_len=_seq_len(config),
        group_sizes={env.name: env.group_size or config.group_size for env in config.train.env},
        max_async_level=config.max_async_level,
        max_off_policy_steps=config.max_off_policy_steps,
        max_empty_batches=config.max_empty_batches,
        tasks_per_minute=config.tasks_per_minute,
        log_loop_interval=config.log_loop_interval,
        keep_rollouts=config.keep_rollouts,
    )


def _train_source(config: OrchestratorConfig, environments: Environments, journal: Journal) -> TrainSource:
    """Weighted by `ratio` where any environment has one (1 for the others), else by the number of tasks."""
    by_ratio = any(env.ratio is not None for env in config.train.env)
    tasks = []
    for env in config.train.env:
        own = environments[Kind.TRAIN, env.name][2]
        tasks.append(TrainTasks(env.name, own, (env.ratio or 1.0) if by_ratio else float(len(own))))
    return TrainSource(tasks, config.seed, journal.drawn_per_env(), journal.open_draws())


def _eval_source(config: OrchestratorConfig, environments: Environments, run: RunDir) -> EvalSource:
    defaults = config.eval
    evals = []
    for env in defaults.env:
        tasks = environments[Kind.EVAL, env.name][2]
        evals.append(
            EvalEnv(
                env.name,
                tasks[: env.num_examples or defaults.num_examples or len(tasks)],
                env.interval or defaults.interval,
                env.group_size or defaults.group_size,
            )
        )
    return EvalSource(evals, _evaluated(config, run))


def _evaluated(config: OrchestratorConfig, run: RunDir) -> dict[str, int]:
    """By environment, the last version that needs no evaluation."""
    names = [env.name for env in config.eval.env]
    resumed = run.latest_checkpoint_step()
    if resumed and not config.eval.skip_eval_on_resume:
        return dict.fromkeys(names, resumed - 1)
    done = {} if config.eval.eval_base_model else dict.fromkeys(names, 0)
    for record in Tail(run.metrics).read():
        done.update({name: record["step"] for name in names if f"eval/{name}/errors" in record})
    return done


def _runners(
    config: OrchestratorConfig, environments: Environments, client: EngineClient, renderer: Renderer, sink: TrainSink
) -> dict[tuple[str, str], EpisodeRunner]:
    defaults = {Kind.TRAIN: config.train.sampling, Kind.EVAL: config.eval.sampling}
    return {
        (kind, name): EpisodeRunner(
            environment,
            _sampler(client, renderer, _seq_len(config), entry.sampling.over(defaults[Kind(kind)])),
            entry.timeout,
            sink.process_rollout if kind == Kind.TRAIN else None,
        )
        for (kind, name), (entry, environment, _) in environments.items()
    }


def _sampler(client: EngineClient, renderer: Renderer, seq_len: int, sampling: SamplingConfig) -> Sampler:
    return Sampler(client, renderer, seq_len, **sampling.model_dump(exclude_none=True))


def _algorithm(config: AlgoConfig) -> Algorithm:
    return Grpo(config.normalize)


def _filters(configs: Sequence[FilterConfig], vocab_size: int) -> list[Filter]:
    return [_filter(config, vocab_size) for config in configs]


def _filter(config: FilterConfig, vocab_size: int) -> Filter:
    if isinstance(config, GibberishConfig):
        threshold, offset = config.token_id_threshold, config.logprob_offset
        test = partial(is_gibberish, vocab_size=vocab_size, token_id_threshold=threshold, logprob_offset=offset)
    elif isinstance(config, RepetitionConfig):
        test = partial(is_repetitive, window=config.window, prob_threshold=config.prob_threshold)
    else:
        test = partial(has_no_advantage)
    return Filter(config.type, test, config.enforce)
