"""Replay of steps of an RL run: the run's own learner on its batches. No file of the run is written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch

from headrace.config.trainer import TrainerConfig
from headrace.rollout.batch import Batch
from headrace.trainer.learner import Learner
from headrace.trainer.ranks import whole
from headrace.trainer.rl import make_losses
from headrace.trainer.step import StepResult
from headrace.trainer.token_table import token_table
from headrace.trainer.tokens import MicroBatchTrace

NO_LIMIT = 1 << 62
"""Skipped updates after which a replay ends: a step that ended the run is replayed, too."""


class TracedStep(NamedTuple):
    """A replayed step with the values of its tokens, as `token_table` has them."""

    metrics: dict[str, float]
    tokens: pa.Table
    counts: dict[str, int]
    """Member tokens of each loss component."""
    micro_batches: list[MicroBatchTrace]
    gradient_norms: dict[str, float]
    """Gradient norm of each trained parameter, before clipping."""


class Replay:
    """A learner from a checkpoint, or from the run's model, in the state before the next step."""

    def __init__(self, config: TrainerConfig, start: Path | None, scratch: Path, threads: int | None = None) -> None:
        """`scratch`: an empty folder for what `save` writes; `threads`: CPU threads of the run, if that is known."""
        if threads is not None and threads <= (os.cpu_count() or 1):
            torch.set_num_threads(threads)  # sums in the same order
        config = config.model_copy(update={"max_skipped_updates": NO_LIMIT})
        resume = None if start is None else str(start)
        self.learner = Learner(config, make_losses(config), scratch, resume, reference=config.reference)

    def train(self, batch: Batch) -> dict[str, float]:
        """Train on the next batch; return the metrics of the step."""
        return self._train(batch)[1]

    def trace(self, batch: Batch) -> TracedStep:
        """Train on the next batch, and keep the values of its tokens."""
        norms: dict[str, float] = {}

        def measure() -> None:
            for name, parameter in self.learner.optimizer.parameters.items():
                if parameter.grad is not None:
                    norms[name] = float(whole(parameter.grad.norm()))

        result, metrics = self._train(batch, traced=True, on_gradients=measure)
        assert result.trace is not None
        total = float(np.abs(result.trace.gradients).sum(dtype=np.float64))
        table = token_table(result.trace, batch, total)
        return TracedStep(metrics, table, result.trace.counts, result.trace.micro_batches, norms)

    def _train(
        self, batch: Batch, *, traced: bool = False, on_gradients: Callable[[], None] = lambda: None
    ) -> tuple[StepResult, dict[str, float]]:
        lr = self.learner.learning_rate
        result = self.learner.learn_batch(batch, traced=traced, on_gradients=on_gradients)
        assert result is not None  # it is never stopped
        return result, self.learner.metrics(result, lr, seconds=1.0)

    def save(self) -> Path:
        """Write a checkpoint of the current state; return its path."""
        self.learner.begin_checkpoint()
        self.learner.checkpoints.finish(wait=True)
        return self.learner.checkpoints.directory / f"step-{self.learner.state.step:08d}"
