"""The trainer of an RL run: batches in, published weights out, checkpoints on the way.

Batch n trains version n-1 and makes version n. After a restart, steps since the checkpoint are trained again under a
higher incarnation, and the loaded version is published first, so that the engine follows. Left out on purpose: waiting
until the engine has taken a version before making the next; the orchestrator bounds how far batches run ahead of it.
"""

from __future__ import annotations

import logging
import threading
from functools import partial

from headrace.config.trainer import TrainerConfig
from headrace.observe.metrics import MetricsLog, spread
from headrace.observe.status import Status, wait_until
from headrace.rollout.batch import Batch
from headrace.rollout.types import NOT_SAMPLED
from headrace.rollout.version import staleness
from headrace.trainer.learner import Learner, ResumeError, starting_point
from headrace.trainer.loss import Loss, ce_loss, policy_loss, ref_kl_loss
from headrace.trainer.stopwatch import Stopwatch
from headrace.transport.run_dir import RunDir

log = logging.getLogger(__name__)


def train(config: TrainerConfig, *, resume: str | None = None, stopped: threading.Event, status: Status) -> None:
    """Train to `max_steps`, or until `stopped`. `resume` is a checkpoint, or "latest" for the newest, if any."""
    if config.output_dir is None:
        raise ValueError("output_dir must be set to train")
    run = RunDir(config.output_dir)
    status.set("loading model")
    learner = Learner(config, losses(config), starting_point(run.checkpoints, resume))
    enter_incarnation(learner, run, resuming=resume is not None)
    metrics = MetricsLog(run.metrics, "trainer")
    watch = Stopwatch()
    while (step := learner.state.step + 1) <= learner.max_steps:
        status.set(f"waiting for batch {step}", step=step - 1, max_steps=learner.max_steps)
        arrived = partial(run.batches.exists, step)
        if not wait_until(arrived, f"batch {step}", "the orchestrator", status, stopped=stopped):
            return
        batch = run.batches.read(step)
        watch.lap("time/wait_for_batch")

        status.set(f"training step {step}")
        lr = learner.learning_rate
        samples, envs = [entry.sample for entry in batch.samples], [entry.env for entry in batch.samples]
        result = learner.learn(samples, envs=envs, stopped=stopped.is_set)
        if result is None:
            return
        watch.lap("time/forward_backward")

        final = step == learner.max_steps
        if not final:
            publish(learner, run, config.keep_weights)
            watch.lap("time/publish")
        # Before the checkpoint: a step that is trained again is recorded again, one that is saved never would be.
        record = {**learner.metrics(result, lr, watch.total()), **watch.laps, **ages(batch)}
        metrics.log(step, record)
        status.set(step=step, tokens_per_second=record["perf/trained_tokens_per_second"])
        log.info(
            "step %d: loss %.4f, %.0f tokens/s", step, record.get("loss", 0.0), record["perf/trained_tokens_per_second"]
        )
        watch = Stopwatch()  # saving counts as time of the step after it
        if learner.is_checkpoint_due:
            status.set(f"saving the checkpoint of step {step}")
            learner.save_checkpoint(run.checkpoints)
            run.batches.delete_through(step)
            watch.lap("time/save_ckpt")
        if final:  # after its checkpoint: whoever sees the last version may take the run for saved
            publish(learner, run, config.keep_weights)
    status.set("saving the final model")
    learner.save_final_model(run.final_model)


def losses(config: TrainerConfig) -> dict[str, Loss]:
    """The loss of each component, with its settings bound."""
    return {
        "rl": policy_loss(config.loss.type, **config.loss.model_dump(exclude={"type"})),
        "ce": ce_loss,
        "ref_kl": partial(ref_kl_loss, **config.ref_kl.model_dump()),
    }


def enter_incarnation(learner: Learner, run: RunDir, *, resuming: bool) -> None:
    """After a restart take an incarnation that nobody has seen, and publish the loaded version under it."""
    seen = [version.incarnation for version in run.weights.published()]
    if not resuming and seen:
        raise ResumeError(
            f"{run.weights.directory} already has published weights: resume the run, or choose another output_dir"
        )
    if learner.state.step:
        seen.append(learner.state.incarnation)
    if seen:
        learner.state.incarnation = 1 + max(seen)
        run.batches.delete_through(learner.state.step)
        run.weights.sweep()
        run.weights.publish(learner.version, learner.model.save_for_engine)
        log.info("resumed at step %d as incarnation %d", learner.state.step, learner.state.incarnation)


def publish(learner: Learner, run: RunDir, keep_weights: int) -> None:
    run.weights.publish(learner.version, learner.model.save_for_engine)
    run.weights.retire(keep_weights)


def ages(batch: Batch) -> dict[str, float]:
    """How old each sample's oldest sampled token was, in optimizer steps."""
    sampled = [entry.sample.versions[entry.sample.versions != NOT_SAMPLED] for entry in batch.samples]
    return spread("off_policy/staleness", (staleness(batch.step, int(v.min())) for v in sampled if len(v)))
