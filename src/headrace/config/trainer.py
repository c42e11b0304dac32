"""`[trainer]`: the optimizer step and what it leaves on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from headrace.config.base import Config
from headrace.config.model import ModelConfig
from headrace.config.registry import Alternative, Registry
from headrace.errors import InvalidValue


def _by_type(default: str, what: str, known: str) -> Discriminator:
    """Which member of a union a table is, by its `type`."""

    def chosen(value: Any) -> str:
        return str(value.get("type", default) if isinstance(value, dict) else getattr(value, "type", default))

    message = f"no such {what}. Known: {known}"
    return Discriminator(chosen, custom_error_type=f"unknown_{what}", custom_error_message=message)


def _checkpointing(value: Any) -> Any:
    """True has always meant `full`."""
    return {"True": "full", "none": False}.get(str(value), value)


Rate = Annotated[float, Field(ge=0, lt=1)]


class AnyOptimConfig(Config):
    """What all optimizers have in common."""

    lr: float = Field(1e-6, gt=0)
    """The learning rate that the scheduler scales, its highest value. The default is for all parameters of a language
    model; an adapter (`lora`) wants at least ten times it."""
    weight_decay: float = Field(0.0, ge=0)
    """Of every parameter, also of norms and biases."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Gradients are scaled down to this norm; 0: never."""
    offload_state: bool = False
    """Keep the optimizer's state in CPU memory, and bring each parameter's to the GPU for its own update only."""


class AdamWConfig(AnyOptimConfig):
    """Steps of a size that follows each parameter's average square of gradients."""

    type: Literal["adamw"] = "adamw"
    betas: tuple[Rate, Rate] = (0.9, 0.999)
    """How much of the averages of gradients and of their squares a step keeps."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the average square, so that small gradients are not blown up."""


class MuonConfig(AnyOptimConfig):
    """Muon for the matrices of hidden layers; AdamW, with `betas` and `eps`, for embeddings, head, norms and biases.

    Muon's updates are scaled to the size of AdamW's, so that one `lr`, of the size that AdamW needs, serves both.
    """

    type: Literal["muon"] = "muon"
    momentum: Rate = 0.95
    """How much of the average of gradients a step keeps."""
    nesterov: bool = True
    """Look one step ahead along the momentum."""
    ns_steps: int = Field(5, ge=1, lt=100)
    """Newton-Schulz iterations that make an update orthogonal."""
    betas: tuple[Rate, Rate] = (0.9, 0.999)
    """Of AdamW, for the parameters that Muon does not train."""
    eps: float = Field(1e-8, gt=0)
    """Of AdamW, for the parameters that Muon does not train."""


class SgdConfig(AnyOptimConfig):
    """Steps along the gradient, with momentum if it is set."""

    type: Literal["sgd"] = "sgd"
    momentum: Rate = 0.0
    """How much of the average of gradients a step keeps."""
    nesterov: bool = False
    """Look one step ahead along the momentum."""

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> SgdConfig:
        if self.nesterov and self.momentum == 0:
            raise InvalidValue(
                "Nesterov's step looks ahead along the momentum, which is 0",
                key="nesterov",
                value=True,
                fix="Set momentum above 0, or leave nesterov out.",
            )
        return self


OptimConfig = Annotated[
    Annotated[AdamWConfig, Tag("adamw")] | Annotated[MuonConfig, Tag("muon")] | Annotated[SgdConfig, Tag("sgd")],
    _by_type("adamw", "optimizer", "adamw, muon, sgd"),
]


class BasicSchedulerConfig(Config):
    """Warmup, then constant, or falling in a line or along a cosine to the end."""

    type: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises from 0."""
    min_factor: float = Field(0.0, ge=0, le=1)
    """What linear and cosine come down to, right after `max_steps`: the last step is still above it."""


class RestartsSchedulerConfig(Config):
    """A cosine that begins anew several times: down from the full rate to the lowest in every cycle."""

    type: Literal["cosine_with_restarts"] = "cosine_with_restarts"
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises from 0."""
    min_factor: float = Field(0.0, ge=0, le=1)
    """What each cycle comes down to, right after its last step."""
    cycles: int = Field(1, ge=1)
    """Cycles of equal length after the warmup; a single one is `cosine`."""


class WsdSchedulerConfig(Config):
    """Warmup, stable, decay: the learning rate falls over the last steps alone."""

    type: Literal["wsd"] = "wsd"
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises from 0."""
    min_factor: float = Field(0.0, ge=0, le=1)
    """What it comes down to, right after `max_steps`: the last step is still above it."""
    decay_steps: int | None = Field(None, ge=1)
    """Unset: `decay_fraction` of the run."""
    decay_fraction: float = Field(0.1, gt=0, le=1)
    """The last part of the run over which it falls, where `decay_steps` is unset."""
    decay_shape: Literal["linear", "sqrt"] = "linear"
    """`sqrt` falls with the square root of the progress: fast first, slowly at the end."""


SchedulerConfig = Annotated[
    Annotated[BasicSchedulerConfig, Tag("constant")]
    | Annotated[BasicSchedulerConfig, Tag("linear")]
    | Annotated[BasicSchedulerConfig, Tag("cosine")]
    | Annotated[RestartsSchedulerConfig, Tag("cosine_with_restarts")]
    | Annotated[WsdSchedulerConfig, Tag("wsd")],
    _by_type("constant", "scheduler", "constant, linear, cosine, cosine_with_restarts, wsd"),
]


LOSSES: Registry[LossConfig] = Registry("loss", default="default")


class LossConfig(Alternative):
    """What is minimized over the tokens that have advantages."""

    REGISTRY = LOSSES

    type: str

    @property
    def label(self) -> str:
        """Its name in messages."""
        return self.type

    def make(self) -> Callable[..., Any]:
        """Return the loss: a function from `PackedInputs` to `LossOutputs` of `headrace.trainer.loss`."""
        return self.compute

    def compute(self, inputs: Any) -> Any:
        """Return the loss and its metrics for the tokens of several whole sequences."""
        raise NotImplementedError


class RefKlConfig(Config):
    """The distillation component."""

    mask_low: float = Field(0.2, ge=0)
    """Tokens whose probability fell by more than this are masked."""
    kl_tau: float = Field(1e-3, ge=0)
    """Weight of the squared log-ratio to the policy that sampled."""


class CheckpointConfig(Config):
    interval: int = Field(50, ge=1)
    """Steps between checkpoints; the last step always gets one. One is put off while updates are skipped."""
    keep_last: int = Field(2, ge=1)
    """How many of the newest checkpoints stay on disk."""
    permanent_interval: int | None = Field(None, ge=1)
    """Checkpoints of steps that this divides are kept for good, in `checkpoints/permanent/`; unset: none."""


class LoraConfig(Config):
    """Train a difference of low rank of linear layers instead of the model's own parameters."""

    r: int = Field(16, ge=1)
    """The rank. An engine may have a highest one: vLLM's `--max-lora-rank` is 16 unless it is told otherwise."""
    alpha: int = Field(32, ge=1)
    """The difference is scaled by alpha / r."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r) instead, so that higher ranks do not learn more slowly."""
    target_modules: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = "all-linear"
    """Every linear layer but the head, or the last parts of names, such as `["q_proj", "v_proj"]`."""


class TrainingConfig(Config):
    """What an RL run and an SFT run have in common."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    """The model that is trained."""
    output_dir: Path | None = None
    """The directory in which the run keeps everything."""
    max_steps: int | None = Field(None, ge=1)
    """Optimizer steps after which the run ends."""
    seq_len: int | None = Field(None, ge=2)
    """Tokens per packed bin, and the longest sequence that is trained."""
    seed: int = 0
    """What decides every random choice of the trainer."""
    lora: LoraConfig | None = None
    """Unset: every parameter is trained."""
    optim: OptimConfig = Field(default_factory=AdamWConfig)
    """The optimizer."""
    scheduler: SchedulerConfig = Field(default_factory=BasicSchedulerConfig)
    """The learning rate over the run, as a multiple of `optim.lr`."""
    ckpt: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """When checkpoints are written, and which are kept."""
    max_skipped_updates: int = Field(20, ge=1)
    """Updates in a row with gradients that are not finite, and thus skipped, that end the run."""
    attention: Literal["auto", "cudnn", "flash", "sdpa"] = "auto"
    """What computes attention: `sdpa` runs anywhere, the others on a GPU in bfloat16; `cudnn` leaves rows of several
    sequences to `flash`. `auto` is the fastest that there is."""
    activation_checkpointing: Annotated[
        Literal["auto", False, "attention", "full", "selective"], BeforeValidator(_checkpointing)
    ] = "auto"
    """Recompute each layer in the backward pass: `full` (or true) all of it, `attention` all but attention, `selective`
    all but attention and matrix products. `auto`: as little as the memory of a GPU allows; on a CPU nothing."""
    memory_gb: float | None = Field(None, gt=0)
    """What `auto` may take of a GPU in all, parameters included; unset: what engines on it leave."""
    activation_offload: bool = False
    """Keep activations in CPU memory until the backward pass; on a GPU, and best with full checkpointing."""
    compile: Literal["auto"] | bool = "auto"
    """Compile each layer: faster on a GPU, after a minute of compiling. `auto`: on a GPU, but for small models."""
    lm_head_chunk: int = Field(4096, ge=1)
    """Tokens whose logits exist at once."""
    lm_head_fp32: bool = False
    """Compute logits in float32 where the rest computes in bfloat16: more exact, and a head that takes longer."""

    def bytes_per_parameter(self, *, while_training: bool) -> float:
        """What a trainer on one device holds there, between its steps or during one, activations aside: parameters,
        the optimizer's state, a snapshot of what was published last, and gradients."""
        computes = 4 if self.model.dtype == "float32" else 2
        if self.lora is not None:
            return computes + 0.5  # the frozen base; the adapter is small, and so are its gradients and its state
        state = {"adamw": 8, "muon": 4}.get(self.optim.type, 4 if getattr(self.optim, "momentum", 0) else 0)
        return 4 + (0 if self.optim.offload_state else state) + computes + (4 if while_training else 0)


SAMPLE_INTERVAL_STEPS = 10
"""Steps between two samples of a run that chooses no steps to export."""


class TokenExportConfig(Config):
    """Steps whose tokens are written to `tokens/`, with all that decided their gradients; see `headrace tokens`."""

    steps: list[Annotated[int, Field(ge=1)]] = Field(default_factory=list)
    """The steps that are exported."""
    interval: int = Field(0, ge=0)
    """Also every step that this divides; 0: none."""
    sample: int = Field(20, ge=0)
    """Where `steps` and `interval` choose nothing: this many sequences (of each trainer rank), those with the largest
    gradients, of the first step, every tenth and the last. The first and the newest sample are kept. 0: none."""

    @property
    def limit(self) -> int | None:
        """Sequences that a rank exports of a step; None: all."""
        return None if self.steps or self.interval else self.sample

    def includes(self, step: int, last: int) -> bool:
        """Return whether a step is exported, in a run whose last step is `last`."""
        if self.limit is None:
            return step in self.steps or (self.interval > 0 and step % self.interval == 0)
        return self.limit > 0 and (step in (1, last) or step % SAMPLE_INTERVAL_STEPS == 0)


class WeightsConfig(Config):
    """How new weights reach the engines."""

    transport: Literal["auto", "files", "link"] = "auto"
    """`link`: straight from the trainer's memory; the run directory only says where. `auto` is that where a run's
    trainer and engines share a GPU, and files elsewhere, also with `orchestrator.client.base_url`. Adapters are always
    files."""
    host: str = "127.0.0.1"
    """The link: the address at which engines reach the trainer's first rank."""
    port: int = Field(0, ge=0, le=65535)
    """The link: 0 takes any free port."""
    carrier: Literal["auto", "stream", "nccl", "ipc"] = "auto"
    """The link: `auto` is memory that is shared (CUDA IPC) on one GPU, NCCL between different ones, and a plain
    connection otherwise."""
    ack_timeout: float = Field(3600.0, ge=0)
    """Seconds until engines must have taken a version; a pinned evaluation may hold it back as long. 0: for ever."""


class TrainerConfig(TrainingConfig):
    loss: LossConfig = Field(default_factory=LOSSES.make_default)
    """What is minimized over the tokens that have advantages."""
    ref_kl: RefKlConfig = Field(default_factory=RefKlConfig)
    keep_weights: int = Field(2, ge=1)
    """Published versions kept on disk besides those that an engine may still load."""
    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    probe_tokens: int = Field(256, ge=0)
    """Tokens of each step, whole sequences, that trainer and engine both score with the new weights; 0: none."""
    token_export: TokenExportConfig = Field(default_factory=TokenExportConfig)
