"""`[trainer]`: the optimizer step and what it leaves on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from headrace.config.base import Config
from headrace.config.model import ModelConfig
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
    """The default is for all parameters of a language model; an adapter (`lora`) wants at least ten times it."""
    weight_decay: float = Field(0.0, ge=0)
    """Of every parameter, also of norms and biases."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Gradients are scaled down to this norm; 0: never."""
    offload_state: bool = False
    """Keep the optimizer's state in CPU memory, and bring each parameter's to the GPU for its own update only."""


class AdamWConfig(AnyOptimConfig):
    type: Literal["adamw"] = "adamw"
    betas: tuple[Rate, Rate] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)


class MuonConfig(AnyOptimConfig):
    """Muon for the matrices of hidden layers; AdamW, with `betas` and `eps`, for embeddings, head, norms and biases.

    Muon's updates are scaled to the size of AdamW's, so that one `lr`, of the size that AdamW needs, serves both.
    """

    type: Literal["muon"] = "muon"
    momentum: Rate = 0.95
    nesterov: bool = True
    ns_steps: int = Field(5, ge=1, lt=100)
    """Newton-Schulz iterations that make an update orthogonal."""
    betas: tuple[Rate, Rate] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)


class SgdConfig(AnyOptimConfig):
    type: Literal["sgd"] = "sgd"
    momentum: Rate = 0.0
    nesterov: bool = False

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
    """The learning rate over the run, as a multiple of `optim.lr`."""

    type: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    min_factor: float = Field(0.0, ge=0, le=1)
    """What linear and cosine come down to, right after `max_steps`: the last step is still above it."""


class RestartsSchedulerConfig(Config):
    """A cosine that begins anew several times: down from the full rate to the lowest in every cycle."""

    type: Literal["cosine_with_restarts"] = "cosine_with_restarts"
    warmup_steps: int = Field(0, ge=0)
    min_factor: float = Field(0.0, ge=0, le=1)
    """What each cycle comes down to, right after its last step."""
    cycles: int = Field(1, ge=1)
    """Cycles of equal length after the warmup; a single one is `cosine`."""


class WsdSchedulerConfig(Config):
    """Warmup, stable, decay: the learning rate falls over the last steps alone."""

    type: Literal["wsd"] = "wsd"
    warmup_steps: int = Field(0, ge=0)
    min_factor: float = Field(0.0, ge=0, le=1)
    """What it comes down to, right after `max_steps`: the last step is still above it."""
    decay_steps: int | None = Field(None, ge=1)
    """Unset: `decay_fraction` of the run."""
    decay_fraction: float = Field(0.1, gt=0, le=1)
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


class DefaultLossConfig(Config):
    """DPPO's binary mask on the probability difference, plus a squared log-ratio."""

    type: Literal["default"] = "default"
    dppo_mask_low: float = Field(0.2, ge=0)
    dppo_mask_high: float = Field(0.2, ge=0)
    adv_tau: float = Field(1.0, ge=0)
    kl_tau: float = Field(1e-3, ge=0)


class IpoLossConfig(Config):
    """The default loss with a symmetric mask."""

    type: Literal["ipo"] = "ipo"
    ipo_threshold: float = Field(0.1, ge=0)
    adv_tau: float = Field(1.0, ge=0)
    kl_tau: float = Field(1e-3, ge=0)


class PpoClipLossConfig(Config):
    """PPO's clip of each token's ratio; DAPO's clip-higher is 0.2 and 0.28."""

    type: Literal["ppo_clip"] = "ppo_clip"
    eps_low: float = Field(0.2, ge=0, le=1)
    eps_high: float = Field(0.2, ge=0)


class GspoLossConfig(Config):
    """PPO's clip of one ratio per sequence."""

    type: Literal["gspo"] = "gspo"
    eps_low: float = Field(3e-4, ge=0, le=1)
    eps_high: float = Field(4e-4, ge=0)


class CispoLossConfig(Config):
    """REINFORCE with an importance weight of at most `eps_max`."""

    type: Literal["cispo"] = "cispo"
    eps_max: float = Field(5.0, gt=0)


class IcepopLossConfig(Config):
    """Only tokens whose ratio is between `alpha` and `beta`."""

    type: Literal["icepop"] = "icepop"
    alpha: float = Field(0.5, ge=0)
    beta: float = Field(5.0, gt=0)

    @model_validator(mode="after")
    def _some_ratio_is_kept(self) -> IcepopLossConfig:
        if self.alpha > self.beta:
            raise InvalidValue(
                f"above beta, which is {self.beta:g}: no token would be trained",
                key="alpha",
                value=self.alpha,
                fix="Lower alpha, or raise beta.",
            )
        return self


class ReinforceLossConfig(Config):
    """The plain policy gradient."""

    type: Literal["reinforce"] = "reinforce"


class CustomLossConfig(Config):
    """A loss of your own: a function from one sequence's `LossInputs` to `LossOutputs` (`headrace.trainer.loss`)."""

    type: Literal["custom"] = "custom"
    import_path: str
    """`package.module:function`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)


LossConfig = Annotated[
    Annotated[DefaultLossConfig, Tag("default")]
    | Annotated[IpoLossConfig, Tag("ipo")]
    | Annotated[PpoClipLossConfig, Tag("ppo_clip")]
    | Annotated[GspoLossConfig, Tag("gspo")]
    | Annotated[CispoLossConfig, Tag("cispo")]
    | Annotated[IcepopLossConfig, Tag("icepop")]
    | Annotated[ReinforceLossConfig, Tag("reinforce")]
    | Annotated[CustomLossConfig, Tag("custom")],
    _by_type("default", "loss", "default, ipo, ppo_clip, gspo, cispo, icepop, reinforce, custom (with import_path)"),
]


class RefKlConfig(Config):
    """The distillation component."""

    mask_low: float = Field(0.2, ge=0)
    kl_tau: float = Field(1e-3, ge=0)


class CheckpointConfig(Config):
    interval: int = Field(50, ge=1)
    """Steps between checkpoints; the last step always gets one. One is put off while updates are skipped."""
    keep_last: int = Field(2, ge=1)
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
    output_dir: Path | None = None
    max_steps: int | None = Field(None, ge=1)
    seq_len: int | None = Field(None, ge=2)
    """Tokens per packed bin, and the longest sequence that is trained."""
    seed: int = 0
    lora: LoraConfig | None = None
    """Unset: every parameter is trained."""
    optim: OptimConfig = Field(default_factory=AdamWConfig)
    scheduler: SchedulerConfig = Field(default_factory=BasicSchedulerConfig)
    ckpt: CheckpointConfig = Field(default_factory=CheckpointConfig)
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
    loss: LossConfig = Field(default_factory=DefaultLossConfig)
    ref_kl: RefKlConfig = Field(default_factory=RefKlConfig)
    keep_weights: int = Field(2, ge=1)
    """Published versions kept on disk besides those that an engine may still load."""
    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    probe_tokens: int = Field(256, ge=0)
    """Tokens of each step, whole sequences, that trainer and engine both score with the new weights; 0: none."""
    token_export: TokenExportConfig = Field(default_factory=TokenExportConfig)
