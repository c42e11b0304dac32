"""What learns: a model with its optimizer, its position in the run, and where both are saved.

Shared by reinforcement learning and supervised training, which differ in where samples come from and where weights go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.config.trainer import TrainingConfig
from headrace.errors import BadInput
from headrace.rollout.packing import Bin, pack, pack_for_worker
from headrace.rollout.types import Sample
from headrace.rollout.version import Version
from headrace.trainer import checkpoint
from headrace.trainer.checkpoint import TrainState
from headrace.trainer.loss import Loss
from headrace.trainer.model import PackedModel, compute_dtype, initial_model
from headrace.trainer.optim import Optimizer, update_rule
from headrace.trainer.ranks import Ranks
from headrace.trainer.schedule import learning_rate_factor
from headrace.trainer.step import StepResult, TrainStep
from headrace.transport.files import write_directory

ACTIVATION_BUDGET = 1 << 30
"""Bytes of activations up to which short bins are joined into one forward pass."""
MOST_TOKENS = 16384


class ResumeError(BadInput):
    """The run cannot start as asked. The message says what is in the way."""


class Learner:
    """Starts from a checkpoint if there is one, else from the configured model."""

    def __init__(self, config: TrainingConfig, losses: dict[str, Loss], start: Path | None) -> None:
        if config.output_dir is None or config.max_steps is None or config.seq_len is None:
            raise ValueError("output_dir, max_steps and seq_len must be set to train")
        self.config = config
        self.max_steps, self.seq_len = config.max_steps, config.seq_len
        self.ranks = Ranks()
        self.model = PackedModel(
            start / checkpoint.MODEL if start else initial_model(config.model),
            self.ranks.device,
            dtype=compute_dtype(config.model.dtype, self.ranks.device),
            activation_checkpointing=config.activation_checkpointing,
            trust_remote_code=config.model.trust_remote_code,
        )
        if self.ranks.size > 1:
            self.model.shard(self.ranks.mesh())
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
        self.state = TrainState()
        if start is not None:
            self.state = checkpoint.read_state(start)
            checkpoint.load_optimizer(start, self.optimizer)
        self._step = TrainStep(
            self.model,
            self.optimizer,
            losses,
            lm_head_chunk=config.lm_head_chunk,
            micro_batch_tokens=_micro_batch_tokens(self.model, config.seq_len),
            ranks=self.ranks,
        )

    @property
    def version(self) -> Version:
        return Version(self.state.incarnation, self.state.step)

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        scheduler = self.config.scheduler
        factor = learning_rate_factor(
            self.state.step + 1,
            kind=scheduler.type,
            max_steps=self.max_steps,
            **scheduler.model_dump(exclude={"type"}),
        )
        return self.config.optim.lr * factor

    def learn(
        self, samples: list[Sample], *, envs: Sequence[str] = (), stopped: Callable[[], bool]
    ) -> StepResult | None:
        """One optimizer step on all samples; None, with nothing changed, if it was stopped."""
        skipped = self.optimizer.skipped
        result = self._step.run(self._bins(samples), self.learning_rate, envs=envs, stopped=stopped)
        if result is not None:
            self.state.step += 1
            self.state.tokens_trained += result.tokens
            self.state.skipped_steps += self.optimizer.skipped - skipped
        return result

    def _bins(self, samples: list[Sample]) -> list[Bin]:
        """This rank's share of a step."""
        if self.ranks.size == 1:
            return pack(samples, self.seq_len)
        return pack_for_worker(self.ranks.index, samples, self.seq_len, self.ranks.size, self.model.cost)

    def metrics(self, result: StepResult, lr: float, seconds: float) -> dict[str, float]:
        """The record of a step that took `seconds` in all."""
        return {
            **result.metrics,
            "optim/lr": lr,
            "optim/grad_norm": result.grad_norm,
            "optim/skipped": self.state.skipped_steps,
            "progress/tokens_trained": self.state.tokens_trained,
            "perf/trained_tokens_per_second": result.tokens / seconds,
            "perf/computed_tokens": result.computed_tokens,
            "time/step": seconds,
        }

    @property
    def is_checkpoint_due(self) -> bool:
        return self.state.step % self.config.ckpt.interval == 0 or self.state.step == self.max_steps

    def save_checkpoint(self, directory: Path) -> None:
        checkpoint.save(directory, self.model, self.optimizer, self.state, self.config.ckpt.keep_last)

    def save_final_model(self, path: Path) -> None:
        write_directory(path, self.model.save_for_engine)


def starting_point(checkpoints: Path, resume: str | None) -> Path | None:
    """The checkpoint to start from: none, the newest one, or the one that `resume` names. Unfinished ones go."""
    newest = checkpoint.latest(checkpoints)
    if resume is None:
        if newest is not None:
            raise ResumeError(
                f"{checkpoints} already has checkpoints, the newest {newest.name}: resume the run, or choose another "
                "output_dir"
            )
        return None
    checkpoint.sweep(checkpoints)
    if resume == "latest":
        return newest
    chosen = Path(resume)
    checkpoint.read_state(chosen)
    if newest is not None and chosen.parent.resolve() == checkpoints.resolve() and chosen.name != newest.name:
        raise ResumeError(
            f"{chosen} is not the newest checkpoint of its run ({newest.name} is): to go back on purpose, start a run "
            "with another output_dir from it"
        )
    return chosen


def _micro_batch_tokens(model: PackedModel, seq_len: int) -> int:
    """As many tokens as fit the activation budget by a rough count, but at least a bin."""
    config = model.module.config
    bytes_per_token: int = 34 * 4 * config.num_hidden_layers * config.hidden_size
    return max(seq_len, min(MOST_TOKENS, ACTIVATION_BUDGET // bytes_per_token))
