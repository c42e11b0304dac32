"""Supervised fine-tuning on conversations, with the same step, optimizer and checkpoints as an RL run.

The loop is also that of preference pairs (`headrace.trainer.dpo`), which differ in their loss and their reference."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from headrace.config.sft import OfflineConfig
from headrace.config.trainer import ReferenceConfig
from headrace.errors import DataError
from headrace.inference.memory import ColocatedEngines
from headrace.observe.metrics import MetricsLog
from headrace.observe.status import Status, wait_until
from headrace.rollout.digest import CHANGED_DATA
from headrace.rollout.packing import pack_for_worker
from headrace.rollout.types import Sample
from headrace.text.renderer import TOOLS_NOT_SHOWN, make_renderer, shows_tools
from headrace.text.tokenizer import Tokenizer
from headrace.trainer.checkpoint import TrainState
from headrace.trainer.host_copies import pin_ahead
from headrace.trainer.learner import Learner, Stopwatch
from headrace.trainer.loss import Loss, ce_loss
from headrace.trainer.model import PackedModel
from headrace.trainer.packed_row import to_device
from headrace.trainer.publisher import Publisher, enter_incarnation
from headrace.trainer.sft_data import Example, Rows, TruncationMonitor, open_examples, open_rows
from headrace.trainer.step import MICRO_BATCH_TOKENS, MetricSums
from headrace.trainer.tokens import MicroBatch, StepTokens
from headrace.transport.run_dir import RunDir

log = logging.getLogger(__name__)

DPO_PREFIX = "dpo/"
"""Prefix of the names of DPO metrics."""
LOG_INTERVAL_STEPS = 10
"""Steps between two log lines."""
KEPT_VERSIONS = 1
"""Published versions kept on disk besides those that an engine may still load."""


class SftTrainer:
    """The training loop of one process (rank) of a run on examples, to `max_steps` or until `stopped`.

    `save_and_stop`: finish the step, write a checkpoint, and end. `resume` is a checkpoint, or "latest" for the newest,
    if any; `engines` evaluate on the same device; `reference`: settings of weights beside those in training.
    """

    COMPONENT: ClassVar[str] = "ce"
    """The component of the loss."""
    UNIT_SIZE: ClassVar[int] = 1
    """Samples of an example, which stay in one forward pass."""

    def __init__(
        self,
        config: OfflineConfig,
        *,
        status: Status,
        stopped: threading.Event,
        save_and_stop: threading.Event | None = None,
        resume: str | None = None,
        engines: ColocatedEngines | None = None,
        loss: Loss = ce_loss,
        reference: ReferenceConfig | None = None,
    ) -> None:
        if config.output_dir is None:
            raise ValueError("output_dir must be set to train")
        self.config, self.status, self.stopped = config, status, stopped
        self.save_and_stop = save_and_stop or threading.Event()
        self.run_dir = run = RunDir(config.output_dir)
        status.set("loading model")
        self.learner = learner = Learner(
            config,
            {self.COMPONENT: loss},
            run.checkpoints,
            resume,
            packed=config.data.pack,
            unit_size=self.UNIT_SIZE,
            engines=engines,
            reference=reference,
        )
        directory, options = learner.model.directory, config.renderer
        self.renderer = make_renderer(
            directory, Tokenizer(directory), options.name, options.enable_thinking, options.thinking_retention
        )
        self.publisher = Publisher(run.weights, learner.model) if config.evaluates else None
        if self.publisher is not None:
            if config.inference.engine == "embedded":
                self.publisher.check_embedded()
            enter_incarnation(learner, run, self.publisher, resuming=resume is not None)
        if learner.model.device.type == "cuda" and learner.state.step < learner.max_steps:
            pin_ahead(learner.plan_checkpoints(), learner.model.device)
        status.set("reading the data")
        rows = open_rows(config.data)
        if rows is not None:
            notify_changed_rows(rows, learner.state, status)
            if rows.have_tools and not shows_tools(self.renderer):
                status.notify(f"{rows.name} has tools, but the model's chat template {TOOLS_NOT_SHOWN}")
        self.examples, held_out = open_examples(config, rows, learner.state.examples)
        self._prepare(rows, held_out)
        self.validation: Validation | None = None
        if config.validation is not None and (samples := self._add_reference(self._render(held_out))) is not None:
            self.validation = Validation(
                learner.model, samples, learner.seq_len, self.COMPONENT, loss, unit_size=self.UNIT_SIZE
            )
        self.truncation = TruncationMonitor(learner.seq_len, status.notify)
        self.metrics = MetricsLog(run.metrics, config.COMMAND)
        self.watch = Stopwatch()

    def _prepare(self, rows: Rows | None, held_out: list[Example]) -> None:
        """Prepare the reference for `_add_reference`, before the first step; SFT has none."""

    def _render(self, examples: Iterable[Example]) -> list[Sample]:
        return [sample for each in examples for sample in each.samples(self.renderer, self.learner.seq_len)]

    def _add_reference(self, samples: list[Sample]) -> list[Sample] | None:
        """Return the samples with the reference's logprobs, if the loss reads them; None if `stopped`."""
        return samples

    def run(self) -> Path:
        """Train; return the path of the final model."""
        learner, config = self.learner, self.config
        self.status.set("training", step=learner.state.step, max_steps=learner.max_steps)
        while (step := learner.state.step + 1) <= learner.max_steps:
            if learner.ranks.any(self.save_and_stop.is_set()):
                if learner.has_unsaved_step:
                    learner.begin_checkpoint()
                break
            if config.validation is not None and (step - 1) % config.validation.interval == 0:
                self._validate()
                self.watch.lap("time/validate")
            samples = self._render(islice(self.examples, config.data.batch_size))
            counts = self.truncation.count(samples)
            self.watch.lap("time/render")
            completed, lr = self._add_reference(samples), learner.learning_rate
            if completed is None:
                break
            on_micro_batch = partial(self.status.advance, f"step {step}, micro-batch")
            result = learner.learn(completed, stopped=self.stopped.is_set, on_micro_batch=on_micro_batch)
            if result is None:
                break
            learner.state.examples += config.data.batch_size
            self.watch.lap("time/forward_backward")
            # Before the checkpoint: a step that is trained again is recorded again, a saved one would never be.
            self._record(step, {**learner.metrics(result, lr, self.watch.total()), **self.watch.laps, **counts})
            self.watch = Stopwatch()  # saving and validating count as time of the next step
            learner.checkpoints.finish()
            if learner.is_checkpoint_due:
                learner.begin_checkpoint()
                self.watch.lap("time/save_ckpt")
            if self.publisher is not None and step < learner.max_steps and config.is_evaluated(step):
                self._publish_for_evaluation(self.publisher)
                self.watch.lap("time/publish")
        learner.checkpoints.finish(wait=True)
        if learner.state.step == learner.max_steps:
            self._finish()
        return self.run_dir.final_model

    def _record(self, step: int, record: dict[str, float]) -> None:
        loss, speed, last = record["loss"], record["perf/trained_tokens_per_second"], self.learner.max_steps
        if self.learner.ranks.is_first:
            self.metrics.log(step, record)
        self.status.set(step=step, loss=loss, tokens_per_second=speed)
        if step % LOG_INTERVAL_STEPS == 0 or step == last:
            log.info("step %d of %d: loss %.4f, %.0f tokens/s", step, last, loss, speed)

    def _validate(self) -> None:
        """Record the validation of the current model. A run that resumes at this step records it again."""
        means = None if self.validation is None else self.validation.measure(self.stopped.is_set)
        if means is not None:
            shown = ", ".join(f"{name} {value:.4f}" for name, value in means.items())
            log.info("step %d: validation %s", self.learner.state.step, shown)
            if self.learner.ranks.is_first:
                self.metrics.log(self.learner.state.step, {f"val/{name}": value for name, value in means.items()})

    def _publish_for_evaluation(self, publisher: Publisher) -> None:
        """Publish a version, unless the last one is not acknowledged yet: training never waits for evaluation."""
        learner, ranks, weights = self.learner, self.learner.ranks, self.run_dir.weights
        if ranks.any(ranks.is_first and (weights.acknowledged() is None or bool(weights.unacknowledged()))):
            log.info("step %d is not evaluated: an earlier evaluation is still running", learner.state.step)
            return
        publisher.publish(learner.version)
        publisher.retire(KEPT_VERSIONS)

    def _finish(self) -> None:
        """Validate, save the final model, and publish the final version, after which the run may end."""
        self.truncation.refuse_if_nothing_is_learned()
        self._validate()
        self.status.set("saving the final model")
        self.learner.save_final_model(self.run_dir.final_model)
        ranks, weights, version = self.learner.ranks, self.run_dir.weights, self.learner.version
        if self.publisher is None or ranks.any(ranks.is_first and version in weights.published()):
            return  # a finished run that was resumed has published it at its start
        acknowledged = wait_until(  # the orchestrator must have read the version that training began with
            lambda: ranks.all(weights.acknowledged() is not None),
            "the first acknowledgement",
            "the orchestrator",
            self.status,
            stopped=lambda: ranks.any(self.stopped.is_set()),
        )
        if acknowledged:
            self.publisher.publish(version, lasting=True)


def notify_changed_rows(rows: Rows, state: TrainState, status: Status) -> None:
    """Notify if a resumed run reads other rows: its saved position then refers to other examples."""
    before, state.data = state.data, rows.fingerprint
    if before is not None and (change := before.describe_change(rows.fingerprint)):
        status.notify(f"{rows.name} has changed since the checkpoint of step {state.step}: {change}. {CHANGED_DATA}")


class ForwardPasses:
    """Forward passes without gradients over fixed samples, spread over the ranks; `unit_size` as in `StepTokens`."""

    def __init__(self, model: PackedModel, samples: list[Sample], seq_len: int, unit_size: int = 1) -> None:
        self.model, self.ranks = model, model.ranks
        ranks = model.ranks
        bins = pack_for_worker(ranks.index, samples, seq_len, ranks.size, model.cost, unit_size=unit_size)
        self.tokens = StepTokens(bins, unit_size)
        self._groups = self.tokens.cut(max(seq_len, MICRO_BATCH_TOKENS))
        self.count = ranks.max(len(self._groups))
        """Micro-batches, the same on every rank, since they run collectives."""

    def run(self, consume: Callable[[MicroBatch, torch.Tensor], None], stopped: Callable[[], bool]) -> bool:
        """Call `consume` with each micro-batch and the logprobs of its scored tokens; return False if `stopped`."""
        for number in range(self.count):
            if self.ranks.any(stopped()):
                return False
            group = self._groups[number] if number < len(self._groups) else []
            batch = self.tokens.micro_batch(group, self.model.device, self.model.kernel)
            consume(batch, self.model.logprobs(batch.row, batch.predictors, batch.labels, batch.temperatures))
        return True


def sequence_logprobs(
    model: PackedModel, samples: list[Sample], seq_len: int, stopped: Callable[[], bool]
) -> np.ndarray | None:
    """Return for each sample the sum of the logprobs of its trained tokens, float64, on every rank; None if stopped."""
    passes, device = ForwardPasses(model, samples, seq_len), model.device
    totals = torch.zeros(len(samples), dtype=torch.float64, device=device)

    def add(batch: MicroBatch, logprobs: torch.Tensor) -> None:
        sequences = np.searchsorted(passes.tokens.starts, batch.scored, side="right") - 1
        totals.index_add_(0, to_device(passes.tokens.sources[sequences], device), logprobs.double())

    return model.ranks.all_reduce(totals).cpu().numpy() if passes.run(add, stopped) else None


class Validation:
    """The loss on a fixed set of held-out examples, rendered once, so that validations are comparable.

    Each rank has its share packed. Left out on purpose: everything that needs sampling.
    """

    def __init__(
        self,
        model: PackedModel,
        samples: list[Sample],
        seq_len: int,
        component: str = "ce",
        loss: Loss = ce_loss,
        *,
        unit_size: int = 1,
    ) -> None:
        self._component, self._loss = component, loss
        self._passes = ForwardPasses(model, samples, seq_len, unit_size)
        if self._passes.count == 0:
            fact = f"none of {len(samples) // unit_size} examples of the validation set has trained tokens within it"
            raise DataError(fact, key="seq_len", value=seq_len, fix="Raise seq_len, or validate on shorter examples.")

    def measure(self, stopped: Callable[[], bool] = lambda: False) -> dict[str, float] | None:
        """Return `loss`, a mean over trained tokens or pairs, and of pairs also the loss's metrics; None if stopped."""
        tokens, ranks = self._passes.tokens, self._passes.ranks
        sums = MetricSums()

        def add(batch: MicroBatch, logprobs: torch.Tensor) -> None:
            outputs = self._loss(tokens.loss_inputs(self._component, batch, logprobs))
            sums.add(outputs.metrics)
            sums.total_loss = sums.total_loss + outputs.loss.detach().double()

        if not self._passes.run(add, stopped):
            return None
        means = sums.means(ranks)
        [count] = ranks.sum([tokens.count(self._component)])
        pairs = {name.removeprefix(DPO_PREFIX): mean for name, mean in means.items() if name.startswith(DPO_PREFIX)}
        return {"loss": means["loss"] / count, **pairs}
