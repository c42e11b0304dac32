"""Supervised fine-tuning: the same step, optimizer and checkpoints as an RL run, on conversations."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

from headrace.config.sft import SftConfig, SourceConfig
from headrace.environments.registry import load_environment
from headrace.inference.colocation import ColocatedEngines
from headrace.observe.metrics import MetricsLog
from headrace.observe.status import Status, wait_until
from headrace.rollout.fingerprint import BY_POSITION
from headrace.rollout.types import Sample
from headrace.text.renderer import TOOLS_NOT_SHOWN, make_renderer, shows_tools
from headrace.text.sft_conversation import SftConversation, render_sample
from headrace.text.tokenizer import Tokenizer
from headrace.trainer.checkpoint import TrainState
from headrace.trainer.learner import Learner
from headrace.trainer.loss import ce_loss
from headrace.trainer.publisher import Publisher, enter_incarnation
from headrace.trainer.rows import Rows, load_rows, read_rows
from headrace.trainer.sft_data import VALIDATION_SEED, Cuts, drawn, from_environment, from_rows, hold_out
from headrace.trainer.stopwatch import Stopwatch
from headrace.trainer.validation import Validation
from headrace.transport.run_dir import RunDir

log = logging.getLogger(__name__)

LOG_INTERVAL = 10
"""Steps between log lines."""
KEEP_WEIGHTS = 1
"""Published versions kept on disk besides those that an engine may still load."""


def train(
    config: SftConfig,
    *,
    resume: str | None = None,
    stopped: threading.Event,
    status: Status,
    engines: ColocatedEngines | None = None,
) -> Path:
    """Train to `max_steps`, or until `stopped`. Returns the path of the final model.

    `engines` evaluate on the same device.
    """
    if config.output_dir is None:
        raise ValueError("output_dir must be set to train")
    run = RunDir(config.output_dir)
    status.set("loading model")
    learner = Learner(config, {"ce": ce_loss}, run.checkpoints, resume, joined=config.data.pack, engines=engines)
    directory, options = learner.model.directory, config.renderer
    renderer = make_renderer(
        directory, Tokenizer(directory), options.name, options.enable_thinking, options.thinking_retention
    )
    publisher = Publisher(run.weights, learner.model) if config.evaluates else None
    if publisher is not None:
        if config.inference.engine == "embedded":
            publisher.check_embedded()
        enter_incarnation(learner, run, publisher, resuming=resume is not None)
    status.set("reading the data")
    rows = open_rows(config.data) if config.data.env is None else None
    if rows is not None:
        tell_changed_rows(rows, learner.state, status)
        if rows.have_tools and not shows_tools(renderer):
            status.notify(f"{rows.name} has tools, but the model's chat template {TOOLS_NOT_SHOWN}")
    conversations, held_out = open_conversations(config, rows, learner.state.examples)
    validation = make_validation(config, learner, [render_sample(conversation, renderer) for conversation in held_out])
    cuts = Cuts(learner.seq_len, status.notify)
    metrics = MetricsLog(run.metrics, "sft")
    status.set("training", step=learner.state.step, max_steps=learner.max_steps)
    watch = Stopwatch()
    while (step := learner.state.step + 1) <= learner.max_steps:
        if validation is not None and validation.is_due(step - 1):
            validate(validation, learner, metrics, stopped)
            watch.lap("time/validate")
        samples = [
            render_sample(conversation, renderer) for conversation in islice(conversations, config.data.batch_size)
        ]
        counts = cuts.of(samples)
        watch.lap("time/render")
        lr = learner.learning_rate
        on_micro_batch = partial(status.advance, f"step {step}, micro-batch")
        result = learner.learn(samples, stopped=stopped.is_set, on_micro_batch=on_micro_batch)
        if result is None:
            break
        learner.state.examples += len(samples)
        watch.lap("time/forward_backward")
        # Before the checkpoint: a step that is trained again is recorded again, one that is saved never would be.
        record = {**learner.metrics(result, lr, watch.total()), **watch.laps, **counts}
        if learner.ranks.first:
            metrics.log(step, record)
        status.set(step=step, loss=record["loss"], tokens_per_second=record["perf/trained_tokens_per_second"])
        if step % LOG_INTERVAL == 0 or step == learner.max_steps:
            log.info(
                "step %d of %d: loss %.4f, %.0f tokens/s",
                step,
                learner.max_steps,
                record["loss"],
                record["perf/trained_tokens_per_second"],
            )
        watch = Stopwatch()  # saving and validating count as time of the step after them
        learner.checkpoints.finish()
        if learner.is_checkpoint_due:
            learner.begin_checkpoint()
            watch.lap("time/save_ckpt")
        if publisher is not None and step < learner.max_steps and config.is_evaluated(step):
            offer(publisher, learner, run)
            watch.lap("time/publish")
    learner.checkpoints.finish(wait=True)
    if learner.state.step == learner.max_steps:
        cuts.refuse_if_nothing_is_learned()
        if validation is not None:
            validate(validation, learner, metrics, stopped)
        status.set("saving the final model")
        learner.save_final_model(run.final_model)
        if publisher is not None:  # now that all is saved: the run may end once this has been evaluated
            publish_last(publisher, learner, run, status, stopped)
    return run.final_model


def offer(publisher: Publisher, learner: Learner, run: RunDir) -> None:
    """Publish a version for evaluation, unless it has yet to take an earlier one: training never waits for it."""
    ranks, weights = learner.ranks, run.weights
    if ranks.any(ranks.first and (weights.acknowledged() is None or bool(weights.unacknowledged()))):
        log.info("step %d is not evaluated: evaluation is not that far", learner.state.step)
        return
    publisher.publish(learner.version)
    publisher.retire(KEEP_WEIGHTS)


def publish_last(publisher: Publisher, learner: Learner, run: RunDir, status: Status, stopped: threading.Event) -> None:
    """Publish the final version, but not before the orchestrator has found the one that training began with."""
    ranks, weights = learner.ranks, run.weights
    if ranks.any(ranks.first and learner.version in weights.published()):
        return  # a finished run that was resumed has done so at its start
    known = wait_until(
        lambda: ranks.all(weights.acknowledged() is not None),
        "the first acknowledgement",
        "the orchestrator",
        status,
        stopped=lambda: ranks.any(stopped.is_set()),
    )
    if known:
        publisher.publish(learner.version, lasting=True)


def make_validation(config: SftConfig, learner: Learner, samples: list[Sample]) -> Validation | None:
    if config.validation is None:
        return None
    return Validation(
        learner.model,
        samples,
        learner.seq_len,
        interval=config.validation.interval,
        lm_head_chunk=config.lm_head_chunk,
    )


def validate(validation: Validation, learner: Learner, metrics: MetricsLog, stopped: threading.Event) -> None:
    """Record the loss of the model as it is. A run that resumes here does so again, and thus has none left out."""
    loss = validation.loss(stopped.is_set)
    if loss is None:
        return
    log.info("step %d: validation loss %.4f", learner.state.step, loss)
    if learner.ranks.first:
        metrics.log(learner.state.step, {"val/loss": loss})


def tell_changed_rows(rows: Rows, state: TrainState, status: Status) -> None:
    """The position of a run that goes on is a number: in other rows it is another place, which nobody would see."""
    before, state.data = state.data, rows.fingerprint
    if before is not None and (change := before.change_to(rows.fingerprint)):
        status.notify(f"{rows.name} has changed since the checkpoint of step {state.step}: {change}. {BY_POSITION}")


def open_conversations(
    config: SftConfig, rows: Rows | None, position: int
) -> tuple[Iterator[SftConversation], list[SftConversation]]:
    """What is trained on, from example number `position` on, and what validation holds against it, if anything.

    Without `rows` it is the demonstrations of an environment.
    """
    data, validation = config.data, config.validation
    if rows is None:
        assert data.env is not None
        training = from_environment(load_environment(data.env, data.args), config.seed, position)
    else:
        if validation is not None and validation.fraction is not None:
            kept, held_out = hold_out(rows, validation.fraction, config.seed)
            return from_rows(kept, config.seed, position), drawn(held_out, validation.max_examples)
        training = from_rows(rows, config.seed, position)
    if validation is None:
        return training, []
    if validation.env is None:
        return training, drawn(open_rows(validation), validation.max_examples)
    demonstrations = from_environment(load_environment(validation.env, validation.args), VALIDATION_SEED, 0)
    return training, list(islice(demonstrations, validation.max_examples))


def open_rows(source: SourceConfig) -> Rows:
    columns = source.columns.model_dump(exclude_none=True)
    if source.path is not None:
        return read_rows(source.path, columns)
    assert source.name is not None  # the configuration checks that one of them is given
    return load_rows(source.name, source.subset, source.split or "train", columns)
