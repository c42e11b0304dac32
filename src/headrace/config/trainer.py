"""`[trainer]`: model, optimizer, schedule, loss, checkpoints and published weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from headrace.config.base import Config
from headrace.config.model import ModelConfig
from headrace.config.registry import Alternative, Registry
from headrace.errors import InvalidValue
from headrace.rollout.version import past_step


def _by_type(default: str, noun: str, types: str) -> Discriminator:
    """Choose the member of a union by the `type` of a table."""

    def chosen(value: Any) -> str:
        return str(value.get("type", default) if isinstance(value, dict) else getattr(value, "type", default))

    message = f"no such {noun}. Known: {types}"
    return Discriminator(chosen, custom_error_type=f"unknown_{noun}", custom_error_message=message)


Rate = Annotated[float, Field(ge=0, lt=1)]


class AnyOptimConfig(Config):
    """Keys of all optimizers."""

    lr: float = Field(1e-6, gt=0)
    """Peak learning rate, which the scheduler scales. The default is for full fine-tuning; use at least ten times as
    much with an adapter (`lora`)."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay of all parameters, also of norms and biases."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Gradients are clipped to this norm; 0: never."""
    offload_state: bool = False
    """Keep the optimizer's state in CPU memory; each parameter's state is moved to the GPU for its update."""

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's state per parameter."""
        raise NotImplementedError

    @property
    def saved_state_bytes(self) -> int:
        """The most bytes of state per parameter in a checkpoint."""
        return self.state_bytes


class AdamWConfig(AnyOptimConfig):
    """AdamW: Adam with decoupled weight decay."""

    type: Literal["adamw"] = "adamw"
    betas: tuple[Rate, Rate] = (0.9, 0.999)
    """Decay rates of the averages of gradients and of squared gradients."""
    eps: float = Field(1e-8, gt=0)
    """Added to the denominator for numerical stability."""
    state_bits: Literal[8, 32] = 32
    """Bits of each of the two averages of a parameter: 8 saves three quarters of the optimizer's memory, and half of a
    checkpoint; an update takes longer. Averages are rounded at random, without bias."""

    @property
    def state_bytes(self) -> int:
        return 2 * self.state_bits // 8


class MuonConfig(AnyOptimConfig):
    """Muon for the matrices of hidden layers; AdamW, with `betas` and `eps`, for embeddings, head, norms and biases.

    Muon's updates are scaled to the size of AdamW's, so that one `lr`, of the size that AdamW needs, serves both.
    """

    type: Literal["muon"] = "muon"
    momentum: Rate = 0.95
    """Decay rate of the average of gradients."""
    nesterov: bool = True
    """Use Nesterov momentum."""
    ns_steps: int = Field(5, ge=1, lt=100)
    """Newton-Schulz iterations that make an update orthogonal."""
    betas: tuple[Rate, Rate] = (0.9, 0.999)
    """`betas` of AdamW, for the parameters that Muon does not train."""
    eps: float = Field(1e-8, gt=0)
    """`eps` of AdamW, for the parameters that Muon does not train."""

    @property
    def state_bytes(self) -> int:
        return 4

    @property
    def saved_state_bytes(self) -> int:
        return 8  # as if AdamW trained all of them: the share of embeddings depends on the model


class SgdConfig(AnyOptimConfig):
    """Stochastic gradient descent, with momentum if it is set."""

    type: Literal["sgd"] = "sgd"
    momentum: Rate = 0.0
    """Decay rate of the average of gradients."""
    nesterov: bool = False
    """Use Nesterov momentum."""

    @property
    def state_bytes(self) -> int:
        return 4 if self.momentum else 0

    def problems(self) -> Iterator[InvalidValue]:
        if self.nesterov and self.momentum == 0:
            fix = "Set momentum above 0, or leave nesterov out."
            yield InvalidValue("Nesterov needs momentum, which is 0", key="nesterov", value=True, fix=fix)


OptimConfig = Annotated[
    Annotated[AdamWConfig, Tag("adamw")] | Annotated[MuonConfig, Tag("muon")] | Annotated[SgdConfig, Tag("sgd")],
    _by_type("adamw", "optimizer", "adamw, muon, sgd"),
]


class BasicSchedulerConfig(Config):
    """Warmup, then a constant rate, or linear or cosine decay to the end."""

    type: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises from 0."""
    min_factor: float = Field(0.0, ge=0, le=1)
    """Final factor of linear and cosine decay, reached right after `max_steps`: the last step is above it."""


class RestartsSchedulerConfig(Config):
    """Cosine decay with warm restarts: each cycle falls from the peak to the lowest rate."""

    type: Literal["cosine_with_restarts"] = "cosine_with_restarts"
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises from 0."""
    min_factor: float = Field(0.0, ge=0, le=1)
    """Final factor of each cycle, reached right after its last step."""
    cycles: int = Field(1, ge=1)
    """Number of cycles of equal length after the warmup; 1 is the same as `cosine`."""


class WsdSchedulerConfig(Config):
    """Warmup, stable, decay: the learning rate only falls in the last steps."""

    type: Literal["wsd"] = "wsd"
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises from 0."""
    min_factor: float = Field(0.0, ge=0, le=1)
    """Final factor of the decay, reached right after `max_steps`: the last step is above it."""
    decay_steps: int | None = Field(None, ge=1)
    """Steps of the decay; unset: `decay_fraction` of the run."""
    decay_fraction: float = Field(0.1, gt=0, le=1)
    """Fraction of the run for the decay, where `decay_steps` is unset."""
    decay_shape: Literal["linear", "sqrt"] = "linear"
    """`sqrt` falls with the square root of the progress: fast at first, slowly at the end."""


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
    """The loss of tokens with advantages."""

    REGISTRY = LOSSES

    type: str

    @property
    def label(self) -> str:
        """The name in messages."""
        return self.type

    def make(self) -> Callable[..., Any]:
        """Return the loss: a function from `PackedInputs` to `LossOutputs` of `headrace.trainer.loss`."""
        return self.compute

    def compute(self, inputs: Any) -> Any:
        """Return the loss and its metrics for the tokens of several whole sequences."""
        raise NotImplementedError


class RefKlConfig(Config):
    """The distillation component of the loss."""

    mask_low: float = Field(0.2, ge=0)
    """Tokens whose probability fell by more than this are masked."""
    kl_tau: float = Field(1e-3, ge=0)
    """Weight of the squared log-ratio to the sampling policy."""


class ReferenceConfig(Config):
    """A second copy of the trained parameters, which scores the tokens of a KL penalty."""

    every: int | None = Field(None, ge=1)
    """Take over the current parameters after each step that this divides; unset: the run's start is kept."""


class PastWeightsConfig(Config):
    """Published versions that a teacher of the run's own past scores with: they stay on disk while one may be needed,
    also by a run that continues from a checkpoint."""

    every: int = Field(ge=1)
    """A version whose step this divides is a teacher's."""
    max_async_level: int = Field(ge=0)
    """Steps by which batches may be ahead of the trainer."""

    def needed_after(self, step: int) -> range:
        """Return the steps of the versions up to `step` that may score later batches."""
        return range(past_step(step + 1, self.every, self.max_async_level), step + 1, self.every)


class CheckpointConfig(Config):
    interval: int = Field(50, ge=1)
    """Steps between checkpoints; the last step always has one. A checkpoint is postponed while updates are skipped."""
    keep_last: int = Field(2, ge=1)
    """Number of newest checkpoints that are kept."""
    permanent_interval: int | None = Field(None, ge=1)
    """Steps between checkpoints that are never deleted, in `checkpoints/permanent/`; unset: none."""


class LoraConfig(Config):
    """Train LoRA adapters of linear layers instead of all parameters."""

    r: int = Field(16, ge=1)
    """The rank. Engines may limit it: vLLM's `--max-lora-rank` is 16 by default."""
    alpha: int = Field(32, ge=1)
    """The adapter's output is scaled by alpha / r."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r) instead, so that higher ranks do not learn more slowly."""
    target_modules: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = "all-linear"
    """All linear layers except the head, or the last parts of module names, such as `["q_proj", "v_proj"]`. Experts are
    adapted by `["all-linear", "experts"]`, or `"experts"` in another list."""
    save_merged: bool = True
    """Write the final model with the adapter merged, besides the adapter. Without it the run has no `model/`, which is
    as large as the base; `headrace export` writes it from a checkpoint."""


class TrainingConfig(Config):
    """Keys of the trainer in RL and SFT runs."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    """The model that is trained."""
    output_dir: Path | None = None
    """The run directory."""
    max_steps: int | None = Field(None, ge=1)
    """Optimizer steps after which the run ends."""
    seq_len: int | None = Field(None, ge=2)
    """Tokens per packed bin, and the longest sequence that is trained."""
    seed: int = 0
    """Random seed of the trainer."""
    lora: LoraConfig | None = None
    """LoRA adapters; unset: all parameters are trained."""
    optim: OptimConfig = Field(default_factory=AdamWConfig)
    """The optimizer."""
    scheduler: SchedulerConfig = Field(default_factory=BasicSchedulerConfig)
    """The learning rate over the run, as a multiple of `optim.lr`."""
    ckpt: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """How often checkpoints are written, and how many are kept."""
    max_skipped_updates: int = Field(20, ge=1)
    """The run fails after this many consecutive updates that are skipped because of non-finite gradients."""
    attention: Literal["auto", "cudnn", "flash", "sdpa"] = "auto"
    """Attention implementation: `sdpa` runs anywhere, the others on a GPU in bfloat16; `cudnn` uses `flash` for rows of
    several sequences. `auto` is the fastest available one."""
    activation_checkpointing: Annotated[
        Literal["auto", False, "attention", "full", "selective"],
        BeforeValidator(lambda value: {"True": "full", "none": False}.get(str(value), value)),
    ] = "auto"
    """Recompute each layer in the backward pass: `full` (or true) all of it, `attention` all but attention, `selective`
    all but attention and matrix products. `auto`: as little as fits into GPU memory; nothing on a CPU."""
    memory_gb: float | None = Field(None, gt=0)
    """GPU memory in GB that `auto` may use, parameters included; unset: what engines on the same GPU leave."""
    activation_offload: bool = False
    """Keep activations in CPU memory until the backward pass; on GPUs, best with full checkpointing."""
    compile: Literal["auto"] | bool = "auto"
    """Compile each layer: faster on a GPU, after about a minute. `auto`: on a GPU, except for small models."""
    lm_head_chunk: int = Field(4096, ge=1)
    """Tokens per chunk of logits; smaller chunks need less memory. On a CPU a chunk has at most 256 MiB of logits."""
    lm_head_fp32: bool = False
    """Compute logits in float32 where the rest is in bfloat16: more precise, but slower."""

    @property
    def publishes_from_gpu(self) -> bool:
        """Whether engines on the trainer's GPU read new weights from its memory."""
        return False

    @property
    def keeps_reference(self) -> bool:
        """Whether the trainer has a second copy of the trained parameters."""
        return False

    def bytes_per_parameter(self, *, while_training: bool, adapter_share: float | None = None) -> float:
        """Return the bytes per parameter on one device, between steps or during one, without activations.

        They are for parameters, a reference's, the optimizer's state, a copy of the published weights, and gradients.
        `adapter_share`: parameters of the adapter per parameter of the model; None if that is unknown.
        """
        computes = 4 if self.model.dtype == "float32" else 2
        trained = 4 + (0 if self.optim.offload_state else self.optim.state_bytes) + (4 if while_training else 0)
        trained += 4 if self.keeps_reference else 0
        if self.lora is None:
            return trained + (computes if self.publishes_from_gpu else 0)
        return computes + (0.5 if adapter_share is None else adapter_share * trained)


SAMPLE_INTERVAL_STEPS = 10
"""Steps between samples of a run that does not choose steps to export."""


class TokenExportConfig(Config):
    """Export tokens of steps to `tokens/`, with all inputs of their gradients; see `headrace tokens`."""

    steps: list[Annotated[int, Field(ge=1)]] = Field(default_factory=list)
    """Steps to export."""
    interval: int = Field(0, ge=0)
    """Also export every step that is a multiple of this; 0: none."""
    sample: int = Field(20, ge=0)
    """Without `steps` and `interval`: sequences per trainer rank, those with the largest gradients, of the first step,
    every tenth and the last. The first and the newest sample are kept. 0: none."""

    @property
    def limit(self) -> int | None:
        """Sequences per rank and step; None: all."""
        return None if self.steps or self.interval else self.sample

    def includes(self, step: int, last: int) -> bool:
        """Return whether a step is exported, in a run whose last step is `last`."""
        if self.limit is None:
            return step in self.steps or (self.interval > 0 and step % self.interval == 0)
        return self.limit > 0 and (step in (1, last) or step % SAMPLE_INTERVAL_STEPS == 0)


class WeightsConfig(Config):
    """How new weights reach the engines."""

    transport: Literal["auto", "files", "link"] = "auto"
    """`files`: through the run directory; `link`: directly from the trainer's memory. `auto`: `link` if trainer
    and engines of the run share a GPU, else `files`, also with `orchestrator.client.base_url`. Adapters are
    always files."""
    host: str = "127.0.0.1"
    """`link`: address at which engines reach the trainer's first rank."""
    port: int = Field(0, ge=0, le=65535)
    """`link`: TCP port; 0: any free port."""
    carrier: Literal["auto", "stream", "nccl", "ipc"] = "auto"
    """`link`: how tensors are sent. `auto`: `ipc` (CUDA IPC) on one GPU, `nccl` between GPUs, else `stream` (TCP)."""
    ack_timeout: float = Field(3600.0, ge=0)
    """Seconds until engines must have loaded a version, waiting for a pinned evaluation included; 0: no limit."""


class TrainerConfig(TrainingConfig):
    loss: LossConfig = Field(default_factory=LOSSES.make_default)
    """The loss of tokens with advantages."""
    ref_kl: RefKlConfig = Field(default_factory=RefKlConfig)
    reference: ReferenceConfig | None = None
    """Filled by algorithms with a `kl` whose reference is the run's own past."""
    kl_ratio: bool = False
    """Filled by algorithms with a `kl`: its `ratio`."""
    past_weights: PastWeightsConfig | None = None
    """Filled by algorithms whose `teacher` is the policy some steps ago."""
    router_replay: Literal["off", "record", "replay"] | None = None
    """What is done with the experts that the engine chose for each token. `replay`: the trainer's layers take the same
    ones, so that trainer and engine compute the same function; `record`: they are compared with the trainer's own
    choice; `off`: the engine does not return them. Without effect on models without experts. Unset: `replay` with the
    embedded engine of this run, else `off`."""
    keep_weights: int = Field(2, ge=1)
    """Published versions that are kept on disk besides those that an engine may still load."""
    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    probe_tokens: int = Field(256, ge=0)
    """Tokens per step, in whole sequences, whose trainer and engine logprobs are compared after an update; 0: none."""
    token_export: TokenExportConfig = Field(default_factory=TokenExportConfig)

    @property
    def publishes_from_gpu(self) -> bool:
        return self.weights.transport != "files"

    @property
    def keeps_reference(self) -> bool:
        return self.reference is not None
