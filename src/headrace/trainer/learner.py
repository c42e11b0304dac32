"""The learner: a model with its optimizer, its position in the run, and its checkpoints.

Shared by RL, SFT and DPO, which differ in the source of samples and the destination of weights.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from headrace.config.model import LatentsConfig
from headrace.config.trainer import ReferenceConfig, TrainingConfig
from headrace.errors import BadInput, Failure
from headrace.inference.latents import is_gate
from headrace.inference.memory import ColocatedEngines
from headrace.inference.schema import LatentParams
from headrace.machine import free_memory, own_versions
from headrace.rollout.batch import Batch
from headrace.rollout.packing import pack, pack_for_worker
from headrace.rollout.schema import DamagedFile
from headrace.rollout.types import Sample
from headrace.rollout.version import Version
from headrace.text.hub import model_directory
from headrace.trainer import checkpoint
from headrace.trainer.checkpoint import Checkpoints, ResumeError, TrainState, starting_point
from headrace.trainer.host_copies import checkpoint_bytes
from headrace.trainer.loss import Loss
from headrace.trainer.model import PackedModel
from headrace.trainer.optim import Optimizer, learning_rate_factor, update_rule
from headrace.trainer.ranks import Ranks
from headrace.trainer.reference import ReferenceWeights
from headrace.trainer.step import StepResult, TrainStep
from headrace.trainer.tensor_files import local_shards
from headrace.transport.adapter import CONFIG, AdapterConfig, is_adapter, read_config
from headrace.transport.files import MARKER, link_tree, share_drafts, write_directory
from headrace.transport.platform import Platform

log = logging.getLogger(__name__)

T = TypeVar("T")

MODEL_PREFIX, OPTIMIZER_PREFIX, REFERENCE_PREFIX = "model.", "optimizer.", "reference."
"""Prefixes of tensor names in a checkpoint."""


class Learner:
    """A model in training, from a checkpoint if there is one, else from the configured model."""

    def __init__(
        self,
        config: TrainingConfig,
        losses: dict[str, Loss],
        checkpoints: Path,
        resume: str | None = None,
        *,
        packed: bool = True,
        unit_size: int = 1,
        engines: ColocatedEngines | None = None,
        reference: ReferenceConfig | None = None,
    ) -> None:
        """`packed`: several samples may share a forward pass; `engines` are those on the same device.

        `unit_size`: consecutive samples that a loss compares, so that one forward pass needs them all. `reference`: the
        weights that score tokens which lack `kl_logprobs`.
        """
        if config.max_steps is None or config.seq_len is None or config.model.name is None:
            raise ValueError("max_steps, seq_len and model.name must be set to train")
        self.config = config
        self.max_steps, self.seq_len = config.max_steps, config.seq_len
        self.ranks, self._directory = Ranks(), checkpoints
        share_drafts(self.ranks.gather)
        start = starting_point(checkpoints, resume)
        if start is not None:
            self._read_undamaged(partial(checkpoint.read_state, start), start)
        self.ranks.barrier()  # before one of them changes the directory that the others read
        retention = config.ckpt.model_dump(include={"keep_last", "permanent_interval"})
        self.checkpoints = Checkpoints(checkpoints, self.ranks, **retention)
        dtype = config.model.dtype
        if dtype == "auto":
            dtype = "bfloat16" if self.ranks.device.type == "cuda" else "float32"
        model_keys = {"attention", "compile", "lm_head_fp32", "lm_head_chunk"}
        model_keys |= {"activation_checkpointing", "activation_offload"}
        adapter, optim, latents = config.lora, config.optim, config.model.latents
        # A checkpoint of an adapter lacks the base model, and no checkpoint has the start of the run, the reference.
        from_start = start is None or adapter is not None or reference is not None
        self.model = PackedModel(
            model_directory(config.model.name) if start is None or from_start else start / checkpoint.MODEL_DIR,
            self.ranks,
            dtype=getattr(torch, dtype),
            **config.model_dump(include=model_keys),
            memory=None if config.memory_gb is None else int(config.memory_gb * 1e9),
            training_bytes=4 + (0 if optim.offload_state else optim.state_bytes) + (0 if reference is None else 4),
            engines=engines,
            longest=config.seq_len,
            trust_remote_code=config.model.trust_remote_code,
            load=from_start,
            lora=None if adapter is None else {**adapter.model_dump(exclude={"save_merged"}), "seed": config.seed},
            latents=None if latents is None else LatentParams(**latents.request),
            router_replay=getattr(config, "router_replay", None) or "off",
        )
        settings = optim.model_dump(exclude={"type", "lr", "max_grad_norm", "offload_state"})
        self.optimizer = Optimizer(
            self.model.named_parameters(),
            update_rule(optim.type, self.model.module, **settings),
            max_grad_norm=optim.max_grad_norm or None,
            offload_state=optim.offload_state,
            lr_factors=None if latents is None else gate_factors(self.model.named_parameters(), latents, optim.lr),
        )
        self.reference = None if reference is None else ReferenceWeights(self.model, reference.every)
        self.state = TrainState() if start is None else self._load(start)
        self._saved_step = self.state.step
        self._skipped = SkippedUpdates(config.max_skipped_updates)
        rows = None if packed else 1
        self.step = TrainStep(self.model, self.optimizer, losses, rows, self.reference, unit_size=unit_size)

    def _read_undamaged(self, read: Callable[[], T], start: Path) -> T:
        """Return the result of `read`; if the checkpoint is damaged for a rank, set it aside and raise on all ranks."""
        try:
            return self.ranks.agree_on_damage(read)
        except DamagedFile as damage:
            raise checkpoint.set_aside(damage, start, self._directory, self.ranks) from damage

    def _load(self, start: Path) -> TrainState:
        """Load a checkpoint, written by any number of ranks; return its state."""
        files = start / checkpoint.MODEL_DIR
        saved = _describe_adapter(read_config(files / CONFIG) if is_adapter(files) else None)
        if saved != (own := _describe_adapter(self.model.adapter)):
            fix = "Resume with the settings that it was saved with."
            raise ResumeError(f"{start} was saved with {saved}, but this run has {own}", key="lora", fix=fix)
        names = self._read_undamaged(partial(checkpoint.saved_names, start), start)
        model = add_prefix(MODEL_PREFIX, self.model.trained_tensors())
        state = add_prefix(
            OPTIMIZER_PREFIX, self.optimizer.empty_state([name.removeprefix(OPTIMIZER_PREFIX) for name in names])
        )
        reference = {name: tensor for name, tensor in self._saved_reference().items() if name in names}
        if unused := sorted(
            n for n in names if n not in model and n not in state and not n.startswith(REFERENCE_PREFIX)
        ):
            fact = f"the checkpoint has {unused[0]}, which this run does not use: it is of another model or optim.type"
            fix = "Resume with the model and the optim.type that it was saved with."
            raise ResumeError(fact, key="--resume", value=start, fix=fix)
        self._read_undamaged(partial(checkpoint.load_tensors, start, {**model, **state, **reference}), start)
        self.optimizer.load_state_tensors({name.removeprefix(OPTIMIZER_PREFIX): value for name, value in state.items()})
        if self.reference is not None and self.reference.every is not None and not reference:
            log.warning("%s has no reference policy: until the next multiple of `every` it is the checkpoint", start)
            self.reference.copy_parameters()
        return checkpoint.read_state(start)

    def _saved_reference(self) -> dict[str, torch.Tensor]:
        """Return the reference's tensors for a checkpoint; none if the start of the run can be loaded again."""
        if self.reference is None or self.reference.every is None:
            return {}
        return add_prefix(REFERENCE_PREFIX, self.reference.tensors)

    @property
    def version(self) -> Version:
        return Version(self.state.incarnation, self.state.step)

    @property
    def platform(self) -> Platform:
        device = self.model.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        dtype = str(self.model.dtype).removeprefix("torch.")
        return Platform(own_versions(), platform.machine(), name, dtype, torch.get_num_threads(), self.ranks.size)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        kind, settings = self.config.scheduler.type, self.config.scheduler.model_dump(exclude={"type"})
        factor = learning_rate_factor(self.state.step + 1, kind=kind, max_steps=self.max_steps, **settings)
        return self.config.optim.lr * factor

    def learn_batch(self, batch: Batch, **options: Any) -> StepResult | None:
        """Run one optimizer step on the samples of a batch; see `learn`."""
        envs = [entry.env for entry in batch.samples]
        return self.learn([entry.sample for entry in batch.samples], envs=envs, **options)

    def learn(self, samples: list[Sample], **options: Any) -> StepResult | None:
        """Run one optimizer step on all samples, with the options of `TrainStep.run`; return None if stopped.

        Raises Failure after too many updates in a row were skipped because of gradients that are not finite.
        """
        if self.ranks.size == 1:
            bins = pack(samples, self.seq_len, self.step.unit_size)
        else:
            self._check_agreement(samples)
            ranks, unit_size = self.ranks, self.step.unit_size
            bins = pack_for_worker(ranks.index, samples, self.seq_len, ranks.size, self.model.cost, unit_size=unit_size)
        skipped = self.optimizer.skipped
        result = self.step.run(bins, self.learning_rate, **options)
        if result is not None:
            self.state.step += 1
            if self.reference is not None:
                self.reference.after_step(self.state.step)
            self.state.tokens_trained += result.tokens
            self.state.skipped_steps += self.optimizer.skipped - skipped
            problem = self._skipped.record(self.state.step, result.grad_norm, result.metrics.get("loss", math.nan))
            if problem is not None:
                self.checkpoints.finish(wait=True)  # it may still be written, and is older than the skipped updates
                raise Failure(f"{problem}. A resumed run continues after step {self._saved_step}")
        return result

    def _check_agreement(self, samples: list[Sample]) -> None:
        """Raise unless all ranks have the same samples: each packs its own share of them."""
        digest = hashlib.blake2b(digest_size=7)
        for sample in samples:
            digest.update(sample.token_ids.tobytes())
        number = int.from_bytes(digest.digest())
        if self.ranks.any(number != self.ranks.max(number)):
            fix = "Make the environment's data deterministic across processes (the order of a set is not)."
            raise BadInput(f"the ranks have different examples for step {self.state.step + 1}", key="data", fix=fix)

    def metrics(self, result: StepResult, lr: float, seconds: float) -> dict[str, float]:
        """Return the metrics of a step that took `seconds`."""
        return {
            **result.metrics,
            "optim/lr": lr,
            "optim/grad_norm": result.grad_norm,
            "optim/skipped": self.state.skipped_steps,
            "progress/incarnation": self.state.incarnation,
            "progress/tokens_trained": self.state.tokens_trained,
            "perf/trained_tokens_per_second": result.tokens / seconds,
            "perf/computed_tokens": result.computed_tokens,
            "time/step": seconds,
        }

    @property
    def is_checkpoint_due(self) -> bool:
        """Whether to save now. A checkpoint is postponed during skipped updates, so that a resume can repeat them.

        Permanent checkpoints and the last one are not postponed.
        """
        step, ckpt = self.state.step, self.config.ckpt
        if any(step % interval == 0 for interval in (ckpt.permanent_interval or self.max_steps, self.max_steps)):
            return True
        return not self._skipped.in_a_row and step // ckpt.interval > self._saved_step // ckpt.interval

    @property
    def has_unsaved_step(self) -> bool:
        return self.state.step > self._saved_step

    def plan_checkpoints(self, others: int = 0) -> int:
        """Decide how checkpoints are written; return the bytes of host memory that this takes on this rank.

        `others`: bytes of host memory that other parts will allocate.
        """
        optim = self.config.optim
        trained = sum(shard.local.numel() for shard in local_shards(self.model.trained_tensors()))
        free = free_memory() - others
        if optim.offload_state and not self.optimizer.state_tensors():
            free -= trained * optim.state_bytes  # allocated by the first step
        size = checkpoint_bytes(trained, optim, has_reference=bool(self._saved_reference()))
        return self.checkpoints.plan(size, free)

    def begin_checkpoint(self) -> None:
        """Start to save the current state, which may change after the return."""
        model, state = self.model.trained_tensors(), self.optimizer.state_tensors()
        tensors = add_prefix(MODEL_PREFIX, model) | add_prefix(OPTIMIZER_PREFIX, state) | self._saved_reference()
        self.checkpoints.begin(tensors, self.model.write_files, self.state)
        self._saved_step = self.state.step

    def save_final_model(self, path: Path, published: Path | None = None) -> None:
        """Write the final model; with an adapter, the merged model unless disabled, and the adapter next to it.

        `published`: files of the same model, if there are any on the same disk; they are linked, not written again.
        """
        if published is not None and self.model.adapter is None:
            if self.ranks.is_first:
                link_tree(published, path, without=MARKER)
            self.ranks.barrier()
        elif self.config.lora is None or self.config.lora.save_merged:
            self.ranks.write_directory(path, partial(self.model.save, dtype=self.model.dtype))
        if self.model.adapter is not None:
            self.ranks.write_directory(path.with_name("adapter"), self.model.save_for_engine)


def gate_factors(parameters: Iterable[str], latents: LatentsConfig, lr: float) -> dict[str, float]:
    """Return the learning rates of gates as multiples of `lr`."""
    return {
        name: (latents.retention_lr if name.endswith(".retention") else latents.gates_lr) / lr
        for name in parameters
        if is_gate(name)
    }


def _describe_adapter(adapter: AdapterConfig | None) -> str:
    if adapter is None:
        return "no adapter"
    targets = [adapter.target_modules] if isinstance(adapter.target_modules, str) else adapter.target_modules
    size = f"rank {adapter.r} and scaling {adapter.scaling:g}"
    return f"an adapter of {size} of {', '.join(targets)} of {adapter.base_model_name_or_path}"


def add_prefix(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


class Stopwatch:
    """Seconds of the parts of a step."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._started = self._lapped = time.perf_counter()

    def lap(self, name: str) -> None:
        """Record the time since the last lap under a name."""
        now = time.perf_counter()
        self.laps[name] = now - self._lapped
        self._lapped = now

    def total(self) -> float:
        return time.perf_counter() - self._started


NAN_ADVICE = (
    "If the loss grew before them, try a smaller optim.lr, more scheduler.warmup_steps or a smaller "
    'optim.max_grad_norm; otherwise model.dtype = "float32", and look for a division by 0, the logarithm of 0 or an '
    "overflow in your own losses and advantages"
)


class SkippedUpdates:
    """Counts updates in a row that were skipped because of gradients that are not finite.

    A single one is harmless. After `limit` of them the model or its loss is broken, and the run must stop.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._norms: list[float] = []
        self._losses: list[float] = []
        self._before = "there was no earlier update"

    @property
    def in_a_row(self) -> int:
        return len(self._norms)

    def record(self, step: int, grad_norm: float, loss: float) -> str | None:
        """Record a step; return why the run must end, or None."""
        if math.isfinite(grad_norm):
            self._norms.clear()
            self._losses.clear()
            self._before = f"at step {step}, the last update, they were {grad_norm:.4g} and {loss:.4g}"
            return None
        self._norms.append(grad_norm)
        self._losses.append(loss)
        if self.in_a_row < self._limit:
            return None
        steps = f"step {step}" if self.in_a_row == 1 else f"steps {step - self.in_a_row + 1} to {step}"
        return (
            f"the gradients of {steps} were not finite, so their updates were skipped, and max_skipped_updates = "
            f"{self._limit} ends the run. Their norms were {_format_values(self._norms)}, the losses "
            f"{_format_values(self._losses)}; {self._before}. {NAN_ADVICE}. "
            "To continue anyway, raise max_skipped_updates"
        )


def _format_values(values: Sequence[float]) -> str:
    """Format distinct values; of many, the first two and the last."""
    words = list(dict.fromkeys(f"{value:.4g}" for value in values))
    return ", ".join(words) if len(words) <= 4 else f"{words[0]}, {words[1]}, ..., {words[-1]}"


def export(
    source: Path, target: Path, dtype: str = "auto", *, adapter_only: bool = False, trust_remote_code: bool = False
) -> None:
    """Write the model of a complete checkpoint to `target`; dtype `auto` is that of the model before training.

    An adapter is merged into its base model, or with `adapter_only` written by itself.
    """
    checkpoint.read_state(source)
    files = source / checkpoint.MODEL_DIR
    if adapter_only and not is_adapter(files):
        raise BadInput("has no adapter: the run trained all parameters", key="--adapter", value=source)
    with_gates = any(is_gate(name.removeprefix(MODEL_PREFIX)) for name in checkpoint.saved_names(source))
    model = _exported_model(files, trust_remote_code, LatentParams() if with_gates else None)
    checkpoint.load_tensors(source, add_prefix(MODEL_PREFIX, model.trained_tensors()))
    if adapter_only:
        write_directory(target, model.save_for_engine)
        return
    if dtype == "auto":
        settings = json.loads((files / "config.json").read_text())
        dtype = settings.get("dtype") or settings.get("torch_dtype") or "float32"
    write_directory(target, lambda draft: model.save(draft, getattr(torch, dtype)))


def _exported_model(files: Path, trust_remote_code: bool, latents: LatentParams | None) -> PackedModel:
    """Return the model to load a checkpoint's tensors into; with an adapter, its base model is loaded."""
    ranks = Ranks(torch.device("cpu"))  # GPUs may be in use
    if not is_adapter(files):
        return PackedModel(files, ranks, load=False, trust_remote_code=trust_remote_code, latents=latents)
    adapter = read_config(files / CONFIG)
    if adapter.base_model_name_or_path is None:
        raise BadInput("has no base_model_name_or_path", file=files / CONFIG)
    lora = {name: getattr(adapter, name) for name in ("r", "target_modules", "use_rslora")}
    lora["alpha"] = adapter.lora_alpha
    base = model_directory(adapter.base_model_name_or_path)
    return PackedModel(base, ranks, lora=lora, trust_remote_code=trust_remote_code, latents=latents)
