"""`[orchestrator]`: environments, algorithms, batches, evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from headrace.config.algorithms import ALGORITHMS, AlgorithmConfig
from headrace.config.base import Config, as_table, rename_key
from headrace.config.environments import CurriculumConfig
from headrace.config.model import HttpUrl, ModelConfig, PastPolicyConfig, RendererConfig, SamplingConfig
from headrace.config.registry import Alternative, Registry
from headrace.errors import InvalidValue
from headrace.rollout.types import Rollout


class EnvConfig(Config):
    """One environment of a slot."""

    id: str
    """The environment: one that ships, `package.module:name` of your own, or `library:name`."""
    name: str = ""
    """Name in metrics; unset: the id."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment's constructor."""
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    """How its turns are sampled; unset keys are inherited from `train` or `eval`."""
    timeout: float | None = Field(None, gt=0)
    """Timeout of one episode in seconds."""
    workers: int = Field(0, ge=0)
    """Worker processes for episodes, for CPU-bound environments; 0: episodes run on the orchestrator's event loop."""
    worker_memory_mb: int | None = Field(None, gt=0)
    """Resident memory in MB at which a worker is replaced; unset: never."""

    @model_validator(mode="before")
    @classmethod
    def _name_is_id(cls, value: Any) -> Any:
        if isinstance(value, dict) and not value.get("name") and value.get("id"):
            value["name"] = value["id"]
        return value


class TrainEnvConfig(EnvConfig):
    ratio: float | None = Field(None, gt=0)
    """Relative share of drawn tasks, set for all environments or for none; unset: by number of tasks."""
    group_size: int | None = Field(None, ge=1)
    """Episodes per prompt; unset: that of `[orchestrator]`."""
    algo: AlgorithmConfig | None = None
    """The algorithm of this environment, which inherits no keys; unset: that of `[orchestrator]`."""
    curriculum: CurriculumConfig = Field(default_factory=CurriculumConfig)
    """Sampler and gate; where unset, those of `[orchestrator.train.curriculum]`."""

    @model_validator(mode="before")
    @classmethod
    def _advantage_is_algo(cls, value: Any) -> Any:
        return _fold_advantage(value)


def _fold_advantage(section: Any) -> Any:
    """Read `advantage` as another name of `algo`."""
    if not isinstance(section, dict) or "advantage" not in section:
        return section
    tables = {key: as_table(section[key], "type") for key in ("algo", "advantage") if key in section}
    return rename_key({**section, **tables}, "advantage", "algo")


class EvalEnvConfig(EnvConfig):
    interval: int | None = Field(None, ge=1)
    """Steps between evaluations; unset: that of `[eval]`."""
    num_examples: int | None = Field(None, ge=1)
    """Tasks per evaluation; unset: that of `[eval]`."""
    group_size: int | None = Field(None, ge=1)
    """Episodes per task; unset: that of `[eval]`."""
    pin_version: bool | None = None
    """Sample each evaluation from one version; unset: that of `[eval]`."""
    solved: float | None = None
    """Lowest reward that counts as solved in pass@k; unset: that of `[eval]`."""


def env_name_problems(key: str, envs: Sequence[EnvConfig]) -> Iterator[InvalidValue]:
    """Yield names that are reserved or not unique; `key` is that of the list."""
    names = [env.name for env in envs]
    for number, name in enumerate(names):
        if name == "all" or name in names[:number]:
            fact = "reserved for the total in metrics" if name == "all" else "another environment has this name, too"
            yield InvalidValue(fact, key=f"{key}.{number}.name", value=name, fix="Set a name of its own.")


DefaultSampling = Annotated[SamplingConfig, AfterValidator(lambda given: given.over(SamplingConfig(temperature=1.0)))]


class TrainConfig(Config):
    sampling: DefaultSampling = Field(default=SamplingConfig(), validate_default=True)
    """How turns are sampled in training; the temperature is 1 by default."""
    curriculum: CurriculumConfig = Field(default_factory=CurriculumConfig)
    """How tasks are drawn, and which groups are trained on."""
    env: list[TrainEnvConfig] = Field(default_factory=list)
    """The environments that are trained on, one table each."""


class EvalConfig(Config):
    interval: int = Field(100, ge=1)
    """Steps between evaluations."""
    num_examples: int | None = Field(None, ge=1)
    """Tasks per evaluation; unset: all of them."""
    group_size: int = Field(1, ge=1)
    """Episodes per task: k in avg@k and pass@k."""
    sampling: DefaultSampling = Field(default=SamplingConfig(), validate_default=True)
    """How turns are sampled in evaluation; the temperature is 1 by default."""
    eval_base_model: bool = True
    """Also evaluate before the first step."""
    skip_eval_on_resume: bool = True
    """Do not evaluate the version from which a run is resumed."""
    pin_version: bool = False
    """Sample each evaluation from one version: weight updates wait until it is complete."""
    solved: float | None = None
    """Lowest reward that counts as solved in pass@k. Unset: pass@k is only reported if the environment's `correct`, or
    else the reward, is 0 or 1 in every episode."""
    env: list[EvalEnvConfig] = Field(default_factory=list)
    """The environments that are evaluated, one table each."""


NOTHING_EVALUATED = "the section has no environment, so nothing is evaluated"


def evaluates_nothing(section: EvalConfig) -> bool:
    """Return whether to omit the section from the saved run file: a user's one without environments is refused."""
    return not section.env


class ClientConfig(Config):
    """How the orchestrator connects to the engines."""

    base_url: list[HttpUrl] = Field(default_factory=list)
    """URLs of external engines, as http://host:port; empty: the engines of this run, with their keys."""
    api_key_var: str = "HEADRACE_API_KEY"
    """The environment variable with the API key of the engines in `base_url`; not exported: no key is sent."""
    admin_key_var: str = "HEADRACE_ADMIN_KEY"
    """The environment variable with their key for pausing, updating weights and resuming."""
    keys_file: Path | None = None
    """A file with both keys instead, as `inference.http.keys_file`, of which the first of each kind is sent. It is read
    again when an engine refuses a key."""
    timeout: float | None = Field(None, gt=0)
    """Timeout of one request in seconds; then each other engine is tried once. Unset: 600, or 3600 if engines pause
    during training steps on the same GPU."""
    retry_for: float | None = Field(None, ge=0)
    """Seconds for which a request is retried while no engine is reachable or has capacity, before the episode fails.
    Unset: 300, or 3600 if engines pause during training steps on the same GPU."""
    start_timeout: float = Field(600.0, gt=0)
    """Seconds until the engines must be ready at the start."""
    update_timeout: float = Field(600.0, gt=0)
    """Seconds that an engine may take to load new weights."""

    def resolve_timeouts(self, *, alternating: bool) -> tuple[float, float]:
        """Return `timeout` and `retry_for` in seconds, with defaults for unset ones."""
        defaults = (3600.0, 3600.0) if alternating else (600.0, 300.0)
        timeout, retry_for = self.timeout, self.retry_for
        return defaults[0] if timeout is None else timeout, defaults[1] if retry_for is None else retry_for


class OrchestratorRendererConfig(RendererConfig):
    pool_size: int = Field(1, ge=1)
    """Threads that render the long prompts of an environment."""

    @model_validator(mode="before")
    @classmethod
    def _absent_is_none(cls, value: Any) -> Any:
        """Read null as "none": no renderer."""
        return {"name": "none"} if value is None else value


FILTERS: Registry[FilterConfig] = Registry("filter")


class FilterConfig(Alternative):
    """A test of a rollout that keeps it out of a batch, or only counts it."""

    REGISTRY = FILTERS
    READS_ADVANTAGES: ClassVar[bool] = False
    """Reads advantages. In `post_batch_filters` such a filter is enforced unless `enforce` is set."""

    type: str
    enforce: bool = False
    """Drop matching rollouts; false: only count them."""

    @property
    def label(self) -> str:
        """The name in metrics."""
        return self.type

    def make_test(self, vocab_size: int) -> Callable[[Rollout], bool]:
        """Return the test of whether a rollout is dropped."""
        raise NotImplementedError


def _default_pre_filters() -> list[FilterConfig]:
    return [FILTERS.section(name).model_validate({}) for name in ("gibberish", "repetition", "zero_advantage")]


def _enforced_after_batch(filters: list[FilterConfig]) -> list[FilterConfig]:
    """Enforce filters of advantages, unless `enforce` is set."""
    unset = [entry.READS_ADVANTAGES and "enforce" not in entry.model_fields_set for entry in filters]
    return [
        e.model_copy(update={"enforce": True}) if is_unset else e for e, is_unset in zip(filters, unset, strict=True)
    ]


class OrchestratorConfig(Config):
    model: ModelConfig = Field(default_factory=ModelConfig)
    """Filled from `model`."""
    output_dir: Path | None = None
    """Filled from `output_dir`."""
    max_steps: int | None = Field(None, ge=1)
    """Filled from `max_steps`."""
    seq_len: int | None = Field(None, ge=2)
    """Filled from `seq_len`."""
    seed: int = 0
    """Seed of the order of tasks; filled from `seed`."""
    batch_size: int | None = Field(None, ge=1)
    """Rollouts per step; 128 unless `token_batch_size` is set."""
    token_batch_size: int | None = Field(None, ge=1)
    """Tokens per step, instead of `batch_size`."""
    group_size: int = Field(8, ge=1)
    """Episodes per prompt, whose rewards are compared."""
    max_inflight_rollouts: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Concurrent episodes of training and evaluation together. `auto` starts with 1.5 times the `max_running` of the
    engines, and adapts: more while they have free capacity, fewer when queue or KV cache are full, or when more than 5%
    of the rollouts are dropped for their age."""
    tasks_per_minute: float | None = Field(None, gt=0)
    """Limit on started tasks of training and evaluation together; a group counts as one task. Unset: no limit."""
    max_off_policy_steps: int = Field(8, ge=0)
    """Rollouts whose oldest token is more than this many steps old are dropped."""
    max_async_level: int = Field(1, ge=0)
    """Steps by which batches may be ahead of the trainer; 0: synchronous sampling and training."""
    max_empty_batches: int | None = Field(None, ge=1)
    """The run fails after this many consecutive batches without trainable rollouts; unset: never."""
    pre_batch_filters: list[FilterConfig] = Field(default_factory=_default_pre_filters)
    """Filters that keep rollouts out of a batch; with enforce = false they only count them."""
    post_batch_filters: Annotated[list[FilterConfig], AfterValidator(_enforced_after_batch)] = Field(
        default_factory=lambda: _enforced_after_batch(_default_pre_filters())
    )
    """Filters that drop rollouts of a full batch; with enforce = false they only count them."""
    routed_experts: bool = False
    """Have engines return the experts of each sampled token. A run sets it where the trainer needs it
    (`trainer.router_replay`)."""
    drift_probes: int = Field(2, ge=0)
    """Completions that are scored again per version: this many that it sampled alone, and as many that it only
    finished; 0: none."""
    log_loop_interval: float = Field(5.0, gt=0)
    """Seconds between gauges of requests in flight and queued."""
    keep_rollouts: int = Field(1000, ge=1)
    """Number of newest steps, and of evaluated versions, whose rollouts are kept on disk."""
    algo: AlgorithmConfig = Field(default_factory=ALGORITHMS.make_default)
    """The algorithm of environments without their own `algo`."""
    renderer: OrchestratorRendererConfig = Field(default_factory=OrchestratorRendererConfig)
    """How chat messages are rendered to tokens."""
    client: ClientConfig = Field(default_factory=ClientConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    """The environments that are trained on."""
    eval: EvalConfig = Field(default_factory=EvalConfig, exclude_if=evaluates_nothing)
    """Evaluation of the policy during the run."""

    @model_validator(mode="before")
    @classmethod
    def _read_other_names(cls, value: Any) -> Any:
        """Read `filters` as another name of `post_batch_filters`, and `advantage` of `algo`; set the default size."""
        if not isinstance(value, dict):
            return value
        if value.get("batch_size") is None and value.get("token_batch_size") is None:
            value["batch_size"] = 128
        if "filters" in value:
            if "post_batch_filters" in value:
                raise InvalidValue("another name of post_batch_filters, which is set", key="filters", fix="Give one.")
            value["post_batch_filters"] = value.pop("filters")
        return _fold_advantage(value)

    def algo_of(self, env: TrainEnvConfig) -> AlgorithmConfig:
        """Return an environment's own algorithm, else the inherited one."""
        return self.algo if env.algo is None else env.algo

    def curriculum_of(self, env: TrainEnvConfig) -> CurriculumConfig:
        """Return an environment's own sampler and gate, else the inherited ones."""
        return env.curriculum.over(self.train.curriculum)

    def train_temperature(self, env: TrainEnvConfig) -> float:
        """Return the sampling temperature of an environment."""
        temperature = env.sampling.over(self.train.sampling).temperature
        assert temperature is not None  # it has a default
        return temperature

    @property
    def past_policy(self) -> Literal["start"] | PastPolicyConfig | None:
        """The policy of the run's own past that a further server of the run scores with; None: there is none."""
        return next((past for env in self.train.env for past in self.algo_of(env).past_policies), None)

    def notices(self) -> list[str]:
        """Warn about groups of one where advantages are relative to the group."""
        return [
            f"orchestrator.train.env {env.name!r} has group_size = 1, and {self.algo_of(env).type} compares the "
            "rollouts of a group with each other: alone, a rollout has no credit; raise group_size, or set "
            'algo.type = "reward", which is REINFORCE.'
            for env in self.train.env
            if self.algo_of(env).COMPARES and (env.group_size or self.group_size) == 1
        ]

    def problems(self) -> Iterator[InvalidValue]:
        if self.max_async_level > self.max_off_policy_steps:
            fact = f"above max_off_policy_steps, which is {self.max_off_policy_steps}: "
            fact += "what is sampled that far ahead would be dropped as too old"
            yield self.invalid("max_async_level", fact, "Lower max_async_level, or raise max_off_policy_steps.")
        for slot in ("pre_batch_filters", "post_batch_filters"):
            names = [entry.label for entry in getattr(self, slot)]
            for number, name in enumerate(names):
                if name in names[:number]:
                    fix = "Leave one out; two of your own need different names."
                    fact = "there is already a filter of this name"
                    yield InvalidValue(fact, key=f"{slot}.{number}", value=name, fix=fix)
        yield from env_name_problems("train.env", self.train.env)
        yield from env_name_problems("eval.env", self.eval.env)
        yield from self._batch_problems()
        yield from self._past_policy_problems()
        if "eval" in self.model_fields_set and not self.eval.env:
            fix = "Add an [[orchestrator.eval.env]], or take the section back: --orchestrator.eval null."
            yield InvalidValue(NOTHING_EVALUATED, key="eval.env", fix=fix)
        for number, env in enumerate(self.train.env):
            yield from self._environment_problems(f"train.env.{number}", env)
        if not self.train.env:
            yield from self._algorithm_problems("algo", self.algo)
        if self.renderer.name == "none":
            fact = "environments use chat messages, which need a renderer"
            yield self.invalid("renderer.name", fact, 'Set "auto", or leave it out.')
        if self.renderer.pool_size > 1 and not self.train.env and not self.eval.env:
            fact = "there is no environment whose prompts would be rendered"
            yield self.invalid("renderer.pool_size", fact, "Leave it out, or add a [[train.env]] or [[eval.env]].")

    def _past_policy_problems(self) -> Iterator[InvalidValue]:
        first = self.past_policy
        if first is not None and self.client.base_url:
            fact = "a teacher or a kl.reference of the run's own past is served by a server that the run starts"
            fix = "Leave client.base_url out, so that the run starts its servers; or give a frozen model."
            yield self.invalid("client.base_url", fact, fix)
        for number, env in enumerate(self.train.env):
            if any(past != first for past in self.algo_of(env).past_policies):
                fact = "one server has the run's past policy, and algorithms refer to two different ones"
                fix = "Give all the same teacher.every, or serve one as a frozen model."
                yield InvalidValue(fact, key=f"train.env.{number}", value=env.name, fix=fix)

    def _batch_problems(self) -> Iterator[InvalidValue]:
        if self.batch_size is not None and self.token_batch_size is not None:
            fact = f"batch_size is {self.batch_size}, and a batch is counted in rollouts or in tokens"
            yield self.invalid("token_batch_size", fact, "Give batch_size or token_batch_size.")
        for size in sorted({env.group_size or self.group_size for env in self.train.env} or {self.group_size}):
            if self.batch_size is not None and self.batch_size % size:
                fix = f"Set a multiple, as {-(-self.batch_size // size) * size}."
                yield self.invalid("batch_size", f"not whole groups of group_size = {size}", fix)
            if self.max_inflight_rollouts != "auto" and self.max_inflight_rollouts < size:
                fix = f'Raise it to at least {size}, or set "auto".'
                yield self.invalid("max_inflight_rollouts", f"less than a group of group_size = {size}", fix)

    def _environment_problems(self, key: str, env: TrainEnvConfig) -> Iterator[InvalidValue]:
        if env.ratio is None and any(other.ratio is not None for other in self.train.env):
            fix = "Set ratio on all environments, or on none: then tasks are drawn by their number."
            yield InvalidValue("not set, while other environments have a ratio", key=f"{key}.ratio", fix=fix)
        if self.train_temperature(env) == 0:
            own = "train" if env.sampling.temperature is None else key
            fact, fix = "greedy samples have no usable logprobs", "Set a temperature above 0; evaluation may be greedy."
            yield InvalidValue(fact, key=f"{own}.sampling.temperature", value=0, fix=fix)
        yield from self._algorithm_problems("algo" if env.algo is None else f"{key}.algo", self.algo_of(env))
        gate = env.curriculum.gate
        if gate is not None and gate.READS_ADVANTAGES and not self.algo_of(env).HAS_ADVANTAGES:
            fact = f"the gate looks at advantages, and {self.algo_of(env).type} gives none"
            fix = 'Leave it out, or set type = "none".'
            yield InvalidValue(fact, key=f"{key}.curriculum.gate", value=gate.type, fix=fix)

    def _algorithm_problems(self, key: str, algo: AlgorithmConfig) -> Iterator[InvalidValue]:
        penalty = getattr(algo, "length_penalty", None)
        if penalty is not None and penalty.needs_seq_len and self.seq_len is None:
            fact = "tokens are counted in units of seq_len, which is not set"
            fix = 'Set seq_len, or normalize_by = "group_max".'
            yield InvalidValue(fact, key=f"{key}.length_penalty", fix=fix)
        if self.renderer.name == "none" and algo.RENDERER_FOR:
            fact = f"{algo.type} {algo.RENDERER_FOR}, and there is no renderer"
            fix = "Set renderer.name, or leave it out for the one that fits the model."
            yield InvalidValue(fact, key=key, value=algo.type, fix=fix)
        if self.renderer.name == "default" and algo.NEEDS_ROLES:
            fact = f"{algo.type} {algo.RENDERER_FOR}, and the model's own chat template does not say"
            fix = 'Set the name of the model\'s family, for example "qwen3", or "auto".'
            yield self.invalid("renderer.name", fact, fix)
