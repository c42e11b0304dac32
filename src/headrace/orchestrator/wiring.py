"""Construction of the orchestrator's components from the configuration, and notices at the start of a run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec
from renderers.base import Renderer

from headrace.algorithms.base import Algorithm
from headrace.config.model import PastPolicyConfig
from headrace.config.orchestrator import EnvConfig, OrchestratorConfig, TrainEnvConfig
from headrace.environments.base import Environment
from headrace.errors import BadInput
from headrace.inference.client.engine_client import EngineClient
from headrace.inference.client.served_model import ServedModel
from headrace.inference.schema import Health, LatentParams
from headrace.observe.metrics import History, Tail
from headrace.observe.status import Status
from headrace.orchestrator.concurrency import Concurrency, initial_limit
from headrace.orchestrator.crediting import PastPolicy
from headrace.orchestrator.dispatcher import ContextFactory, EpisodeRunner
from headrace.orchestrator.drift import PROBE_TIMEOUT_S, PROBE_TIMEOUT_SHARED_S, Drift
from headrace.orchestrator.evaluation import EvalEnv, EvalSource
from headrace.orchestrator.journal_buffer import JournalBuffer
from headrace.orchestrator.orchestrator import Orchestrator
from headrace.orchestrator.pipeline import Pipeline, PipelineSettings
from headrace.orchestrator.processing import EvalProcessing, Filter, TrainProcessing
from headrace.orchestrator.sampler import FrozenSampler, Sampler
from headrace.orchestrator.signals import Kind
from headrace.orchestrator.source import TrainSource, TrainTasks
from headrace.orchestrator.watcher import WeightWatcher
from headrace.rollout.digest import CHANGED_DATA, fingerprint
from headrace.rollout.types import Task
from headrace.rollout.version import Version
from headrace.text.tokenizer import Tokenizer
from headrace.transport.journal import Journal
from headrace.transport.run_dir import RunDir

Environments = dict[tuple[Kind, str], tuple[EnvConfig, Environment, list[Task]]]
"""By kind and name."""

CHANGED_TASKS_EFFECT = {
    Kind.TRAIN: CHANGED_DATA,
    Kind.EVAL: "Evaluations from here on cannot be compared with earlier ones. If this is not intended, restore the "
    "old data",
}
"""Effect on a run if the tasks of an environment have changed since it last started."""


class Policy(msgspec.Struct):
    """The policy's engines, and what is needed to prompt them."""

    client: EngineClient
    engines: Sequence[Health]
    watcher: WeightWatcher
    tokenizer: Tokenizer
    renderer: Renderer
    shares_device: bool = False
    """Whether the engines pause while the trainer computes."""
    past: PastPolicy | None = None

    @property
    def max_model_len(self) -> int:
        """Return the tokens, prompt and completion together, that every engine accepts."""
        return min(health.max_model_len for health in self.engines)


def build_orchestrator(
    config: OrchestratorConfig,
    run: RunDir,
    status: Status,
    journal: Journal,
    environments: Environments,
    policy: Policy,
    algorithms: Mapping[str, Algorithm],
    sources: Mapping[str, ServedModel],
) -> Orchestrator:
    """Return the orchestrator of a run, with all of its components; it continues where the journal ends.

    `sources` are the frozen models that episodes are sampled from, by training environment; all other episodes are
    sampled from the policy.
    """
    now = time.monotonic()
    by_kind = {
        kind: {name: environment for (slot, name), (_, environment, _) in environments.items() if slot is kind}
        for kind in Kind
    }
    processing = _build_train_processing(config, algorithms, by_kind[Kind.TRAIN], policy)
    eval_processing = EvalProcessing(by_kind[Kind.EVAL], {env.name: env.timeout for env in config.eval.env})
    settings, concurrency = _pipeline_settings(config, environments, policy, frozenset(sources))
    train_entries = [train_tasks(config, env, environments[Kind.TRAIN, env.name][2]) for env in config.train.env]
    pipeline = Pipeline(
        settings,
        TrainSource(train_entries, config.seed, journal.drawn_per_env(), journal.open_draws()),
        _build_eval_source(config, environments, run),
        JournalBuffer(journal.totals(), journal.clock(), journal.next_credit(), now),
        policy.watcher.version,
        journal.last_step() + 1 if config.train.env else settings.max_steps + 1,
        now,
        journal.epoch,
        concurrency,
        journal.results(),
    )
    drift = Drift(
        policy.client,
        run.probes,
        completions=config.drift_probes,
        max_model_len=policy.max_model_len,
        timeout_s=PROBE_TIMEOUT_SHARED_S if policy.shares_device else PROBE_TIMEOUT_S,
    )
    runners: dict[tuple[str, str], EpisodeRunner] = {}
    for (kind, name), (entry, environment, _) in environments.items():
        source = sources.get(name) if kind is Kind.TRAIN else None
        runner = EpisodeRunner(environment, _build_sampler(config, policy, kind, entry, drift, source), entry.timeout)
        if kind is Kind.TRAIN:
            runner.process = processing.process_rollout
            runner.vocab_size = min(health.vocab_size for health in policy.engines)  # a tokenizer may have fewer tokens
        runners[kind, name] = runner
    return Orchestrator(
        pipeline,
        run,
        processing,
        eval_processing,
        runners,
        policy.watcher,
        journal,
        status,
        drift,
        log_loop_interval=config.log_loop_interval,
        keep_rollouts=config.keep_rollouts,
    )


def _build_train_processing(
    config: OrchestratorConfig,
    algorithms: Mapping[str, Algorithm],
    environments: Mapping[str, Environment],
    policy: Policy,
) -> TrainProcessing:
    assert config.seq_len is not None
    pre_filters, post_filters = (
        [Filter(entry.label, entry.make_test(policy.tokenizer.vocab_size), entry.enforce) for entry in entries]
        for entries in (config.pre_batch_filters, config.post_batch_filters)
    )
    return TrainProcessing(
        algorithms,
        environments,
        pre_filters,
        post_filters,
        config.seq_len,
        {env.name: env.timeout for env in config.train.env},
        {env.name: gate.make() for env in config.train.env if (gate := config.curriculum_of(env).gate) is not None},
        in_order=config.max_async_level == 0,
        past=policy.past,
    )


def _pipeline_settings(
    config: OrchestratorConfig, environments: Environments, policy: Policy, frozen: frozenset[str]
) -> tuple[PipelineSettings, Concurrency | None]:
    """Return the settings of the pipeline, and the controller of `max_inflight`, None if it is constant.

    It is constant if a frozen model samples episodes: these leave the engines idle, so reports would be misleading.
    """
    assert config.max_steps is not None and config.seq_len is not None
    if config.seq_len > policy.max_model_len:
        fact = f"the inference server accepts at most {policy.max_model_len} tokens"
        fix = "Raise inference.max_model_len, or lower seq_len."
        raise BadInput(fact, key="seq_len", value=config.seq_len, fix=fix)
    train_sizes = {env.name: env.group_size or config.group_size for env in config.train.env}
    eval_sizes = {env.name: env.group_size or config.eval.group_size for env in config.eval.env}
    sizes = {Kind.TRAIN: train_sizes, Kind.EVAL: eval_sizes}
    capacity = sum(health.capacity for health in policy.engines)
    concurrency = None
    if config.max_inflight_rollouts == "auto":
        max_inflight = initial_limit(capacity)
        if not frozen:
            largest = max((sizes[kind][name] for kind, name in environments), default=1)
            concurrency = Concurrency(capacity, largest, config.max_off_policy_steps)
            max_inflight = concurrency.limit
    else:
        max_inflight = config.max_inflight_rollouts
    together = [slot for slot, (_, environment, _) in environments.items() if environment.scores_groups]
    largest = max((sizes[kind][name] for kind, name in together), default=0)
    if largest > max_inflight:
        fact = f"an environment scores groups of {largest}, whose episodes must run at once"
        fix = f"Raise it to at least {largest}, or lower group_size."
        raise BadInput(fact, key="orchestrator.max_inflight_rollouts", value=max_inflight, fix=fix)
    settings = PipelineSettings(
        max_steps=config.max_steps,
        batch_size=config.batch_size,
        token_batch_size=config.token_batch_size,
        seq_len=config.seq_len,
        group_sizes=train_sizes,
        max_inflight=max_inflight,
        engine_slots=None if frozen else capacity,
        max_async_level=config.max_async_level,
        max_off_policy_steps=config.max_off_policy_steps,
        max_empty_batches=config.max_empty_batches,
        tasks_per_minute=config.tasks_per_minute,
        scored_together=frozenset(name for kind, name in together if kind is Kind.TRAIN),
        frozen=frozen,
    )
    return settings, concurrency


def train_tasks(config: OrchestratorConfig, env: TrainEnvConfig, tasks: Sequence[Task]) -> TrainTasks:
    """Return how the tasks of a training environment are drawn, by a new sampler."""
    chosen = config.curriculum_of(env).sampler
    sampler = None if chosen is None else chosen.make(tasks)
    return TrainTasks(env.name, tasks, draw_weight(config, env, len(tasks)), sampler)


def settings_digest(config: OrchestratorConfig) -> str:
    """Return a digest of the settings that draws and credit depend on, so that an audit can tell where they changed."""
    filters = {"pre_batch_filters", "post_batch_filters"}
    used = config.model_dump(mode="json", include={"seed", "seq_len", "group_size", "train", "algo", *filters})
    return fingerprint([used]).digest


def _build_eval_source(config: OrchestratorConfig, environments: Environments, run: RunDir) -> EvalSource:
    defaults = config.eval
    evals = []
    # By environment, the last version that needs no evaluation, as far as it is recorded.
    evaluated = {} if defaults.eval_base_model else {env.name: Version(0, 0) for env in defaults.env}
    history = History(Tail(run.metrics).read())
    for env in defaults.env:
        _, environment, tasks = environments[Kind.EVAL, env.name]
        evals.append(
            EvalEnv(
                env.name,
                tasks[: env.num_examples or defaults.num_examples or len(tasks)],
                env.interval or defaults.interval,
                env.group_size or defaults.group_size,
                pinned=defaults.pin_version if env.pin_version is None else env.pin_version,
                together=environment.scores_groups,
                solved=defaults.solved if env.solved is None else env.solved,
            )
        )
        if versions := history.evals.get(env.name):
            evaluated[env.name] = Version(history.incarnation, max(versions))
    return EvalSource(evals, evaluated, again_on_resume=not defaults.skip_eval_on_resume)


def _build_sampler(
    config: OrchestratorConfig, policy: Policy, kind: Kind, env: EnvConfig, drift: Drift, source: ServedModel | None
) -> ContextFactory:
    """Return the sampler of an environment's episodes: from `source`, a frozen model, or else from the policy."""
    assert config.seq_len is not None
    defaults = config.train.sampling if kind is Kind.TRAIN else config.eval.sampling
    options = {
        **env.sampling.over(defaults).model_dump(exclude_none=True),
        "pool_size": config.renderer.pool_size,
        # Seeds make some engines slower, and only at level 0 does a repeated run sample from the same weights.
        "seed": config.seed if config.max_async_level == 0 else None,
    }
    if source is not None:
        return FrozenSampler(source, policy.renderer, policy.tokenizer, config.seq_len, **options)
    latents = config.model.latents
    if latents is not None and kind is Kind.EVAL and latents.type == "soft":
        latents = None  # models that are trained with soft thoughts are used without them
    # Engines score completions as plain tokens, which would not be comparable.
    is_observed = kind is Kind.TRAIN and latents is None
    return Sampler(
        policy.client,
        policy.renderer,
        policy.tokenizer,
        config.seq_len,
        **options,
        cache_salt=lambda: str(policy.watcher.version),
        observe=drift.observe if is_observed else None,
        trains=kind is Kind.TRAIN,
        latents=None if latents is None else LatentParams(**latents.request),
        routed_experts=config.routed_experts and kind is Kind.TRAIN,
    )


def startup_lines(config: OrchestratorConfig, tasks: Mapping[tuple[Kind, str], int]) -> list[str]:
    """Return a line for each environment. `tasks` is the number of tasks by kind and name."""
    weights = {env.name: draw_weight(config, env, tasks[Kind.TRAIN, env.name]) for env in config.train.env}
    lines = [
        _training_line(config, env, tasks[Kind.TRAIN, env.name], weights[env.name] / sum(weights.values()))
        for env in config.train.env
    ]
    defaults = config.eval
    for entry in defaults.env:
        total = tasks[Kind.EVAL, entry.name]
        used = min(total, entry.num_examples or defaults.num_examples or total)
        episodes, interval = entry.group_size or defaults.group_size, entry.interval or defaults.interval
        each = "1 episode" if episodes == 1 else f"{episodes} episodes"
        when = "every step" if interval == 1 else f"every {interval} steps"
        lines.append(f"evaluation on {entry.name}: {used:,} tasks, {each} each, {when}")
    return lines


def draw_weight(config: OrchestratorConfig, env: TrainEnvConfig, tasks: int) -> float:
    """Return an environment's `ratio` if any environment has one (1 for the others), else its number of tasks."""
    by_ratio = any(other.ratio is not None for other in config.train.env)
    return (env.ratio or 1.0) if by_ratio else float(tasks)


def _training_line(config: OrchestratorConfig, env: TrainEnvConfig, tasks: int, share: float) -> str:
    algo, curriculum = config.algo_of(env), config.curriculum_of(env)
    parts = [
        f"{tasks:,} tasks",
        f"{share:.0%} of the draws",
        f"groups of {env.group_size or config.group_size}",
        f"algorithm {algo.type}",
        f"sampler {curriculum.sampler.type if curriculum.sampler else 'shuffled'}",
    ]
    if curriculum.gate is not None and curriculum.gate.type != "none":
        parts.append(f"gate {curriculum.gate.type}")
    filters = [*config.pre_batch_filters, *config.post_batch_filters]
    parts.append(f"filters {', '.join(f.label for f in filters if f.enforce) or 'none'}")
    teacher = algo.sampling_source or getattr(algo, "teacher", None)
    if isinstance(teacher, str):
        parts.append(f"teacher the {teacher}")
    elif isinstance(teacher, PastPolicyConfig):
        parts.append(f"teacher the policy after the last step that {teacher.every} divides")
    elif teacher is not None:
        parts.append(f"teacher {teacher.name} at {', '.join(teacher.base_url)}")
    return f"training on {env.name}: {'; '.join(parts)}"


def notify_changed_tasks(environments: Environments, journal: Journal, status: Status) -> None:
    """Notify the user of each environment whose tasks differ from the last start: draws are positions in them.

    The run continues, since a data set may have been fixed on purpose. The journal records the current tasks.
    """
    for (kind, name), (_, _, tasks) in environments.items():
        now = fingerprint(task.data for task in tasks)
        before = journal.exchange_data(kind, name, now)
        if before is not None and (change := before.describe_change(now)):
            status.notify(
                f"the tasks of the {kind} environment {name!r} have changed since the run last started: {change}. "
                f"{CHANGED_TASKS_EFFECT[kind]}"
            )
