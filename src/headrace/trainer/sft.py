"""Supervised fine-tuning: the same step, optimizer and checkpoints as an RL run, on conversations."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from headrace.config.sft import SftConfig, SftDataConfig
from headrace.environments.registry import load_environment
from headrace.observe.metrics import MetricsLog
from headrace.observe.status import Status
from headrace.text.renderer import make_renderer
from headrace.text.tokenizer import Tokenizer
from headrace.trainer.learner import Learner, starting_point
from headrace.trainer.loss import ce_loss
from headrace.trainer.sft_data import Conversation, from_environment, from_rows, read_rows, render
from headrace.trainer.stopwatch import Stopwatch
from headrace.transport.run_dir import RunDir

log = logging.getLogger(__name__)

LOG_INTERVAL = 10
"""Steps between log lines."""


def train(config: SftConfig, *, resume: str | None = None, stopped: threading.Event, status: Status) -> Path:
    """Train to `max_steps`, or until `stopped`. Returns the path of the final model, which is written last."""
    if config.output_dir is None:
        raise ValueError("output_dir must be set to train")
    run = RunDir(config.output_dir)
    status.set("loading model")
    learner = Learner(config, {"ce": ce_loss}, starting_point(run.checkpoints, resume))
    directory, options = learner.model.directory, config.renderer
    renderer = make_renderer(
        directory, Tokenizer(directory), options.name, options.enable_thinking, options.thinking_retention
    )
    conversations = open_conversations(config.data, config.seed, learner.state.examples)
    metrics = MetricsLog(run.metrics, "sft")
    status.set("training", step=learner.state.step, max_steps=learner.max_steps)
    watch = Stopwatch()
    while (step := learner.state.step + 1) <= learner.max_steps:
        samples = [render(conversation, renderer) for conversation in islice(conversations, config.data.batch_size)]
        watch.lap("time/render")
        lr = learner.learning_rate
        result = learner.learn(samples, stopped=stopped.is_set)
        if result is None:
            return run.final_model
        learner.state.examples += len(samples)
        watch.lap("time/forward_backward")
        # Before the checkpoint: a step that is trained again is recorded again, one that is saved never would be.
        record = {**learner.metrics(result, lr, watch.total()), **watch.laps}
        record["data/truncated"] = sum(len(sample) > learner.seq_len for sample in samples)
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
        watch = Stopwatch()  # saving counts as time of the step after it
        if learner.is_checkpoint_due:
            learner.save_checkpoint(run.checkpoints)
            watch.lap("time/save_ckpt")
    status.set("saving the final model")
    learner.save_final_model(run.final_model)
    return run.final_model


def open_conversations(config: SftDataConfig, seed: int, position: int) -> Iterator[Conversation]:
    """The data from example number `position` on."""
    if config.env is not None:
        return from_environment(load_environment(config.env, config.args), seed, position)
    assert config.path is not None  # the configuration checks that one of them is given
    return from_rows(read_rows(config.path), seed, position)
