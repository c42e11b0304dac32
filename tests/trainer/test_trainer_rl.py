"""The trainer of an RL run, with real files on both sides."""

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from headrace.cli.main import main
from headrace.config.sft import SftConfig
from headrace.config.trainer import TrainerConfig, WeightsConfig
from headrace.errors import Failure, Repaired
from headrace.inference.memory import ColocatedEngines
from headrace.launch.saved_config import save
from headrace.observe.metrics import read_metrics
from headrace.observe.status import Status
from headrace.rollout.batch import Batch, BatchSample
from headrace.rollout.version import Version
from headrace.trainer import checkpoint, rl
from headrace.trainer.checkpoint import ResumeError
from headrace.trainer.losses.custom import CustomLossConfig
from headrace.trainer.losses.shipped import DefaultLossConfig
from headrace.transport.epochs import hold_epoch
from headrace.transport.run_dir import RunDir
from headrace.transport.weights import checksum, read_marker
from headrace.transport.weights_link import is_linked
from tests.inference.host_driver import HostDriver, use
from tests.observe.metrics_page import undocumented
from tests.trainer.training_samples import random_samples


@pytest.fixture
def status(tmp_path: Path) -> Iterator[Status]:
    status = Status(tmp_path / "status", "trainer")
    yield status
    status.close("done")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


def settings(run: RunDir, model: Path, max_steps: int, interval: int = 2) -> TrainerConfig:
    return TrainerConfig.model_validate(
        {
            "model": {"name": str(model)},
            "output_dir": run.root,
            "max_steps": max_steps,
            "seq_len": 32,
            "optim": {"lr": 1e-3},
            "ckpt": {"interval": interval, "keep_last": 2},
        }
    )


def ship(run: RunDir, *steps: int) -> None:
    for step in steps:
        samples = [BatchSample(sample, f"env{i % 2}", i) for i, sample in enumerate(random_samples(step, 6))]
        for entry in samples:
            entry.sample.versions[entry.sample.mask] = max(0, step - 2)
        announce(run, Batch(step, 0, samples))


def announce(run: RunDir, batch: Batch) -> None:
    run.batches.prepare(batch)
    run.batches.announce(batch.step)


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def test_trains_every_batch_publishes_each_version_and_leaves_a_model(run: RunDir, tiny_model: Path, status: Status):
    ship(run, 1, 2, 3)
    run.weights.directory.mkdir(parents=True)
    rl.RlTrainer(settings(run, tiny_model, max_steps=3), stopped=threading.Event(), status=status).run()
    assert run.weights.published() == [Version(0, step) for step in (1, 2, 3)]  # none acknowledged: none deletedd
    newest = run.weights.path(Version(0, 3))
    assert read_marker(newest).checksum == checksum(newest)
    AutoModelForCausalLM.from_pretrained(newest)
    final, published = tensors(run.final_model), tensors(newest)
    assert all(torch.equal(final[name], published[name]) for name in final)
    assert not torch.equal(final["model.norm.weight"], tensors(tiny_model)["model.norm.weight"])
    assert [path.name for path in checkpoint.list_complete(run.checkpoints)] == [
        "step-00000002",
        "step-00000003",
    ]
    assert run.batches.steps() == []  # covered by the checkpoint of step 3


def test_a_damaged_batch_is_set_aside_before_it_is_trained(run: RunDir, tiny_model: Path, status: Status):
    ship(run, 1, 2)
    content = bytearray(run.batches.path(2).read_bytes())
    content[-1] ^= 1
    run.batches.path(2).write_bytes(content)
    with pytest.raises(Repaired, match="step-00000002"):
        rl.RlTrainer(settings(run, tiny_model, 2, interval=1), stopped=threading.Event(), status=status).run()
    assert run.latest_checkpoint_step() == 1
    assert run.batches.steps() == []
    assert (run.batches.directory / "damaged-step-00000002.safetensors").read_bytes() == content


def test_a_damaged_checkpoint_makes_the_trainer_continue_from_the_one_before(
    run: RunDir, tiny_model: Path, status: Status
):
    ship(run, 1, 2)
    config = settings(run, tiny_model, 3, interval=1)
    trainer = rl.RlTrainer(config, stopped=threading.Event(), status=status)
    for step in (1, 2):
        trainer._train_step(step, run.batches.read(step))
        trainer._save(step)
    trainer._finish_checkpoint(wait=True)
    (tensors,) = (run.checkpoints / "step-00000002").glob("tensors/*.safetensors")
    content = bytearray(tensors.read_bytes())
    content[len(content) // 2] ^= 1
    tensors.write_bytes(content)
    with pytest.raises(Repaired, match="step-00000001"):
        rl.RlTrainer(config, resume="latest", stopped=threading.Event(), status=status)
    resumed = rl.RlTrainer(config, resume="latest", stopped=threading.Event(), status=status)
    assert resumed.learner.state.step == 1


def test_metrics_of_every_step_are_recorded(run: RunDir, tiny_model: Path, status: Status):
    ship(run, 1, 2)
    rl.RlTrainer(settings(run, tiny_model, max_steps=2), stopped=threading.Event(), status=status).run()
    records = list(read_metrics(run.metrics))
    assert [(record["process"], record["step"]) for record in records] == [("trainer", 1), ("trainer", 2)]
    wanted = {
        *("loss", "entropy", "mismatch_kl", "is_masked", "loss/env0", "entropy/env1"),
        *("optim/lr", "optim/grad_norm", "optim/skipped", "progress/tokens_trained", "perf/trained_tokens_per_second"),
        *("time/step", "time/wait_for_batch", "time/forward_backward", "time/publish"),
    }
    assert wanted <= records[0].keys()
    assert undocumented(records) == []
    tokens = [sum(len(sample) for sample in random_samples(step, 6)) for step in (1, 2)]
    assert [record["progress/tokens_trained"] for record in records] == [tokens[0], sum(tokens)]
    assert status.current.gauges["step"] == 2


def test_restart_repeats_lost_steps_under_a_new_incarnation(run: RunDir, tiny_model: Path, status: Status):
    ship(run, 1, 2, 3)
    rl.RlTrainer(settings(run, tiny_model, max_steps=3, interval=2), stopped=threading.Event(), status=status).run()
    straight = tensors(run.final_model)
    # As if it had been killed after publishing step 3 and before its checkpoint.
    shutil.rmtree(run.checkpoints / "step-00000003")
    ship(run, 2, 3)
    rl.RlTrainer(
        settings(run, tiny_model, max_steps=3), resume="latest", stopped=threading.Event(), status=status
    ).run()
    assert run.weights.published()[-2:] == [Version(1, 2), Version(1, 3)]
    resumed = tensors(run.final_model)
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)
    assert checkpoint.read_state(run.checkpoints / "step-00000003").incarnation == 1
    assert run.batches.steps() == []


def test_restart_before_the_first_checkpoint_starts_over_under_a_new_incarnation(
    run: RunDir, tiny_model: Path, status: Status
):
    stopped = threading.Event()
    ship(run, 1)
    trainer = rl.RlTrainer(settings(run, tiny_model, max_steps=5, interval=5), stopped=stopped, status=status)
    thread = threading.Thread(target=trainer.run)
    thread.start()
    while Version(0, 1) not in run.weights.published():
        assert thread.is_alive()
        time.sleep(0.01)  # a busy loop would keep the trainer's thread from the interpreter
    stopped.set()
    thread.join(timeout=20)
    assert not thread.is_alive()
    assert run.batches.steps() == [1]  # not covered by a checkpoint: kept
    stopped.set()
    rl.RlTrainer(settings(run, tiny_model, max_steps=5), resume="latest", stopped=stopped, status=status).run()
    assert run.weights.latest() == Version(1, 0)


def test_a_stop_with_a_checkpoint_finishes_the_step_and_a_resume_repeats_nothing(
    run: RunDir, tiny_model: Path, status: Status
):
    never, save_and_stop = threading.Event(), threading.Event()
    ship(run, 1, 2)
    config = settings(run, tiny_model, max_steps=3, interval=100)
    trainer = rl.RlTrainer(config, stopped=never, save_and_stop=save_and_stop, status=status)
    learn = trainer.learner.learn

    def request_during_the_first_step(*arguments: Any, **options: Any) -> Any:
        save_and_stop.set()
        return learn(*arguments, **options)

    trainer.learner.learn = request_during_the_first_step  # type: ignore[method-assign]
    trainer.run()
    assert run.latest_checkpoint_step() == 1
    assert run.batches.steps() == [2]
    ship(run, 3)
    resumed = rl.RlTrainer(config, resume="latest", stopped=never, save_and_stop=save_and_stop, status=status)
    saved = (run.checkpoints / "step-00000001").stat().st_mtime_ns
    resumed.run()  # is asked to stop before its first step
    assert (run.checkpoints / "step-00000001").stat().st_mtime_ns == saved
    rl.RlTrainer(config, resume="latest", stopped=never, status=status).run()
    assert [record["step"] for record in read_metrics(run.metrics) if "loss" in record] == [1, 2, 3]


def test_stop_while_training_leaves_nothing_half_done(run: RunDir, tiny_model: Path, status: Status):
    ship(run, 1)
    stopped = threading.Event()
    stopped.set()  # seen before the first micro-batch
    rl.RlTrainer(settings(run, tiny_model, max_steps=1), stopped=stopped, status=status).run()
    assert run.weights.published() == []
    assert not run.final_model.exists()
    assert run.batches.steps() == [1]


def test_acknowledged_versions_are_retired(run: RunDir, tiny_model: Path, status: Status):
    ship(run, 1, 2, 3, 4)
    run.weights.acknowledge(Version(0, 9))
    rl.RlTrainer(settings(run, tiny_model, max_steps=4), stopped=threading.Event(), status=status).run()
    assert run.weights.published() == [Version(0, 3), Version(0, 4)]


def test_a_used_directory_is_not_started_over_by_accident(run: RunDir, tiny_model: Path, status: Status):
    ship(run, 1)
    rl.RlTrainer(settings(run, tiny_model, max_steps=1), stopped=threading.Event(), status=status).run()
    with pytest.raises(ResumeError, match="checkpoints"):
        rl.RlTrainer(settings(run, tiny_model, max_steps=1), stopped=threading.Event(), status=status).run()
    shutil.rmtree(run.checkpoints)
    with pytest.raises(ResumeError, match="weights"):
        rl.RlTrainer(settings(run, tiny_model, max_steps=1), stopped=threading.Event(), status=status).run()


def ship_broken(run: RunDir, *steps: int) -> None:
    """Batches with an advantage that is no number."""
    ship(run, *steps)
    for step in steps:
        batch = run.batches.read(step)
        advantages = batch.samples[0].sample.streams["advantages"].copy()
        advantages[-1] = float("nan")
        batch.samples[0].sample.streams["advantages"] = advantages
        announce(run, batch)


def test_a_broken_batch_is_skipped_by_the_optimizer_and_counted(run: RunDir, tiny_model: Path, status: Status):
    ship_broken(run, 1)
    rl.RlTrainer(settings(run, tiny_model, max_steps=1), stopped=threading.Event(), status=status).run()
    final, initial = tensors(run.final_model), tensors(tiny_model)
    assert all(torch.equal(final[name], initial[name]) for name in initial)
    assert [record["optim/skipped"] for record in read_metrics(run.metrics)] == [1]


def test_updates_that_are_all_skipped_end_the_run_which_is_resumed_from_before_them(
    run: RunDir, tiny_model: Path, status: Status
):
    config = settings(run, tiny_model, max_steps=3, interval=1).model_copy(update={"max_skipped_updates": 2})
    ship(run, 1)
    ship_broken(run, 2, 3)
    seen = r"\b2\b.*\b3\b.*\bnan\b.*\bnan\b.*\b1\b.*optim\.lr"
    with pytest.raises(Failure, match=seen):
        rl.RlTrainer(config, stopped=threading.Event(), status=status).run()
    assert [path.name for path in checkpoint.list_complete(run.checkpoints)] == ["step-00000001"]
    assert run.batches.steps()[-2:] == [2, 3]


def test_a_loss_that_is_0_whatever_the_advantages_is_reported(run: RunDir, tiny_model: Path, status: Status):
    own = CustomLossConfig(import_path="tests.trainer.custom_losses:leaves_out_everything")
    ship(run, 1)
    config = settings(run, tiny_model, max_steps=1)
    rl.RlTrainer(config.model_copy(update={"loss": own}), stopped=threading.Event(), status=status).run()
    (notice,) = status.current.notices
    assert "the gradient of step 1 is 0 although its samples have advantages" in notice
    assert own.import_path in notice


def test_a_gradient_of_0_of_samples_without_advantages_is_right(status: Status):
    samples = random_samples(1, 2)
    for sample in samples:
        sample.set_stream("advantages", [0.0] * len(sample))
    rl.notify_zero_gradient(1, 0.0, samples, DefaultLossConfig(), status)
    rl.notify_zero_gradient(1, 0.5, random_samples(1, 2), DefaultLossConfig(), status)
    assert not status.current.notices


def test_where_engines_share_the_gpu_memory_for_them_is_taken_before_the_first_step(
    run: RunDir, tiny_model: Path, status: Status, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    driver = HostDriver(tmp_path / "memory")
    use(driver, replace=monkeypatch.setattr)
    config = settings(run, tiny_model, max_steps=1)
    config = config.model_copy(update={"weights": WeightsConfig(transport="link")})
    stopped = threading.Event()
    stopped.set()
    rl.RlTrainer(config, stopped=stopped, status=status).run()
    assert not driver.open
    engines = ColocatedEngines(alternates=True, trainer_bytes_per_parameter=14)
    rl.RlTrainer(config, stopped=stopped, status=status, engines=engines).run()
    assert len(driver.open) == 1


def test_a_second_trainer_in_a_run_is_refused(run: RunDir, tiny_model: Path, capsys: pytest.CaptureFixture[str]):
    config = {"output_dir": run.root, "model": {"name": str(tiny_model)}, "max_steps": 1, "seq_len": 64}
    save(SftConfig.model_validate({**config, "data": {"env": "reverse-text"}}), run)
    with hold_epoch(run.root, "trainer"):
        assert main(["trainer", str(run.root)]) == 2
    assert f"RUN = {run.root}: another trainer" in capsys.readouterr().err


def test_the_last_version_can_be_had_when_the_trainer_is_gone_also_after_a_resume(
    run: RunDir, tiny_model: Path, status: Status
):
    config = settings(run, tiny_model, max_steps=2)
    config = config.model_copy(update={"weights": WeightsConfig(transport="link")})
    ship(run, 1, 2)
    for resume in (None, "latest"):
        rl.RlTrainer(config, resume=resume, stopped=threading.Event(), status=status).run()
    linked = {str(version): is_linked(run.weights.path(version)) for version in run.weights.published()}
    assert linked == {"0-1": True, "0-2": False, "1-2": False}
