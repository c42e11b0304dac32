"""From configuration to components: each gets plain values and what it needs, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

from headrace.algorithms.base import Algorithm
from headrace.config.filters import FilterConfig
from headrace.config.orchestrator import EnvConfig, OrchestratorConfig
from headrace.environments.base import Environment
from headrace.errors import BadInput
from headrace.inference.client.served_model import ServedModel
from headrace.inference.schema import Health
from headrace.observe.history import History, Tail
from headrace.observe.status import Status
from headrace.orchestrator.concurrency import Concurrency, initial_limit
from headrace.orchestrator.curricula import make_gate, make_sampler
from headrace.orchestrator.dispatcher import EpisodeRunner, Line
from headrace.orchestrator.drift import PATIENCE, PATIENCE_IN_TURNS, Drift
from headrace.orchestrator.evaluation import EvalEnv, EvalSource
from headrace.orchestrator.frozen_sampler import FrozenSampler
from headrace.orchestrator.journal_buffer import JournalBuffer
from headrace.orchestrator.model import Model
from headrace.orchestrator.orchestrator import Orchestrator
from headrace.orchestrator.pipeline import Pipeline, PipelineSettings
from headrace.orchestrator.processing import EvalProcessing, Filter, TrainProcessing
from headrace.orchestrator.sampler import Sampler
from headrace.orchestrator.signals import Kind
from headrace.orchestrator.source import TrainSource, TrainTasks
from headrace.orchestrator.startup_lines import draw_weight
from headrace.rollout.types import Task
from headrace.rollout.version import Version
from headrace.transport.journal import Journal
from headrace.transport.run_dir import RunDir

Environments = dict[tuple[Kind, str], tuple[EnvConfig, Environment, list[Task]]]
"""By slot (train or eval) and name."""


def wire(
    config: OrchestratorConfig,
    run: RunDir,
    status: Status,
    journal: Journal,
    environments: Environments,
    model: Model,
    algorithms: Mapping[str, Algorithm],
    sources: Mapping[str, ServedModel],
) -> Orchestrator:
    """A run's orchestrator, ready to go on where the journal ends.

    `sources` are the frozen models that play episodes, by training environment; the policy plays all others.
    """
    now = time.monotonic()
    processing = TrainProcessing(
        algorithms,
        _by_name(environments, Kind.TRAIN),
        _filters(config.pre_batch_filters, model.tokenizer.vocab_size),
        _filters(config.post_batch_filters, model.tokenizer.vocab_size),
        _seq_len(config),
        {env.name: env.timeout for env in config.train.env},
        {env.name: gate for env in config.train.env if (gate := make_gate(config.curriculum_of(env))) is not None},
        in_order=config.max_async_level == 0,
    )
    eval_processing = EvalProcessing(
        _by_name(environments, Kind.EVAL), {env.name: env.timeout for env in config.eval.env}
    )
    concurrency = _concurrency(config, environments, model.engines, sources)
    settings = _settings(config, environments, model, sources, concurrency)
    pipeline = Pipeline(
        settings,
        _train_source(config, environments, journal),
        _eval_source(config, environments, run),
        JournalBuffer(journal.totals(), journal.clock(), journal.next_credit(), now),
        model.watcher.version,
        journal.last_step() + 1 if config.train.env else settings.max_steps + 1,
        now,
        journal.start(),
        concurrency,
        journal.lessons(),
    )
    drift = Drift(
        model.client,
        run.probes,
        completions=config.drift_probes,
        max_model_len=model.longest,
        patience=PATIENCE_IN_TURNS if model.in_turns else PATIENCE,
    )
    lines: dict[tuple[Kind, str], Line] = {
        (kind, name): _frozen_sampler(config, model, entry, sources[name])
        if kind is Kind.TRAIN and name in sources
        else _sampler(config, model, kind, entry, drift)
        for (kind, name), (entry, _, _) in environments.items()
    }
    process = {Kind.TRAIN: processing.process_rollout, Kind.EVAL: eval_processing.process_rollout}
    return Orchestrator(
        pipeline,
        run,
        processing,
        eval_processing,
        {
            (kind, name): EpisodeRunner(
                environment,
                lines[kind, name],
                entry.timeout,
                process[kind],
                vocab_size=model.vocab_size if kind is Kind.TRAIN else None,
            )
            for (kind, name), (entry, environment, _) in environments.items()
        },
        model.watcher,
        journal,
        status,
        drift,
        log_loop_interval=config.log_loop_interval,
        keep_rollouts=config.keep_rollouts,
    )


def _by_name(environments: Environments, kind: Kind) -> dict[str, Environment]:
    return {name: environment for (slot, name), (_, environment, _) in environments.items() if slot is kind}


def _seq_len(config: OrchestratorConfig) -> int:
    assert config.seq_len is not None
    return config.seq_len


def _settings(
    config: OrchestratorConfig,
    environments: Environments,
    model: Model,
    frozen: Collection[str],
    concurrency: Concurrency | None,
) -> PipelineSettings:
    assert config.max_steps is not None
    if _seq_len(config) > model.longest:
        raise BadInput(
            f"seq_len is {_seq_len(config)}, but the inference server takes at most {model.longest} tokens: "
            "raise inference.max_model_len, or lower seq_len"
        )
    settings = PipelineSettings(
        max_steps=config.max_steps,
        batch_size=config.batch_size,
        token_batch_size=config.token_batch_size,
        seq_len=_seq_len(config),
        group_sizes={env.name: env.group_size or config.group_size for env in config.train.env},
        max_inflight=_max_inflight(config, model.engines) if concurrency is None else concurrency.limit,
        max_async_level=config.max_async_level,
        max_off_policy_steps=config.max_off_policy_steps,
        max_empty_batches=config.max_empty_batches,
        tasks_per_minute=config.tasks_per_minute,
        scored_together=frozenset(name for kind, name in _together(environments) if kind is Kind.TRAIN),
        frozen=frozenset(frozen),
    )
    largest = max((_group_size(config, *env) for env in _together(environments)), default=0)
    if largest > settings.max_inflight:
        raise BadInput(
            f"an environment scores groups of {largest}, whose episodes must run at once",
            key="orchestrator.max_inflight_rollouts",
            value=settings.max_inflight,
            fix=f"Raise it to at least {largest}, or lower group_size.",
        )
    return settings


def _concurrency(
    config: OrchestratorConfig, environments: Environments, engines: Sequence[Health], frozen: Collection[str]
) -> Concurrency | None:
    """What moves the limit, if it is to be moved.

    Episodes that a frozen model plays leave the engines idle, so that their reports say nothing of those.
    """
    if config.max_inflight_rollouts != "auto" or frozen:
        return None
    least = max((_group_size(config, *env) for env in environments), default=1)
    return Concurrency(sum(health.capacity for health in engines), least)


def _max_inflight(config: OrchestratorConfig, engines: Sequence[Health]) -> int:
    chosen = config.max_inflight_rollouts
    return initial_limit(sum(health.capacity for health in engines)) if chosen == "auto" else chosen


def _together(environments: Environments) -> set[tuple[Kind, str]]:
    """Those that score whole groups."""
    return {slot for slot, (_, environment, _) in environments.items() if environment.scores_groups}


def _group_size(config: OrchestratorConfig, kind: Kind, name: str) -> int:
    if kind is Kind.EVAL:
        return _eval_group_size(config, name)
    (env,) = [env for env in config.train.env if env.name == name]
    return env.group_size or config.group_size


def _eval_group_size(config: OrchestratorConfig, name: str) -> int:
    (env,) = [env for env in config.eval.env if env.name == name]
    return env.group_size or config.eval.group_size


def _train_source(config: OrchestratorConfig, environments: Environments, journal: Journal) -> TrainSource:
    tasks = []
    for env in config.train.env:
        own = environments[Kind.TRAIN, env.name][2]
        weight = draw_weight(config, env, len(own))
        tasks.append(TrainTasks(env.name, own, weight, make_sampler(config.curriculum_of(env), own)))
    return TrainSource(tasks, config.seed, journal.drawn_per_env(), journal.open_draws())


def _eval_source(config: OrchestratorConfig, environments: Environments, run: RunDir) -> EvalSource:
    defaults = config.eval
    evals = []
    for env in defaults.env:
        _, environment, tasks = environments[Kind.EVAL, env.name]
        evals.append(
            EvalEnv(
                env.name,
                tasks[: env.num_examples or defaults.num_examples or len(tasks)],
                env.interval or defaults.interval,
                _eval_group_size(config, env.name),
                pinned=defaults.pin_version if env.pin_version is None else env.pin_version,
                together=environment.scores_groups,
                solved=defaults.solved if env.solved is None else env.solved,
            )
        )
    return EvalSource(evals, _evaluated(config, run), again_on_resume=not defaults.skip_eval_on_resume)


def _evaluated(config: OrchestratorConfig, run: RunDir) -> dict[str, Version]:
    """By environment, the last version that needs no evaluation, as far as is recorded."""
    names = [env.name for env in config.eval.env]
    done = {} if config.eval.eval_base_model else dict.fromkeys(names, Version(0, 0))
    history = History(Tail(run.metrics).read())
    return done | {
        name: Version(history.incarnation, max(history.evals[name])) for name in names if history.evals.get(name)
    }


def _sampler(config: OrchestratorConfig, model: Model, kind: Kind, env: EnvConfig, drift: Drift) -> Sampler:
    defaults = config.train.sampling if kind is Kind.TRAIN else config.eval.sampling
    return Sampler(
        model.client,
        model.renderer,
        model.tokenizer,
        _seq_len(config),
        **env.sampling.over(defaults).model_dump(exclude_none=True),
        cache_salt=lambda: str(model.watcher.version),
        pool_size=config.renderer.pool_size,
        observe=drift.observe if kind is Kind.TRAIN else None,
        seed=_sampling_seed(config),
    )


def _frozen_sampler(config: OrchestratorConfig, model: Model, env: EnvConfig, source: ServedModel) -> FrozenSampler:
    sampling = env.sampling.over(config.train.sampling).model_dump(exclude_none=True)
    seed = _sampling_seed(config)
    pool_size = config.renderer.pool_size
    return FrozenSampler(
        source, model.renderer, model.tokenizer, _seq_len(config), **sampling, seed=seed, pool_size=pool_size
    )


def _sampling_seed(config: OrchestratorConfig) -> int | None:
    """Seeds make some engines slower, and only at level 0 is what they sample from the same in every run."""
    return config.seed if config.max_async_level == 0 else None


def _filters(configs: Sequence[FilterConfig], vocab_size: int) -> list[Filter]:
    return [Filter(config.label, config.make_test(vocab_size), config.enforce) for config in configs]
