"""The learner: a model with its optimizer, its position in the run, and its checkpoints.

Shared by RL and SFT, which differ in the source of samples and the destination of weights.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from headrace.config.trainer import TrainingConfig
from headrace.errors import BadInput, Failure
from headrace.inference.colocation import ColocatedEngines
from headrace.rollout.packing import Bin, pack, pack_for_worker
from headrace.rollout.types import Sample
from headrace.rollout.version import Version
from headrace.trainer import checkpoint
from headrace.trainer.checkpoint import Checkpoints, TrainState
from headrace.trainer.loss import Loss
from headrace.trainer.model import PackedModel, compute_dtype, initial_model
from headrace.trainer.optim import Optimizer, update_rule
from headrace.trainer.ranks import Ranks
from headrace.trainer.schedule import learning_rate_factor
from headrace.trainer.skipped_updates import SkippedUpdates
from headrace.trainer.step import StepResult, TrainStep
from headrace.transport.adapter import CONFIG, AdapterConfig, is_adapter, read_config

MODEL, OPTIMIZER = "model.", "optimizer."
"""Prefixes of tensor names in a checkpoint."""


class ResumeError(BadInput):
    """The run cannot start or resume from this checkpoint."""


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
        engines: ColocatedEngines | None = None,
    ) -> None:
        """`packed`: several samples may share a forward pass; `engines` are those on the same device."""
        if config.output_dir is None or config.max_steps is None or config.seq_len is None:
            raise ValueError("output_dir, max_steps and seq_len must be set to train")
        self.config = config
        self.max_steps, self.seq_len = config.max_steps, config.seq_len
        self.ranks = Ranks()
        start = starting_point(checkpoints, resume)
        self.ranks.wait_for_all()  # before one of them changes the directory that the others read
        self.checkpoints = Checkpoints(
            checkpoints,
            self.ranks,
            keep_last=config.ckpt.keep_last,
            permanent_interval=config.ckpt.permanent_interval,
        )
        adapts = config.lora is not None  # then a checkpoint has only the adapter
        self.model = PackedModel(
            start / checkpoint.MODEL if start and not adapts else initial_model(config.model),
            self.ranks,
            dtype=compute_dtype(config.model.dtype, self.ranks.device),
            attention=config.attention,
            activation_checkpointing=config.activation_checkpointing,
            activation_offload=config.activation_offload,
            compile=config.compile,
            lm_head_fp32=config.lm_head_fp32,
            lm_head_chunk=config.lm_head_chunk,
            memory=None if config.memory_gb is None else int(config.memory_gb * 1e9),
            engines=engines,
            longest=config.seq_len,
            trust_remote_code=config.model.trust_remote_code,
            load=start is None or adapts,
            lora=None if config.lora is None else {**config.lora.model_dump(), "seed": config.seed},
        )
        optim = config.optim
        self.optimizer = Optimizer(
            self.model.named_parameters(),
            update_rule(
                optim.type,
                self.model.module,
                **optim.model_dump(exclude={"type", "lr", "max_grad_norm", "offload_state"}),
            ),
            max_grad_norm=optim.max_grad_norm or None,
            offload_state=optim.offload_state,
        )
        self.state = TrainState() if start is None else self._load(start)
        self._saved_step = self.state.step
        self._skipped = SkippedUpdates(config.max_skipped_updates)
        self._step = TrainStep(
            self.model,
            self.optimizer,
            losses,
            lm_head_chunk=config.lm_head_chunk,
            micro_batch_tokens=None if packed else 1,
        )

    def _load(self, start: Path) -> TrainState:
        """Load a checkpoint, written by any number of ranks."""
        _check_adapter(start / checkpoint.MODEL, self.model.adapter)
        names = checkpoint.saved_names(start)
        model = prefixed(MODEL, self.model.learned())
        state = prefixed(OPTIMIZER, self.optimizer.empty_state([name.removeprefix(OPTIMIZER) for name in names]))
        unused = sorted(name for name in names if name not in model and name not in state)
        if unused:
            raise ResumeError(
                f"the checkpoint has {unused[0]}, which this run does not use: it was saved for another model or "
                "with another optim.type",
                key="--resume",
                value=start,
                fix="Resume with the model and the optim.type that it was saved with.",
            )
        checkpoint.load_tensors(start, {**model, **state})
        self.optimizer.load_state_tensors({name.removeprefix(OPTIMIZER): value for name, value in state.items()})
        return checkpoint.read_state(start)

    @property
    def version(self) -> Version:
        return Version(self.state.incarnation, self.state.step)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        scheduler = self.config.scheduler
        factor = learning_rate_factor(
            self.state.step + 1,
            kind=scheduler.type,
            max_steps=self.max_steps,
            **scheduler.model_dump(exclude={"type"}),
        )
        return self.config.optim.lr * factor

    def learn(
        self,
        samples: list[Sample],
        *,
        envs: Sequence[str] = (),
        traced: bool = False,
        stopped: Callable[[], bool],
        on_micro_batch: Callable[[int, int], None] = lambda number, total: None,
    ) -> StepResult | None:
        """Run one optimizer step on all samples; return None, with nothing changed, if stopped.

        Raises Failure after too many updates in a row were skipped because of gradients that are not finite.
        """
        skipped = self.optimizer.skipped
        result = self._step.run(
            self._pack(samples),
            self.learning_rate,
            envs=envs,
            traced=traced,
            stopped=stopped,
            on_micro_batch=on_micro_batch,
        )
        if result is not None:
            self.state.step += 1
            self.state.tokens_trained += result.tokens
            self.state.skipped_steps += self.optimizer.skipped - skipped
            problem = self._skipped.record(self.state.step, result.grad_norm, result.metrics.get("loss", math.nan))
            if problem is not None:
                self.checkpoints.finish(wait=True)  # one that is still being written is from before them
                raise Failure(f"{problem}. A resumed run continues after step {self._saved_step}")
        return result

    def warm_up(self, bins: list[Bin]) -> None:
        """Compile the programs of a step on bins of these shapes, without changing anything."""
        self._step.warm_up(bins)

    def _pack(self, samples: list[Sample]) -> list[Bin]:
        """Return this rank's bins of a step."""
        if self.ranks.size == 1:
            return pack(samples, self.seq_len)
        self._check_agreement(samples)
        return pack_for_worker(self.ranks.index, samples, self.seq_len, self.ranks.size, self.model.cost)

    def _check_agreement(self, samples: list[Sample]) -> None:
        """Raise unless all ranks have the same samples: each packs its own share of them."""
        digest = hashlib.blake2b(digest_size=7)
        for sample in samples:
            digest.update(sample.token_ids.tobytes())
        number = int.from_bytes(digest.digest())
        if self.ranks.any(number != self.ranks.most(number)):
            raise BadInput(
                f"the ranks have different examples for step {self.state.step + 1}",
                key="data",
                fix="Make the environment's data deterministic across processes (the order of a set is not).",
            )

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

    def begin_checkpoint(self) -> None:
        """Start to save the current state; it is written asynchronously."""
        tensors = {
            **prefixed(MODEL, self.model.learned()),
            **prefixed(OPTIMIZER, self.optimizer.state_tensors()),
        }
        self.checkpoints.begin(tensors, self.model.write_files, self.state)
        self._saved_step = self.state.step

    def save_final_model(self, path: Path) -> None:
        """Write the model with a merged adapter, if any, and the adapter itself next to it."""
        self.ranks.write_directory(path, partial(self.model.save, dtype=self.model.dtype))
        if self.model.adapter is not None:
            self.ranks.write_directory(path.with_name("adapter"), self.model.save_for_engine)


def starting_point(checkpoints: Path, resume: str | None) -> Path | None:
    """Return the checkpoint to start from: None, the newest one, or the one that `resume` names."""
    newest = checkpoint.latest(checkpoints)
    if resume is None:
        if newest is not None:
            raise ResumeError(
                f"the run already has checkpoints, the newest {newest.name}",
                key="output_dir",
                value=checkpoints.parent,
                fix="Resume the run, or choose another output_dir.",
            )
        return None
    if resume == "latest":
        return newest
    chosen = Path(resume)
    checkpoint.read_state(chosen)
    if newest is not None and chosen.parent.resolve() == checkpoints.resolve() and chosen.name != newest.name:
        raise ResumeError(
            f"not the newest checkpoint of its run ({newest.name} is)",
            key="--resume",
            value=chosen,
            fix="To go back on purpose, start a run with another output_dir from it.",
        )
    return chosen


def _check_adapter(saved_in: Path, own: AdapterConfig | None) -> None:
    """Raise unless the saved adapter has the shape of this run's adapter."""
    saved = read_config(saved_in / CONFIG) if is_adapter(saved_in) else None
    if _shape(saved) != _shape(own):
        raise ResumeError(
            f"{saved_in.parent} was saved with {_shape(saved)}, but this run has {_shape(own)}",
            key="lora",
            fix="Resume with the settings that it was saved with.",
        )


def _shape(adapter: AdapterConfig | None) -> str:
    if adapter is None:
        return "no adapter"
    targets = [adapter.target_modules] if isinstance(adapter.target_modules, str) else adapter.target_modules
    size = f"rank {adapter.r} and scaling {adapter.scaling:g}"
    return f"an adapter of {size} of {', '.join(targets)} of {adapter.base_model_name_or_path}"


def prefixed(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
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
