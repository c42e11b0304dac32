"""The run file of `headrace sft`, and what it shares with that of `headrace dpo`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from headrace.config.base import Config
from headrace.config.environments import EnvironmentsConfig
from headrace.config.inference import InferenceConfig
from headrace.config.launch import LaunchConfig
from headrace.config.model import MODEL_ORIGINS, RendererConfig
from headrace.config.monitors import OtelConfig, PrometheusConfig, TensorboardConfig, TrackioConfig, WandbConfig
from headrace.config.orchestrator import (
    NOTHING_EVALUATED,
    EvalConfig,
    OrchestratorConfig,
    OrchestratorRendererConfig,
    env_name_problems,
    evaluates_nothing,
)
from headrace.config.trainer import TrainingConfig
from headrace.errors import InvalidValue

BELONGS = {"split": ("name",), "subset": ("name",), "columns": ("path", "name"), "args": ("env",)}
"""Keys of a source of examples, each with the origins that use it."""


def exclusive(section: str, *origins: str) -> Iterator[tuple[str, str]]:
    """Pair each origin with the keys that it does not use: setting it in a later file drops them."""
    for origin in origins:
        yield from ((f"{section}.{origin}", f"{section}.{key}") for key, own in BELONGS.items() if origin not in own)


class ColumnsConfig(Config):
    """Column names of the data; unset: the same as the key."""

    messages: str | None = None
    """Column with the whole conversation; all assistant messages are trained on."""
    prompt: str | None = None
    """Column with the prompt, a text or messages; not trained on."""
    completion: str | None = None
    """Column with the completion, a text or messages; assistant messages are trained on."""
    tools: str | None = None
    """Column with the schemas of the tools in the conversation."""

    def problems(self) -> Iterator[InvalidValue]:
        if self.messages is not None and (self.prompt is not None or self.completion is not None):
            other = "prompt" if self.prompt is not None else "completion"
            fact = f"{other} is set, too, and a row is read as one of the two forms"
            yield self.invalid("messages", fact, "Name messages, or prompt and completion.")


class SourceConfig(Config):
    """Where examples come from."""

    ORIGINS: ClassVar[tuple[str, ...]] = ("path", "name")
    """Keys of which exactly one is given."""

    path: Path | None = None
    """JSONL or Parquet, a file or a directory of such files."""
    name: str | None = None
    """A Hugging Face dataset: its name on the hub, or a local directory that the `datasets` library understands."""
    split: str | None = None
    """Split of the dataset `name`; unset: `train`."""
    subset: str | None = None
    """Subset of the dataset `name`, where it has several."""
    columns: Config = Field(default_factory=Config)
    """Column names of the data."""

    def problems(self) -> Iterator[InvalidValue]:
        """Yield what is wrong unless exactly one origin is given, and with it only what belongs to it."""
        origins = [origin for origin in self.ORIGINS if getattr(self, origin) is not None]
        one = f"Give exactly one of {', '.join(self.ORIGINS[:-1])} and {self.ORIGINS[-1]}."
        if len(origins) > 1:
            yield self.invalid(origins[-1], f"{origins[0]} is set, too", one)
        for key, owners in BELONGS.items():
            value = getattr(self, key, None)
            shown = value.model_dump(exclude_none=True) if isinstance(value, Config) else value
            if not {*origins} & {*owners} and shown not in (None, {}):
                fact = f"belongs to {' or '.join(owners)}, and {origins[0] if origins else 'nothing'} is given"
                yield InvalidValue(fact, key=key, value=shown, fix="Leave it out." if origins else one)
        if not origins:
            yield InvalidValue("no source of examples is set", fix=one)


class ConversationsConfig(SourceConfig):
    """Conversations: `messages`, or `prompt` and `completion`."""

    ORIGINS: ClassVar[tuple[str, ...]] = ("path", "name", "env")

    columns: ColumnsConfig = Field(default_factory=ColumnsConfig)
    env: str | None = None
    """An environment that can demonstrate its own tasks."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment `env`."""


class TrainingDataConfig(SourceConfig):
    """Exactly one source of examples."""

    batch_size: int = Field(64, ge=1)
    """Examples per step."""
    pack: bool = True
    """Several examples in one pass of the model, none of which sees another; false: one at a time, to the same loss."""


class HeldOutConfig(SourceConfig):
    """Examples to measure the loss on: one source, or `fraction`."""

    ORIGINS: ClassVar[tuple[str, ...]] = ("path", "name", "fraction")

    fraction: float | None = Field(None, gt=0, lt=1)
    """Fraction of the rows of `[data]` to hold out."""
    interval: int = Field(50, ge=1)
    """Steps between validations; there is also one before the first step and one after the last."""
    max_examples: int = Field(1000, ge=1)
    """Most examples per validation; of more, the same random selection each time."""

    def problems(self) -> Iterator[InvalidValue]:
        yield from super().problems()
        if self.name is not None and self.split is None:
            fix = "Set the split of the dataset that is for validation."
            yield InvalidValue("required with name, and not set", key="split", fix=fix)


class SftDataConfig(ConversationsConfig, TrainingDataConfig):
    """Exactly one of `path`, `name` and `env`."""


class ValidationConfig(ConversationsConfig, HeldOutConfig):
    """Examples to measure the loss on: exactly one of `path`, `name`, `env` and `fraction`."""

    ORIGINS = ("path", "name", "env", "fraction")


class SftEvalConfig(EvalConfig):
    """As in an RL run: environments in which the model is evaluated while it is trained, beside the trainer."""

    pin_version: bool = True
    """Sample a whole evaluation from one version. Versions that are published meanwhile may be passed over."""

    def problems(self) -> Iterator[InvalidValue]:
        return env_name_problems("env", self.env)


class OfflineConfig(TrainingConfig):
    """A run that trains on examples, which it does not sample itself: of `headrace sft` and of `headrace dpo`."""

    COMMAND: ClassVar[str]
    """The command that such a run file is for."""
    PATHS_OF_FILE = ("data.path", "validation.path", "model.sft")
    TEXT_FOR = {"model": "name", "renderer": "name", "environments.sandbox": "kind"}  # noqa: RUF012

    data: TrainingDataConfig
    """The examples to train on."""
    validation: HeldOutConfig | None = None
    """Held-out examples; unset: none. They should not be trained on."""
    renderer: RendererConfig = Field(default_factory=RendererConfig)
    """How chat messages are rendered to tokens."""
    eval: SftEvalConfig = Field(default_factory=SftEvalConfig, exclude_if=evaluates_nothing)
    inference: InferenceConfig = Field(default_factory=InferenceConfig)
    """The server that `[eval]` samples from. Its model, renderer and seed are the run's."""
    environments: EnvironmentsConfig = Field(default_factory=EnvironmentsConfig)
    """What holds for the environments of `[eval]`."""
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

    def problems(self) -> Iterator[InvalidValue]:
        if self.max_steps is None:
            yield InvalidValue("required, and not set", key="max_steps", fix="Set the number of optimizer steps.")
        if self.seq_len is None:
            yield InvalidValue("required, and not set", key="seq_len", fix="Set the longest sequence in tokens.")
        for key in ("model", "output_dir", "renderer", "seed"):
            if getattr(self.inference, key) != getattr(InferenceConfig(), key):
                yield InvalidValue(f"the server takes the run's own {key}", key=f"inference.{key}", fix="Leave it out.")
        if self.model.latents is not None:
            fix = "Leave it out: thinking in latent space is learned by headrace rl."
            yield InvalidValue("examples have no latents to learn from", key="model.latents", fix=fix)
        if "eval" in self.model_fields_set and not self.eval.env:
            yield InvalidValue(NOTHING_EVALUATED, key="eval.env", fix="Add an [[eval.env]], or leave the section out.")
        if self.launch.sharing == "alternate":
            fact = "the trainer of such a run never waits, so that evaluation would never get the GPU"
            yield self.invalid("launch.sharing", fact, "Leave it out.")

    @property
    def evaluates(self) -> bool:
        """Whether a server and an orchestrator run beside the trainer."""
        return bool(self.eval.env)

    def is_evaluated(self, step: int) -> bool:
        """Return whether the version after `step` is evaluated."""
        return any(step % (env.interval or self.eval.interval) == 0 for env in self.eval.env)

    def server(self) -> InferenceConfig:
        """Return the server's configuration, filled from the run's keys."""
        filled = {key: getattr(self, key) for key in ("model", "output_dir", "renderer", "seed")}
        longest = self.inference.max_model_len or self.seq_len
        return self.inference.model_copy(update={**filled, "max_model_len": longest})

    def evaluator(self) -> OrchestratorConfig:
        """Return the configuration of an orchestrator that only evaluates."""
        shared = {key: getattr(self, key) for key in ("model", "output_dir", "max_steps", "seed", "eval")}
        renderer = OrchestratorRendererConfig(**self.renderer.model_dump())
        return OrchestratorConfig(**shared, seq_len=self.server().max_model_len, renderer=renderer, drift_probes=0)


class SftConfig(OfflineConfig):
    COMMAND = "sft"
    ALTERNATIVES = (
        MODEL_ORIGINS,
        ("data.path", "data.name", "data.env"),
        ("validation.path", "validation.name", "validation.env", "validation.fraction"),
        *exclusive("data", "path", "name", "env"),
        *exclusive("validation", "path", "name", "env", "fraction"),
        *(
            (f"{section}.columns.messages", f"{section}.columns.{key}")
            for section in ("data", "validation")
            for key in ("prompt", "completion")
        ),
        ("scheduler.decay_steps", "scheduler.decay_fraction"),
    )

    data: SftDataConfig
    """The examples to train on."""
    validation: ValidationConfig | None = None
    """Examples for the validation loss; unset: none. They should not be trained on: for an `env`, set `args.split`."""

    def problems(self) -> Iterator[InvalidValue]:
        yield from super().problems()
        if self.data.env is not None and self.validation is not None and self.validation.fraction is not None:
            fact = "a share of the rows is held out, and the demonstrations of data.env have no end"
            yield self.invalid("validation.fraction", fact, "Set validation.env instead.")
