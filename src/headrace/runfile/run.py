"""The run file of `headrace rl`: shared keys, the three processes, and how they are launched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, model_validator

from headrace.config.algorithms import KlConfig, hinted_length
from headrace.config.base import Config, Origins, Tree, sections_at
from headrace.config.environments import EnvironmentsConfig
from headrace.config.inference import InferenceConfig
from headrace.config.launch import LaunchConfig
from headrace.config.model import MODEL_ORIGINS, ModelConfig, PastPolicyConfig
from headrace.config.monitors import OtelConfig, PrometheusConfig, TensorboardConfig, TrackioConfig, WandbConfig
from headrace.config.orchestrator import OrchestratorConfig
from headrace.config.sft import OfflineConfig
from headrace.config.trainer import PastWeightsConfig, ReferenceConfig, TrainerConfig
from headrace.errors import InvalidValue, shown_value
from headrace.runfile.hackable.names import ALTERNATIVES, BATCH_SIZES, OTHER_MODEL_NAMES
from headrace.runfile.reading import value_at

SHARED: dict[str, tuple[str, ...]] = {
    "output_dir": ("trainer.output_dir", "orchestrator.output_dir", "inference.output_dir"),
    "model": ("trainer.model", "orchestrator.model", "inference.model"),
    "max_steps": ("trainer.max_steps", "orchestrator.max_steps"),
    "seq_len": ("trainer.seq_len", "orchestrator.seq_len"),
    "seed": ("trainer.seed", "orchestrator.seed", "inference.seed"),
    "orchestrator.renderer": ("inference.renderer",),
}
"""Keys that fill others. An equal value there is accepted, a different one is refused, unless the shared value is only
the default: then each section may have its own."""


class RunConfig(Config):
    COMMAND: ClassVar[str] = "rl"
    """The command that such a run file is for."""
    PATHS_OF_FILE = (
        "model.sft",
        "inference.http.keys_file",
        "inference.http.tls_certificate",
        "inference.http.tls_key",
        "orchestrator.client.keys_file",
    )
    ALTERNATIVES = (
        (*MODEL_ORIGINS, *OTHER_MODEL_NAMES),
        ("orchestrator.batch_size", "orchestrator.token_batch_size", *BATCH_SIZES),
        ("orchestrator.filters", "orchestrator.post_batch_filters"),
        ("orchestrator.algo.teacher", "orchestrator.algo.sampling.source"),
        *(
            ("orchestrator.algo.length_penalty.coef", f"orchestrator.algo.length_penalty.{weight}")
            for weight in ("output_weight", "input_weight", "turns_weight")
        ),
        ("trainer.scheduler.decay_steps", "trainer.scheduler.decay_fraction"),
        *ALTERNATIVES,
    )
    TEXT_FOR = {  # noqa: RUF012
        **{"model": "name", "orchestrator.algo": "type", "orchestrator.renderer": "name"},
        "environments.sandbox": "kind",
    }
    FILLED_FROM = {target: source for source, targets in SHARED.items() for target in targets}  # noqa: RUF012

    output_dir: Path
    """The run directory; it fills the key of all three processes."""
    max_steps: int | None = Field(None, ge=1)
    """Number of optimizer steps; required."""
    seq_len: int | None = Field(None, ge=2)
    """The longest sequence, prompt and completion together, in tokens; required."""
    seed: int = 0
    """Random seed; it fills the key of all three processes."""
    model: ModelConfig
    """The model to train; it fills the key of all three processes."""
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    """Optimizer, loss, checkpoints and published weights."""
    orchestrator: OrchestratorConfig = Field(default_factory=OrchestratorConfig)
    """Environments, algorithms, batches and evaluation."""
    inference: InferenceConfig = Field(default_factory=InferenceConfig)
    """The server that samples the policy, and the engine behind it."""
    environments: EnvironmentsConfig = Field(default_factory=EnvironmentsConfig)
    """What holds for all environments."""
    wandb: WandbConfig | None = None
    """Send metrics to Weights & Biases; unset: no."""
    tensorboard: TensorboardConfig | None = None
    """Write metrics as TensorBoard files; unset: no."""
    trackio: TrackioConfig | None = None
    """Write metrics to trackio's database; unset: no."""
    prometheus: PrometheusConfig | None = None
    """Serve the metrics of each process to Prometheus; unset: no."""
    otel: OtelConfig | None = None
    """Send OpenTelemetry traces of episodes; unset: no."""
    launch: LaunchConfig = Field(default_factory=LaunchConfig)

    @classmethod
    def translated(cls, tree: Tree, files: Sequence[Path], origins: Origins) -> tuple[Tree, list[str]]:
        from headrace.runfile.hackable.translation import is_hackable, translate

        return translate(tree, list(cls.model_fields), files, origins) if is_hackable(tree) else (tree, [])

    @model_validator(mode="before")
    @classmethod
    def _fill_shared(cls, tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        for source, targets in SHARED.items():
            value = value_at(tree, source.split("."))
            if value is None:
                continue
            for target in targets:
                _fill(tree, target.split("."), value, source)
        return tree

    def problems(self) -> Iterator[InvalidValue]:
        if self.max_steps is None:
            yield InvalidValue("required, and not set", key="max_steps", fix="Set the number of optimizer steps.")
        if self.seq_len is None:
            fix = "Set the longest sequence, prompt and completion together, in tokens."
            yield InvalidValue("required, and not set", key="seq_len", fix=fix)
        if not self.orchestrator.train.env:
            fact, fix = "the run has no environment to train on", "Add an [[orchestrator.train.env]] with an id."
            yield InvalidValue(fact, key="orchestrator.train.env", fix=fix)
        if self.model.latents is not None:
            yield from self._latent_problems()

    def _latent_problems(self) -> Iterator[InvalidValue]:
        algorithms = [self.orchestrator.algo_of(env) for env in self.orchestrator.train.env]
        penalties = [kl for algo in algorithms if (kl := getattr(algo, "kl", None)) is not None and kl.coef]
        if penalties and self.model.latents is not None and self.model.latents.type == "soft":
            fact = "soft thoughts (model.latents) have no logprobs of tokens to compare with those of a reference"
            yield InvalidValue(fact, key="orchestrator.algo.kl.coef", value=penalties[0].coef, fix="Leave it out.")
        if self.inference.engine != "embedded":
            fact = f"{self.inference.engine} cannot blend input embeddings (model.latents) while it samples"
            yield self.invalid(
                "inference.engine", fact, 'Set inference.engine = "embedded", or leave model.latents out.'
            )
        if self.orchestrator.max_async_level:
            fact = "latents (model.latents) are those of the policy that sampled them, and are trained without a ratio"
            yield self.invalid("orchestrator.max_async_level", fact, "Set it to 0.")

    @model_validator(mode="after")
    def _engine_takes_every_sequence(self) -> RunConfig:
        assert self.seq_len is not None
        longest = self.inference.max_model_len
        if longest is None:
            inference = self.inference.model_copy(update={"max_model_len": self._longest_request()})
            object.__setattr__(self, "inference", inference)
        elif longest < self.seq_len:
            fix = f"Leave it out, or raise it to at least {self.seq_len}."
            raise self.invalid("inference.max_model_len", f"below seq_len, which is {self.seq_len}", fix)
        return self

    @model_validator(mode="after")
    def _engines_elsewhere_read_files(self) -> RunConfig:
        """Use files: the address of a link would by default only be reachable from this machine."""
        weights = self.trainer.weights
        if self.orchestrator.client.base_url and weights.transport == "auto":
            trainer = self.trainer.model_copy(update={"weights": weights.model_copy(update={"transport": "files"})})
            object.__setattr__(self, "trainer", trainer)
        return self

    @model_validator(mode="after")
    def _trainer_keeps_reference(self) -> RunConfig:
        """Have the trainer keep the weights of penalties, of which it has one copy, and of teachers."""
        needed: ReferenceConfig | None = None
        ratio: bool | None = None
        for env in self.orchestrator.train.env:
            kl: KlConfig | None = getattr(self.orchestrator.algo_of(env), "kl", None)
            if kl is not None and kl.coef > 0 and kl.place == "loss":
                if ratio is not None and ratio != kl.ratio:
                    fact = f"the trainer has one penalty, and the kl of {env.name!r} has another ratio than that before"
                    fix = "Give both the same kl.ratio."
                    raise InvalidValue(fact, key="orchestrator.train.env", value=env.name, fix=fix)
                ratio = kl.ratio
            own = None if kl is None else kl.kept_by_trainer
            if own is not None and needed is not None and own != needed:
                fact = f"the trainer keeps one reference, and the kl of {env.name!r} refers to another than that of an "
                fact += "environment before it"
                fix = "Give both the same kl.reference, or serve one as a frozen model."
                raise InvalidValue(fact, key="orchestrator.train.env", value=env.name, fix=fix)
            needed = own or needed
        filled: dict[str, Any] = {} if needed is None else {"reference": needed}
        if isinstance(past := self.orchestrator.past_policy, PastPolicyConfig):
            ahead = self.orchestrator.max_async_level
            filled["past_weights"] = PastWeightsConfig(every=past.every, max_async_level=ahead)
        if ratio is not None:
            filled["kl_ratio"] = ratio
        if any(getattr(self.trainer, key) != value for key, value in filled.items()):
            object.__setattr__(self, "trainer", self.trainer.model_copy(update=filled))
        return self

    @model_validator(mode="after")
    def _engine_returns_routes(self) -> RunConfig:
        """Have the engine record experts, and the orchestrator request them, for a trainer that reads them."""
        is_own = self.inference.engine == "embedded" and not self.orchestrator.client.base_url
        mode = self.trainer.router_replay or ("replay" if is_own else "off")
        object.__setattr__(self, "trainer", self.trainer.model_copy(update={"router_replay": mode}))
        for name in ("orchestrator", "inference") if mode != "off" else ():
            section = getattr(self, name)
            object.__setattr__(self, name, section.model_copy(update={"routed_experts": True}))
        return self

    def _longest_request(self) -> int:
        """Return the tokens of the longest request: a sample, and a hint before it if the run's engines score hints."""
        assert self.seq_len is not None
        algorithms = [self.orchestrator.algo_of(env) for env in self.orchestrator.train.env]
        return hinted_length(self.seq_len) if any(algo.hints_policy for algo in algorithms) else self.seq_len

    def notices(self) -> list[str]:
        limit, longest = self.inference.max_model_len, self._longest_request()
        assert limit is not None  # it is filled
        own = [*self.orchestrator.notices(), *self.inference.notices()]
        return own + [  # hints may be short, and then fewer tokens will do
            f"orchestrator.train.env {env.name!r}: {algo.type} has the policy score hints with their samples, and "
            f"inference.max_model_len is {limit}: such a sequence may have {longest} tokens, and rollouts with one "
            f"too long are {algo.UNSCORED}; leave it out for that, or keep it if hints are that much shorter."
            for env in self.orchestrator.train.env
            if limit < longest and (algo := self.orchestrator.algo_of(env)).hints_policy
        ]


def _fill(tree: dict[str, Any], path: list[str], value: Any, source: str) -> None:
    """Put a shared value where a section lacks it; tables merge, and a contradiction is refused by name.

    What a section does not know stays where it is.
    """
    node: Any = tree
    for key in path[:-1]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            return  # not a table: validation of the tree says so better
    key = path[-1]
    if isinstance(value, dict) and isinstance(node.get(key, {}), dict):
        names = {name for section in sections_at(RunConfig, path) for name in section.model_fields}
        for name, inner in value.items():
            if name in names:
                _fill(tree, [*path, name], inner, f"{source}.{name}")
    elif key not in node:
        node[key] = value
    elif str(node[key]) != str(value):
        *parents, name = source.split(".")
        shared = sections_at(RunConfig, parents)[0].model_fields.get(name)
        if shared is None or shared.default != value:
            fact = f"{source} is {shown_value(value)}, and fills this key"
            fix = "Give one of the two, or the same value twice."
            raise InvalidValue(fact, key=".".join(path), value=node[key], fix=fix)


AnyRun = RunConfig | OfflineConfig
"""The run file of a run of any kind."""
