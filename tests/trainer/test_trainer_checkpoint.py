"""Checkpoints: exact resume, whole or absent, the newest few kept, written beside training."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import gguf
import msgspec
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.cli.main import main
from headrace.config.trainer import LoraConfig, TrainingConfig
from headrace.errors import BadInput
from headrace.rollout.schema import SchemaError
from headrace.trainer import checkpoint, warmup
from headrace.trainer.checkpoint import Checkpoints, ResumeError, TrainState, starting_point
from headrace.trainer.learner import Learner
from headrace.trainer.memory_plan import MemoryPlan
from headrace.trainer.ranks import Ranks
from headrace.trainer.warmup import warm_up, warmup_tokens
from headrace.transport.files import MARKER, write_directory
from tests.refusals import refused
from tests.trainer.losses import default_loss
from tests.trainer.training_samples import random_samples

MakeLearner = Callable[..., Learner]


@pytest.fixture
def make_learner(tiny_model: Path, tmp_path: Path) -> MakeLearner:
    """A learner that starts from the newest checkpoint of `tmp_path`, if there is one."""

    def make(resume: str | None = "latest", directory: Path = tmp_path, **ckpt: int) -> Learner:
        config = TrainingConfig(
            model={"name": str(tiny_model)},
            output_dir=directory,
            max_steps=10,
            seq_len=32,
            optim={"lr": 1e-3, "weight_decay": 0.1},
            ckpt=ckpt,
        )
        return Learner(config, {"rl": default_loss}, directory, resume)

    return make


def learn(learner: Learner, first: int, last: int) -> None:
    for number in range(first, last + 1):
        assert learner.learn(random_samples(number, 4), stopped=lambda: False)


def save(directory: Path, *steps: int, keep_last: int = 2, permanent_interval: int | None = None) -> None:
    """Checkpoints of a model that has one small tensor."""
    checkpoints = Checkpoints(directory, Ranks(), keep_last=keep_last, permanent_interval=permanent_interval)
    for step in steps:
        checkpoints.begin({"model.a": torch.full((2,), float(step))}, lambda path: path.mkdir(), TrainState(step=step))
    checkpoints.finish(wait=True)


def test_ten_steps_equal_five_saved_loaded_and_five_more_bit_for_bit(make_learner: MakeLearner, tmp_path: Path):
    straight = make_learner(directory=tmp_path / "straight")
    learn(straight, 1, 10)
    first = make_learner()
    learn(first, 1, 5)
    first.begin_checkpoint()
    first.checkpoints.finish(wait=True)
    resumed = make_learner()
    assert resumed.state.step == 5
    learn(resumed, 6, 10)
    for name, parameter in straight.model.tensors().items():
        assert torch.equal(parameter, resumed.model.tensors()[name]), name
    moments = resumed.optimizer.state_tensors()
    for name, tensor in straight.optimizer.state_tensors().items():
        assert torch.equal(tensor, moments[name]), name


def test_the_size_of_a_checkpoint_is_known_before_the_first_step(make_learner: MakeLearner):
    learner = make_learner()
    planned = learner.plan_checkpoints()
    learn(learner, 1, 1)
    state = learner.optimizer.state_tensors()
    saved = [
        *learner.model.trained_tensors().values(),
        *(value for name, value in state.items() if not name.endswith(".step")),
    ]
    assert planned == sum(tensor.nbytes for tensor in saved)


def test_a_damaged_checkpoint_is_named_with_what_to_do(make_learner: MakeLearner):
    learner = make_learner()
    learn(learner, 1, 1)
    learner.begin_checkpoint()
    learner.checkpoints.finish(wait=True)
    (tensors,) = learner.checkpoints.directory.glob("step-*/tensors/*.safetensors")
    os.truncate(tensors, 1000)
    with pytest.raises(BadInput, match="step-00000001"):
        make_learner()


def test_a_learner_after_warmup_learns_the_same(
    make_learner: MakeLearner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(warmup, "MAX_WARMUP_TOKENS", 300)
    plain, warmed_up = make_learner(directory=tmp_path / "plain"), make_learner(directory=tmp_path / "warmed_up")
    warm_up(warmed_up)
    for learner in (plain, warmed_up):
        learn(learner, 1, 2)
    for name, parameter in plain.model.tensors().items():
        assert torch.equal(parameter, warmed_up.model.tensors()[name]), name


@pytest.mark.parametrize(("bytes", "tokens"), [(0, 4096), (16384 << 18, 4096), (16384 << 21, 2048)])
def test_rows_of_a_warmup_leave_memory_to_the_engine(bytes: int, tokens: int):
    assert warmup_tokens(MemoryPlan((), keeps_logits=False, row_tokens=16384, bytes=bytes)) == tokens


def test_a_warmup_that_runs_out_of_memory_is_given_up(make_learner: MakeLearner, monkeypatch: pytest.MonkeyPatch):
    learner = make_learner()

    def fail(_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(learner.step, "warm_up", fail)
    warm_up(learner)
    assert all(parameter.grad is None for parameter in learner.model.named_parameters().values())


def test_steps_after_the_beginning_of_a_checkpoint_do_not_change_it(make_learner: MakeLearner):
    learner = make_learner()
    learn(learner, 1, 1)
    expected = {name: tensor.clone() for name, tensor in learner.model.tensors().items()}
    moments = {name: tensor.clone() for name, tensor in learner.optimizer.state_tensors().items()}
    learner.begin_checkpoint()
    with torch.no_grad():
        for tensor in (*learner.model.tensors().values(), *learner.optimizer.state_tensors().values()):
            tensor.fill_(-1.0)
    learner.checkpoints.finish(wait=True)
    resumed = make_learner()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in resumed.model.tensors().items())
    assert all(torch.equal(tensor, moments[name]) for name, tensor in resumed.optimizer.state_tensors().items())


def test_checkpoint_holds_the_counters_and_what_the_model_came_with(make_learner: MakeLearner, tmp_path: Path):
    learner = make_learner()
    learner.state = TrainState(step=50, incarnation=2, tokens_trained=12345, skipped_steps=1, examples=800)
    learner.begin_checkpoint()  # before its first step an optimizer has no moments
    learner.checkpoints.finish(wait=True)
    assert checkpoint.read_state(tmp_path / "step-00000050") == learner.state
    assert make_learner().state == learner.state
    assert AutoTokenizer.from_pretrained(tmp_path / "step-00000050" / "model").eos_token == "<|im_end|>"


def test_a_checkpoint_of_another_optimizer_is_refused_by_name(
    make_learner: MakeLearner, tiny_model: Path, tmp_path: Path
):
    learner = make_learner()
    learn(learner, 1, 1)
    learner.begin_checkpoint()
    learner.checkpoints.finish(wait=True)
    config = learner.config.model_copy(update={"optim": TrainingConfig(optim={"type": "sgd"}).optim})
    with refused(ResumeError, key="--resume"):
        Learner(config, {"rl": default_loss}, tmp_path, "latest")


@pytest.mark.parametrize(("save_merged", "written"), [(True, {"model", "adapter"}), (False, {"adapter"})])
def test_the_final_model_of_an_adapter_is_merged_unless_configured(
    save_merged: bool, written: set[str], make_learner: MakeLearner, tmp_path: Path
):
    config = make_learner().config
    config = config.model_copy(update={"lora": LoraConfig(r=2, save_merged=save_merged)})
    learner = Learner(config, {"rl": default_loss}, tmp_path, None)
    learner.save_final_model(tmp_path / "final" / "model")
    assert {path.name for path in (tmp_path / "final").iterdir()} == written


def test_only_complete_checkpoints_count_and_the_newest_are_kept(tmp_path: Path):
    assert checkpoint.find_latest(tmp_path / "none") is None
    save(tmp_path, 5, 10, 100)
    assert [path.name for path in checkpoint.list_complete(tmp_path)] == ["step-00000010", "step-00000100"]
    (tmp_path / "step-00000100" / MARKER).unlink()
    latest = checkpoint.find_latest(tmp_path)
    assert latest is not None
    assert latest.name == "step-00000010"
    with pytest.raises(FileNotFoundError, match=r"COMPLETE\.json"):
        checkpoint.read_state(tmp_path / "step-00000100")


def test_a_checkpoint_that_falls_on_a_skipped_update_waits_for_the_next_one_unless_it_is_permanent(
    make_learner: MakeLearner,
):
    learner = make_learner(interval=2, permanent_interval=4)
    due = []
    for step in range(1, 5):
        samples = random_samples(step, 4)
        if step in (2, 4):
            samples[0].set_stream("advantages", [float("nan")] * len(samples[0]))
        learner.learn(samples, stopped=lambda: False)
        due.append(learner.is_checkpoint_due)
    assert due == [False, False, True, True]
    assert learner.state.skipped_steps == 2


def test_permanent_checkpoints_outlive_their_retirement(tmp_path: Path):
    save(tmp_path, 2, 4, 5, 6, keep_last=1, permanent_interval=4)
    assert [path.name for path in checkpoint.list_complete(tmp_path)] == ["step-00000006"]
    (kept,) = checkpoint.list_complete(tmp_path / "permanent")
    assert kept.name == "step-00000004"
    tensors = {"model.a": torch.zeros(2)}
    checkpoint.load_tensors(kept, tensors)
    assert tensors["model.a"].tolist() == [4.0, 4.0]


def test_what_a_killed_trainer_left_half_written_is_ignored_and_removed(tmp_path: Path):
    leftover = tmp_path / ".step-00000005.99999.tmp"
    leftover.mkdir()
    (leftover / MARKER).write_text("{}")
    assert checkpoint.find_latest(tmp_path) is None
    save(tmp_path, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


def test_a_newer_schema_is_refused(tmp_path: Path):
    save(tmp_path, 1)
    path = tmp_path / "step-00000001"
    (path / "state.json").write_bytes(msgspec.json.encode(TrainState(step=1, schema=99)))
    (path / MARKER).write_text('{"step":1,"schema":1}')  # without digests
    with pytest.raises(SchemaError, match=r"\b99\b"):
        checkpoint.read_state(path)


def test_starting_point_follows_what_was_asked(tmp_path: Path):
    assert starting_point(tmp_path, None) is None
    assert starting_point(tmp_path, "latest") is None
    save(tmp_path, 1, 2)
    older, newest = checkpoint.list_complete(tmp_path)
    assert starting_point(tmp_path, "latest") == newest
    assert starting_point(tmp_path, str(newest)) == newest
    assert starting_point(tmp_path / "a fork", str(older)) == older
    with refused(ResumeError, key="output_dir"):
        starting_point(tmp_path, None)
    with refused(ResumeError, key="--resume", value=older):
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


def test_an_exported_checkpoint_gives_transformers_the_logits_of_the_model_that_was_trained(
    make_learner: MakeLearner, tmp_path: Path
):
    learner = make_learner()
    learn(learner, 1, 2)
    learner.begin_checkpoint()
    learner.checkpoints.finish(wait=True)
    assert main(["export", str(tmp_path / "step-00000002"), str(tmp_path / "exported")]) == 0
    assert main(["export", str(tmp_path / "step-00000002"), str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    learner.model.module.set_attn_implementation("sdpa")
    expected = learner.model.module(input_ids=ids).logits
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert torch.equal(exported(input_ids=ids).logits, expected)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16


def test_the_converter_to_gguf_has_a_name_for_every_exported_tensor(make_learner: MakeLearner, tmp_path: Path):
    learner = make_learner()
    learner.begin_checkpoint()
    learner.checkpoints.finish(wait=True)
    assert main(["export", str(tmp_path / "step-00000000"), str(tmp_path / "exported")]) == 0
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    [architecture] = [kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == config["model_type"]]
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    tensors = load_file(tmp_path / "exported" / "model.safetensors")
    unknown = [name for name in tensors if names.get_name(name, (".weight", ".bias")) is None]
    assert config["architectures"]  # by which the converter chooses how tensors are changed
    assert unknown == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["."], r"RUN\|CHECKPOINT = "),
        (["run", "--step", "4"], r"--step = 4: .*\(it has: 1, 2\)"),
    ],
)
def test_an_export_of_what_is_not_there_says_what_is(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    save(tmp_path / "run" / "checkpoints", 1, 2)
    source, *options = arguments
    assert main(["export", str(tmp_path / source), str(tmp_path / "out"), *options]) == 2
    assert re.search(says, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()
