"""The trainer of an RL run: batches in, published weights out, checkpoints on the way.

Batch n trains version n-1 and makes version n. After a restart, steps since the checkpoint are trained again under a
higher incarnation, and the loaded version is published first, so that the engine follows. Left out on purpose: waiting
until the engine has taken a version before making the next; the orchestrator bounds how far batches run ahead of it.
Where engines are on the same device, the trainer holds the device lock while it computes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from functools import partial

import torch

from headrace.config.loss import LossConfig
from headrace.config.trainer import TrainerConfig, WeightsConfig
from headrace.inference.colocation import ColocatedEngines
from headrace.observe.metrics import MetricsLog
from headrace.observe.status import Status, wait_until
from headrace.rollout.batch import Batch
from headrace.rollout.types import Sample
from headrace.trainer.device_lock import TrainerDeviceLock
from headrace.trainer.learner import Learner
from headrace.trainer.loss import Loss, ce_loss, ref_kl_loss
from headrace.trainer.probe import write_probe
from headrace.trainer.publisher import Publisher, enter_incarnation
from headrace.trainer.ranks import Ranks
from headrace.trainer.rehearsal import rehearse
from headrace.trainer.stopwatch import Stopwatch
from headrace.trainer.token_table import remove_samples, write_token_table
from headrace.transport.run_dir import RunDir
from headrace.transport.weights import AcknowledgementMonitor

log = logging.getLogger(__name__)


def train(
    config: TrainerConfig,
    *,
    resume: str | None = None,
    stopped: threading.Event,
    status: Status,
    engines: ColocatedEngines | None = None,
    embedded: bool = True,
) -> None:
    """Train to `max_steps`, or until `stopped`. `resume` is a checkpoint, or "latest" for the newest, if any.

    `engines` are those of the run that are on this device, too; `embedded`: the run's engine is the embedded one.
    """
    if config.output_dir is None:
        raise ValueError("output_dir must be set to train")
    run = RunDir(config.output_dir)
    status.set("loading model")
    learner = Learner(config, losses(config), run.checkpoints, resume, engines=engines)
    publisher = make_publisher(config.weights, run, learner, shared=engines is not None)
    if embedded:
        publisher.check_embedded()
    acknowledgements = AcknowledgementMonitor(run.weights, config.weights.ack_timeout or None)
    enter_incarnation(learner, run, publisher, resuming=resume is not None)
    alternates = engines is not None and engines.alternates
    device_lock = TrainerDeviceLock(run.device_lock if alternates else None, learner.model.device, status)
    metrics = MetricsLog(run.metrics, "trainer")
    if learner.model.compiles and learner.model.device.type == "cuda" and learner.state.step < learner.max_steps:
        compile_now(learner, status)
    watch, first = Stopwatch(), learner.state.step + 1
    while (step := learner.state.step + 1) <= learner.max_steps:
        status.set(f"waiting for batch {step}", step=step - 1, max_steps=learner.max_steps)
        if not wait_for_batch(learner.ranks, run, acknowledgements, step, status, stopped):
            break
        batch = run.batches.read(step)
        watch.lap("time/wait_for_batch")

        lr = learner.learning_rate
        samples, envs = [entry.sample for entry in batch.samples], [entry.env for entry in batch.samples]
        traced = config.token_export.includes(step, learner.max_steps)
        learn = partial(
            learner.learn,
            samples,
            envs=envs,
            traced=traced,
            stopped=stopped.is_set,
            on_micro_batch=partial(status.advance, "micro-batch"),
        )
        with device_lock.hold(stopped.is_set) as is_held:
            if alternates:
                watch.lap("time/wait_for_turn")
            status.set(f"training step {step}")
            result = (
                device_lock.run_with_oom_retry(learn, learner.optimizer.discard, stopped.is_set) if is_held else None
            )
            if result is None:
                break
            watch.lap("time/forward_backward")
            if step == first:
                tell_zero_gradient(step, result.grad_norm, samples, config.loss, status)
            if config.probe_tokens:  # before the new weights are out: who loads them finds it
                probe(config, run, learner, batch)
                watch.lap("time/probe")
            if step < learner.max_steps:
                publisher.publish(learner.version)
                publisher.retire(config.keep_weights)
                watch.lap("time/publish")
        if result.trace is not None:
            limit = config.token_export.limit
            write_token_table(run.tokens.path(step), result.trace, batch, learner.ranks, limit)
            if limit is not None and learner.ranks.first:
                remove_samples(run.tokens, keep=(1, step))
            watch.lap("time/token_export")
        # Before the checkpoint: a step that is trained again is recorded again, one that is saved never would be.
        record = {**learner.metrics(result, lr, watch.total()), **watch.laps}
        tell(step, record, metrics if learner.ranks.first else None, status)
        watch = Stopwatch()  # saving counts as time of the step after it
        complete_checkpoint(learner, run, wait=False)
        if learner.is_checkpoint_due:
            status.set(f"saving the checkpoint of step {step}")
            learner.begin_checkpoint()
            watch.lap("time/save_ckpt")
        if step == learner.max_steps:  # after its checkpoint: whoever sees the last version may take the run for saved
            complete_checkpoint(learner, run, wait=True)
            publisher.publish(learner.version, lasting=True)
            publisher.retire(config.keep_weights)
    complete_checkpoint(learner, run, wait=True)
    if learner.state.step == learner.max_steps:
        status.set("saving the final model")
        learner.save_final_model(run.final_model)
    publisher.close()


def compile_now(learner: Learner, status: Status) -> None:
    """Compile the first step's code ahead of it, without the device lock: engines may start meanwhile."""
    status.set("compiling")
    start = time.monotonic()
    rehearse(learner)
    torch.cuda.empty_cache()
    log.info("compiled in %.1f s", time.monotonic() - start)


def probe(config: TrainerConfig, run: RunDir, learner: Learner, batch: Batch) -> None:
    """Write down what the trainer makes of a few of the batch's sequences with its new weights."""
    write_probe(
        run.probes,
        learner.version,
        batch,
        learner.model,
        tokens=config.probe_tokens,
        seq_len=learner.seq_len,
        chunk=config.lm_head_chunk,
    )


def make_publisher(weights: WeightsConfig, run: RunDir, learner: Learner, *, shared: bool) -> Publisher:
    """`shared`: engines are on the trainer's device."""
    return Publisher(
        run.weights,
        learner.model,
        host=weights.host if is_linked(weights, learner, shared=shared) else None,
        port=weights.port,
        carrier=weights.carrier,
        shared=shared,
    )


def is_linked(weights: WeightsConfig, learner: Learner, *, shared: bool) -> bool:
    """Whether versions leave from memory: where nobody says, on a GPU that has the engines, too."""
    if weights.transport == "auto":
        return shared and learner.model.device.type == "cuda"
    return weights.transport == "link"


def losses(config: TrainerConfig) -> dict[str, Loss]:
    """The loss of each component, with its settings bound."""
    return {
        "rl": config.loss.make(),
        "ce": ce_loss,
        "ref_kl": partial(ref_kl_loss, **config.ref_kl.model_dump()),
    }


def wait_for_batch(
    ranks: Ranks,
    run: RunDir,
    acknowledgements: AcknowledgementMonitor,
    step: int,
    status: Status,
    stopped: threading.Event,
) -> bool:
    """Until every rank sees it; False, on all of them, as soon as one is asked to stop."""

    def is_there() -> bool:
        if ranks.first:
            acknowledgements.check()
        return run.batches.exists(step)

    return wait_until(
        lambda: ranks.all(is_there()),
        f"batch {step}",
        "the orchestrator",
        status,
        stopped=lambda: ranks.any(stopped.is_set()),
    )


def tell_zero_gradient(
    step: int, grad_norm: float, samples: Sequence[Sample], loss: LossConfig, status: Status
) -> None:
    """Say it unless the samples have no advantages. A loss that is a constant shows in the first step already."""
    advantages = [sample.streams["advantages"] for sample in samples if "advantages" in sample.streams]
    if grad_norm != 0 or not any(values.any() for values in advantages):
        return
    status.notify(
        f"the gradient of step {step} is 0 although its samples have advantages, so that nothing was learned: is the "
        f"loss {loss.label!r} a constant, or does it mask every token?"
    )


def tell(step: int, record: dict[str, float], metrics: MetricsLog | None, status: Status) -> None:
    """What came of a step, to whoever watches; one rank alone writes it down."""
    speed = record["perf/trained_tokens_per_second"]
    if metrics is not None:
        metrics.log(step, record)
    status.set(step=step, tokens_per_second=speed)
    log.info("step %d: loss %.4f, %.0f tokens/s", step, record.get("loss", 0.0), speed)


def complete_checkpoint(learner: Learner, run: RunDir, *, wait: bool) -> None:
    """Batches that a complete checkpoint covers are not needed again."""
    covered = learner.checkpoints.finish(wait=wait)
    if covered is not None and learner.ranks.first:
        run.batches.delete_through(covered)
