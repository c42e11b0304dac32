"""The trainer of an RL run: reads batches, publishes weights, writes checkpoints.

Batch n trains version n-1 and produces version n. After a restart, steps since the checkpoint are trained again under a
higher incarnation, and the loaded version is published first, so that the engine follows. Left out on purpose: waiting
until the engine has loaded a version before training the next; the orchestrator bounds how far batches run ahead.
If engines are on the same device, the trainer holds the device lock while it computes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from functools import partial

import torch

from headrace.config.trainer import LossConfig, TrainerConfig
from headrace.errors import Repaired
from headrace.inference.memory import ColocatedEngines
from headrace.observe.metrics import MetricsLog
from headrace.observe.status import Status, wait_until
from headrace.rollout.batch import Batch
from headrace.rollout.digest import seal
from headrace.rollout.schema import DamagedFile
from headrace.rollout.types import Sample
from headrace.trainer.device_lock import TrainerDeviceLock
from headrace.trainer.host_copies import pin_ahead
from headrace.trainer.learner import Learner, Stopwatch
from headrace.trainer.loss import Loss, ce_loss, k2_loss, k3_loss, ref_kl_loss
from headrace.trainer.probe import write_probe
from headrace.trainer.publisher import Publisher, enter_incarnation
from headrace.trainer.step import StepResult
from headrace.trainer.token_table import delete_sampled_exports, write_token_table
from headrace.trainer.warmup import warm_up
from headrace.transport.files import write_atomically
from headrace.transport.run_dir import RunDir
from headrace.transport.weights import AcknowledgementMonitor

log = logging.getLogger(__name__)


class RlTrainer:
    """The training loop of one process (rank) of an RL run, to `max_steps` or until `stopped`."""

    def __init__(
        self,
        config: TrainerConfig,
        *,
        status: Status,
        stopped: threading.Event,
        save_and_stop: threading.Event | None = None,
        resume: str | None = None,
        engines: ColocatedEngines | None = None,
        embedded: bool = True,
    ) -> None:
        """`stopped`: end as soon as possible. `save_and_stop`: finish the step, write a checkpoint, and end.

        `resume` is a checkpoint, or "latest" for the newest, if any.
        `engines` are those of the run on this device; `embedded`: the run's engine is the embedded one.
        """
        if config.output_dir is None:
            raise ValueError("output_dir must be set to train")
        self.config, self.status, self.stopped = config, status, stopped
        self.save_and_stop = save_and_stop or threading.Event()
        self.run_dir = run = RunDir(config.output_dir)
        status.set("loading model")
        loading = time.monotonic()
        self.learner = learner = Learner(
            config, make_losses(config), run.checkpoints, resume, engines=engines, reference=config.reference
        )
        log.info("model and optimizer loaded in %.1f s", time.monotonic() - loading)
        weights, on_gpu = config.weights, learner.model.device.type == "cuda"
        linked = engines is not None and on_gpu if weights.transport == "auto" else weights.transport == "link"
        host, shared = weights.host if linked else None, engines is not None
        past = config.past_weights
        self.publisher = Publisher(
            run.weights,
            learner.model,
            host=host,
            port=weights.port,
            carrier=weights.carrier,
            shared=shared,
            lasting_every=None if past is None else past.every,
        )
        if embedded:
            self.publisher.check_embedded()
        self.acknowledgements = AcknowledgementMonitor(run.weights, weights.ack_timeout or None)
        enter_incarnation(learner, run, self.publisher, resuming=resume is not None)
        self.alternates = engines is not None and engines.alternates
        lock = run.device_lock if self.alternates else None
        self.device_lock = TrainerDeviceLock(lock, learner.model.device, status)
        if on_gpu and learner.state.step < learner.max_steps:
            published = self.publisher.host_bytes
            pin_ahead(published + learner.plan_checkpoints(published), learner.model.device)
        self.metrics = MetricsLog(run.metrics, "trainer")
        if learner.ranks.is_first:
            write_atomically(run.platform, seal(learner.platform))
        self.routers = MetricsLog(run.routers, "trainer", shared=False)
        if learner.model.compiles and on_gpu and learner.state.step < learner.max_steps:
            status.set("compiling")  # ahead of the first step, without the device lock: engines start meanwhile
            start = time.monotonic()
            warm_up(learner)
            torch.cuda.empty_cache()
            log.info("compiled in %.1f s", time.monotonic() - start)
        self.first_step = learner.state.step + 1
        self.watch = Stopwatch()

    def run(self) -> None:
        learner = self.learner
        while (step := learner.state.step + 1) <= learner.max_steps:
            if not self._wait_for_batch(step):
                break
            batch = self._read_batch(step)
            self.watch.lap("time/wait_for_batch")
            lr = learner.learning_rate
            result = self._train_step(step, batch)
            if result is None:
                break
            self._export_tokens(step, batch, result)
            # Before the checkpoint: a step that is trained again is recorded again, a saved one would never be.
            self._record(step, result, lr)
            self.watch = Stopwatch()  # saving counts as time of the next step
            self._save(step)
        if learner.ranks.any(self.save_and_stop.is_set()) and learner.has_unsaved_step:
            self.status.set(f"saving the checkpoint of step {learner.state.step}")
            learner.begin_checkpoint()
        self._finish_checkpoint(wait=True)
        if learner.state.step == learner.max_steps:
            self.status.set("saving the final model")
            weights, version = self.run_dir.weights, learner.version
            published = weights.path(version) if learner.ranks.any(version in weights.published()) else None
            learner.save_final_model(self.run_dir.final_model, published)
        self.publisher.close()

    def _wait_for_batch(self, step: int) -> bool:
        """Wait until every rank can read the batch; return False on all ranks once one is stopped."""
        ranks = self.learner.ranks
        if ranks.any(self.save_and_stop.is_set()):
            return False
        self.status.set(f"waiting for batch {step}", step=step - 1, max_steps=self.learner.max_steps)

        def exists() -> bool:
            if ranks.is_first:
                self.acknowledgements.check()
            return self.run_dir.batches.exists(step)

        return wait_until(
            lambda: ranks.all(exists()),
            f"batch {step}",
            "the orchestrator",
            self.status,
            stopped=lambda: ranks.any(self.stopped.is_set() or self.save_and_stop.is_set()),
        )

    def _read_batch(self, step: int) -> Batch:
        """Return the batch. If it is damaged for one rank, set it aside and raise `Repaired` on all ranks."""
        ranks, batches = self.learner.ranks, self.run_dir.batches
        try:
            return ranks.agree_on_damage(partial(batches.read, step))
        except DamagedFile as damage:
            if ranks.is_first:
                batches.set_aside(step)
            self._finish_checkpoint(wait=True)
            raise Repaired(f"{damage}. It was not trained, and its prompts are sampled again") from damage

    def _train_step(self, step: int, batch: Batch) -> StepResult | None:
        """Train on the batch, write the probe, and publish the new version unless it is the last; None if stopped."""
        learner, lock, stopped = self.learner, self.device_lock, self.stopped.is_set
        learn = partial(
            learner.learn_batch,
            batch,
            traced=self.config.token_export.includes(step, learner.max_steps),
            stopped=stopped,
            on_micro_batch=partial(self.status.advance, "micro-batch"),
        )
        with lock.hold(stopped) as is_held:
            if self.alternates:
                self.watch.lap("time/wait_for_turn")
            self.status.set(f"training step {step}")
            result = lock.run_with_oom_retry(learn, learner.optimizer.zero_grad, stopped) if is_held else None
            if result is None:
                return None
            self.watch.lap("time/forward_backward")
            if step == self.first_step:
                samples = [entry.sample for entry in batch.samples]
                notify_zero_gradient(step, result.grad_norm, samples, self.config.loss, self.status)
            if self.config.probe_tokens:  # before the weights are published: the probe must exist when they are loaded
                probes, tokens = self.run_dir.probes, self.config.probe_tokens
                write_probe(probes, learner.version, batch, learner.model, tokens=tokens, seq_len=learner.seq_len)
                self.watch.lap("time/probe")
            if step < learner.max_steps:
                self.publisher.publish(learner.version)
                self._retire_weights()
                self.watch.lap("time/publish")
        return result

    def _export_tokens(self, step: int, batch: Batch, result: StepResult) -> None:
        if result.trace is None:
            return
        tokens, limit = self.run_dir.tokens, self.config.token_export.limit
        write_token_table(tokens.path(step), result.trace, batch, self.learner.ranks, limit)
        if limit is not None and self.learner.ranks.is_first:
            delete_sampled_exports(tokens, keep=(1, step))
        self.watch.lap("time/token_export")

    def _record(self, step: int, result: StepResult, lr: float) -> None:
        record = {**self.learner.metrics(result, lr, self.watch.total()), **self.watch.laps}
        if self.learner.ranks.is_first:
            self.metrics.log(step, {**record, **result.histograms})
            if result.routing:
                self.routers.log(
                    step, {f"router/{name}": list(layers.values()) for name, layers in result.routing.items()}
                )
        speed = record["perf/trained_tokens_per_second"]
        self.status.set(step=step, tokens_per_second=speed)
        log.info("step %d: loss %.4f, %.0f tokens/s", step, record.get("loss", 0.0), speed)

    def _save(self, step: int) -> None:
        """Start a checkpoint if one is due; after the last step, wait for it and publish the final version."""
        learner = self.learner
        self._finish_checkpoint(wait=False)
        if learner.is_checkpoint_due:
            self.status.set(f"saving the checkpoint of step {step}")
            learner.begin_checkpoint()
            self.watch.lap("time/save_ckpt")
        if step == learner.max_steps:  # after its checkpoint: the final version implies that the run is saved
            self._finish_checkpoint(wait=True)
            self.publisher.publish(learner.version, lasting=True)
            self._retire_weights()

    def _retire_weights(self) -> None:
        """Delete published versions that neither this run nor one that continues from a checkpoint needs."""
        past, steps = self.config.past_weights, (self.learner.state.step, *self.learner.checkpoints.steps())
        kept = () if past is None else {needed for step in steps for needed in past.needed_after(step)}
        self.publisher.retire(self.config.keep_weights, kept)

    def _finish_checkpoint(self, *, wait: bool) -> None:
        """Complete the checkpoint in progress, if it is written, and delete the batches that it covers."""
        covered = self.learner.checkpoints.finish(wait=wait)
        if covered is not None and self.learner.ranks.is_first:
            self.run_dir.batches.delete_through(covered)


def make_losses(config: TrainerConfig) -> dict[str, Loss]:
    """Return the loss of each component with its settings bound."""
    ref_kl = partial(ref_kl_loss, **config.ref_kl.model_dump())
    k2, k3 = (partial(loss, ratio=config.kl_ratio) for loss in (k2_loss, k3_loss))
    return {"rl": config.loss.make(), "ce": ce_loss, "ref_kl": ref_kl, "k2": k2, "k3": k3}


def notify_zero_gradient(
    step: int, grad_norm: float, samples: Sequence[Sample], loss: LossConfig, status: Status
) -> None:
    """Notify if the gradient is 0 although samples have advantages: the loss may be a constant."""
    advantages = [sample.streams["advantages"] for sample in samples if "advantages" in sample.streams]
    if grad_norm == 0 and any(values.any() for values in advantages):
        status.notify(
            f"the gradient of step {step} is 0 although its samples have advantages: nothing was learned. Check that "
            f"the loss {loss.label!r} depends on the logprobs and does not mask every token"
        )
