"""Checkpoints: exact resume, whole or absent, the newest few kept."""

from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.rollout.batch import SchemaError
from headrace.rollout.packing import pack
from headrace.trainer import checkpoint
from headrace.trainer.checkpoint import MARKER, TrainState
from headrace.trainer.learner import ResumeError, starting_point
from headrace.trainer.loss import default_loss
from headrace.trainer.model import PackedModel
from headrace.trainer.optim import Optimizer, adamw
from headrace.trainer.step import TrainStep
from headrace.transport.files import write_directory
from tests.trainer.training_samples import random_samples

CPU = torch.device("cpu")


def load(directory: Path) -> tuple[PackedModel, Optimizer]:
    model = PackedModel(directory, CPU)
    return model, Optimizer(model.named_parameters(), partial(adamw, weight_decay=0.1))


def train(model: PackedModel, optimizer: Optimizer, first: int, last: int) -> None:
    step = TrainStep(model, optimizer, {"rl": default_loss}, lm_head_chunk=64)
    for number in range(first, last + 1):
        assert step.run(pack(random_samples(number, 4), 32), lr=1e-3)


def test_ten_steps_equal_five_saved_loaded_and_five_more_bit_for_bit(tiny_model: Path, tmp_path: Path):
    straight, optimizer = load(tiny_model)
    train(straight, optimizer, 1, 10)
    model, its_optimizer = load(tiny_model)
    train(model, its_optimizer, 1, 5)
    path = checkpoint.save(tmp_path, model, its_optimizer, TrainState(step=5), keep_last=1)
    resumed, resumed_optimizer = load(path / "model")
    checkpoint.load_optimizer(path, resumed_optimizer)
    train(resumed, resumed_optimizer, 6, 10)
    for name, parameter in straight.named_parameters().items():
        assert torch.equal(parameter, resumed.named_parameters()[name]), name
    moments = resumed_optimizer.state_tensors()
    for name, tensor in optimizer.state_tensors().items():
        assert torch.equal(tensor, moments[name]), name


def test_checkpoint_holds_a_loadable_model_and_the_counters(tiny_model: Path, tmp_path: Path):
    model, optimizer = load(tiny_model)
    state = TrainState(step=50, incarnation=2, tokens_trained=12345, skipped_steps=1, examples=800)
    path = checkpoint.save(tmp_path, model, optimizer, state, keep_last=2)
    assert path == tmp_path / "step-00000050"
    assert checkpoint.read_state(path) == state
    assert AutoModelForCausalLM.from_pretrained(path / "model").dtype == torch.float32
    assert AutoTokenizer.from_pretrained(path / "model").eos_token == "<|im_end|>"
    checkpoint.load_optimizer(path, optimizer)  # before its first step an optimizer has no moments


def test_only_complete_checkpoints_count_and_the_newest_are_kept(tiny_model: Path, tmp_path: Path):
    model, optimizer = load(tiny_model)
    assert checkpoint.latest(tmp_path / "none") is None
    for step in (5, 10, 100):
        checkpoint.save(tmp_path, model, optimizer, TrainState(step=step), keep_last=2)
    assert [path.name for path in checkpoint.complete(tmp_path)] == ["step-00000010", "step-00000100"]
    (tmp_path / "step-00000100" / MARKER).unlink()
    latest = checkpoint.latest(tmp_path)
    assert latest is not None
    assert latest.name == "step-00000010"
    with pytest.raises(FileNotFoundError, match="not a complete one"):
        checkpoint.read_state(tmp_path / "step-00000100")


def test_what_a_killed_trainer_left_half_written_is_ignored_and_removed(tiny_model: Path, tmp_path: Path):
    leftover = tmp_path / ".step-00000005.99999.tmp"
    leftover.mkdir()
    (leftover / MARKER).write_text("{}")
    assert checkpoint.latest(tmp_path) is None
    model, optimizer = load(tiny_model)
    checkpoint.save(tmp_path, model, optimizer, TrainState(step=5), keep_last=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


def test_a_newer_schema_is_refused(tiny_model: Path, tmp_path: Path):
    model, optimizer = load(tiny_model)
    path = checkpoint.save(tmp_path, model, optimizer, TrainState(step=1), keep_last=1)
    (path / "state.json").write_bytes(msgspec.json.encode(TrainState(step=1, schema=99)))
    with pytest.raises(SchemaError, match="schema 99"):
        checkpoint.read_state(path)


def test_starting_point_follows_what_was_asked(tiny_model: Path, tmp_path: Path):
    model, optimizer = load(tiny_model)
    assert starting_point(tmp_path, None) is None
    assert starting_point(tmp_path, "latest") is None
    for step in (1, 2):
        checkpoint.save(tmp_path, model, optimizer, TrainState(step=step), keep_last=2)
    older, newest = checkpoint.complete(tmp_path)
    assert starting_point(tmp_path, "latest") == newest
    assert starting_point(tmp_path, str(newest)) == newest
    assert starting_point(tmp_path / "a fork", str(older)) == older
    with pytest.raises(ResumeError, match="already has checkpoints, the newest step-00000002"):
        starting_point(tmp_path, None)
    with pytest.raises(ResumeError, match="not the newest checkpoint of its run"):
        starting_point(tmp_path, str(older))
    with pytest.raises(FileNotFoundError, match="not a checkpoint"):
        starting_point(tmp_path, str(tmp_path / "nothing"))


def test_a_directory_that_fails_to_be_written_leaves_the_old_one(tmp_path: Path):
    final = tmp_path / "model"
    write_directory(final, lambda draft: (draft / "a").write_text("old") and None)

    def fail(draft: Path) -> None:
        (draft / "a").write_text("new")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_directory(final, fail)
    assert (final / "a").read_text() == "old"
    write_directory(final, lambda draft: (draft / "b").write_text("new") and None)
    assert [path.name for path in final.iterdir()] == ["b"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
