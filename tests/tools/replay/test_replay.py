"""Steps of a trainer on real files, replayed from its checkpoints and rollouts."""

import math
import shutil
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.cli.main import main
from headrace.errors import BadInput
from headrace.launch.saved_config import pin, read_rl_run, save
from headrace.observe.status import Status
from headrace.rollout.batch import Batch, BatchSample, batch_of
from headrace.rollout.schema import DamagedFile
from headrace.rollout.types import Sample
from headrace.runfile.reading import put, validate
from headrace.runfile.run import RunConfig
from headrace.tools.replay.replay import replay_step
from headrace.tools.replay.source import PARTS, open_run, unpack
from headrace.transport.rollout_files import RolloutFiles, write_rollouts
from headrace.transport.run_dir import RunDir
from tests.end_to_end.test_recorded_runs import copy_recorded_runs
from tests.refusals import refused
from tests.trainer.training_samples import random_samples

STEPS = 4


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recorded runs, of which `rl` trained a tiny model on reverse-text."""
    return copy_recorded_runs(tmp_path_factory.mktemp("recorded") / "runs")


def configured(run: RunDir, recorded: Path, **settings: Any) -> RunConfig:
    """Write the configuration of the recorded run with other settings of the trainer."""
    config = read_rl_run(recorded / "rl")
    tree = config.model_dump(mode="json", exclude_none=True)
    settings = {"ckpt.interval": 2, "ckpt.keep_last": 2, "token_export.interval": 1, **settings}
    for key, value in settings.items():
        put(tree, ["trainer", *key.split(".")], value)
    config = pin(validate(RunConfig, tree, "test")[0], run.root, str(recorded / "micro"))
    save(config, run)
    return config


def train(run: RunDir, config: RunConfig, batches: list[Batch]) -> None:
    """Train on batches as a run does; those that checkpoints cover are deleted."""
    from headrace.trainer.rl import RlTrainer

    for batch in batches:
        ship(run, batch)
    run.weights.directory.mkdir(parents=True)
    status = Status(run.status, "trainer")
    trainer = config.trainer.model_copy(update={"max_steps": len(batches)})
    RlTrainer(trainer, stopped=threading.Event(), status=status).run()
    status.close("finished")


def ship(run: RunDir, batch: Batch) -> None:
    run.batches.prepare(batch)
    run.batches.announce(batch.step)


@pytest.fixture(scope="module")
def reverse_text(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run on the rollouts of the recorded one, with checkpoints of steps 2 and 4, and no batches."""
    run = RunDir(tmp_path_factory.mktemp("trained") / "run")
    config = configured(run, recorded)
    saved = {step: RolloutFiles(recorded / "rl" / "rollouts").read(step) for step in range(1, STEPS + 1)}
    kept = {step: [each.rollout for each in rollouts if not each.drop_reason] for step, rollouts in saved.items()}
    for step, rollouts in kept.items():
        write_rollouts(run.rollouts, step, rollouts, [])
    train(run, config, [batch_of(step, 0, rollouts) for step, rollouts in kept.items()])
    assert run.batches.steps() == []
    return run


@pytest.fixture
def copied(reverse_text: RunDir, tmp_path: Path) -> RunDir:
    shutil.copytree(reverse_text.root, tmp_path / "copied")
    return RunDir(tmp_path / "copied")


@pytest.mark.parametrize(("step", "start"), [(2, "micro"), (3, "step-00000002"), (4, "step-00000002")])
def test_a_step_is_replayed_to_the_last_bit_from_the_checkpoint_before_it(reverse_text: RunDir, step: int, start: str):
    report = replay_step(reverse_text.root, step, tolerance=0)
    assert report.verdict == "bit-equal"
    assert Path(report.start).name == start
    assert {"loss", "entropy", "optim/grad_norm"} <= {pair.name for pair in report.metrics}
    assert {column.name for column in report.tokens} == {"trainer_logprobs", "entropy", "gradient"}
    trained = report.anatomy.components[0].tokens
    assert trained > 100 and all(column.tokens == trained for column in report.tokens)
    assert sum(share.share for share in report.anatomy.rollouts) > 0.8


def test_a_bundle_is_one_step_for_a_machine_that_has_neither_the_run_nor_its_model(copied: RunDir, tmp_path: Path):
    bundle = tmp_path / "step.bundle"
    assert replay_step(copied.root, 4, bundle=bundle).verdict == "bit-equal"
    shutil.rmtree(copied.root)
    report = replay_step(bundle, None, tolerance=0)
    assert (report.verdict, report.step, report.first, report.tokens_from) == ("bit-equal", 4, 4, "run")
    assert [path.name for path in tmp_path.iterdir()] == ["step.bundle"]  # nothing is left behind


def test_a_bundle_from_elsewhere_brings_no_code(copied: RunDir, tmp_path: Path):
    bundle, folder = tmp_path / "step.bundle", tmp_path / "unpacked"
    tree = copied.config.read_text().replace("trust_remote_code = false", "trust_remote_code = true")
    copied.config.write_text("".join(line for line in tree.splitlines(True) if not line.startswith("# xxh3")))
    replay_step(copied.root, 3, bundle=bundle)
    with tarfile.open(bundle, "a") as tar:
        for name in ("code_folders.json", "../outside"):
            tar.addfile(tarfile.TarInfo(name))
    unpack(bundle, folder)
    assert not read_rl_run(folder).trainer.model.trust_remote_code
    assert {path.name for path in folder.iterdir()} <= PARTS and not (tmp_path / "outside").exists()


def penalized(number: int) -> list[Sample]:
    samples = random_samples(number, 6)
    for sample in samples:
        sample.set_stream("k3_weights", np.where(sample.mask, 0.1, 0.0))
    return samples


def with_latents(number: int) -> list[Sample]:
    samples, rng = random_samples(number, 6), np.random.default_rng(number)
    for sample in samples[:4]:
        sample.set_stream("latents", rng.normal(size=(len(sample), 16)) * sample.mask[:, None])
    return samples


@pytest.mark.parametrize(
    ("settings", "samples"),
    [
        pytest.param({"reference": {}}, penalized, id="reference of the start"),
        pytest.param({"reference": {"every": 2}, "lora": {"r": 2}}, penalized, id="adapter, reference that follows"),
        pytest.param({"model.latents": {}}, with_latents, id="latents"),
    ],
)
def test_every_kind_of_training_is_replayed_also_from_a_bundle(
    recorded: Path, tmp_path: Path, settings: dict[str, Any], samples: Callable[[int], list[Sample]]
):
    run, bundle = RunDir(tmp_path / "run"), tmp_path / "step.bundle"
    batches = [
        Batch(step, 0, [BatchSample(sample, f"env{i % 2}", i) for i, sample in enumerate(samples(step))])
        for step in range(1, STEPS + 1)
    ]
    train(run, configured(run, recorded, **settings), batches)
    for batch in batches:
        ship(run, batch)
    assert replay_step(run.root, 4, bundle=bundle).verdict == "bit-equal"
    shutil.rmtree(run.root)
    report = replay_step(bundle, None)
    assert report.verdict == "bit-equal" and report.first == 4
    assert ("kl_logprobs" in {column.name for column in report.tokens}) == ("reference" in settings)


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_a_damaged_batch_is_named(copied: RunDir):
    rollouts = copied.rollouts / "step-00000003.parquet"
    ship(copied, open_run(copied.root, 3).batch(3))
    flip(copied.batches.path(3), -1)
    with refused(DamagedFile, file=copied.batches.path(3)):
        replay_step(copied.root, 4)
    copied.batches.path(3).unlink()
    flip(rollouts, 100)
    with refused(DamagedFile, file=rollouts):
        replay_step(copied.root, 4)


def test_a_damaged_part_of_a_bundle_is_named(copied: RunDir, tmp_path: Path):
    bundle = tmp_path / "step.bundle"
    replay_step(copied.root, 3, bundle=bundle)
    with tarfile.open(bundle) as tar:
        member = tar.getmember("batches/step-00000003.safetensors")
    flip(bundle, member.offset_data + member.size - 1)
    with refused(DamagedFile, file=bundle) as error:
        replay_step(bundle, None)
    assert member.name in error.value.fact
    bundle.write_bytes(bundle.read_bytes()[: member.offset_data])
    with refused(DamagedFile, file=bundle):
        replay_step(bundle, None)


def test_where_batches_are_gone_the_key_that_keeps_them_is_named(copied: RunDir):
    (copied.rollouts / "step-00000001.parquet").unlink()
    with refused(BadInput, key="orchestrator.keep_rollouts"):
        replay_step(copied.root, 2)
    assert open_run(copied.root, 4).first == 3  # which needs no batch before the checkpoint
    with refused(BadInput, key="STEP", value=9):
        replay_step(copied.root, 9)


def changed(run: RunDir, step: int, change: Callable[[Sample], None]) -> None:
    """Ship another batch of a step than the one that was trained."""
    batch = open_run(run.root, step).batch(step)
    for entry in batch.samples:
        change(entry.sample)
    ship(run, batch)


def test_tokens_that_are_not_finite_are_named_with_their_cause(copied: RunDir, capsys: pytest.CaptureFixture[str]):
    batch = open_run(copied.root, 4).batch(4)
    sample = batch.samples[2].sample
    place = int(np.flatnonzero(sample.mask)[3])
    sample.streams["advantages"] = sample.streams["advantages"].copy()
    sample.streams["advantages"][place] = np.nan
    ship(copied, batch)
    report = replay_step(copied.root, 4)
    (token,) = report.anatomy.bad_tokens
    assert (token.sample, token.position, token.rollout) == (2, place, batch.samples[2].rollout)
    assert token.columns == ["advantages", "gradient"]
    first, *others = report.anatomy.rollouts
    assert report.anatomy.bad_parameters and first.rollout == token.rollout and math.isnan(first.share)
    assert 0.8 < sum(rollout.share for rollout in others) <= 1
    assert report.verdict == "differs" and report.first_differing_step == 4
    assert main(["replay", str(copied.root), "4"]) == 1
    assert "advantages, gradient" in capsys.readouterr().out


def test_a_gradient_of_0_is_explained(copied: RunDir):
    changed(copied, 4, lambda sample: sample.set_stream("advantages", np.zeros(len(sample))))
    report = replay_step(copied.root, 4, overrides=["--trainer.loss.kl_tau", "0"])
    assert report.replayed["optim/grad_norm"] == 0 and "advantages" in report.anatomy.zero


def test_other_settings_differ_from_the_step_on_that_they_change(reverse_text: RunDir):
    report = replay_step(reverse_text.root, 4, overrides=["--trainer.optim.lr", "0.1"])
    assert report.verdict == "differs"
    assert report.first_differing_step == 3  # its learning rate
    first = report.tokens[0].first
    assert first is not None and report.tokens[0].largest > report.tokens[0].mean > 0
    assert report.errors["optim/lr"] == pytest.approx(99)


def test_a_step_is_replayed_in_the_dtype_of_the_run_or_in_another(reverse_text: RunDir):
    assert replay_step(reverse_text.root, 3).platform.dtype == "float32"
    report = replay_step(reverse_text.root, 3, overrides=["--trainer.model.dtype=bfloat16"])
    assert report.platform.dtype == "bfloat16" and report.verdict == "differs"
    assert report.recorded_platform is not None
    assert report.recorded_platform.differences(report.platform) == ["dtype: float32, here bfloat16"]


def test_a_step_that_was_not_recorded_is_replayed_and_not_compared(copied: RunDir):
    copied.metrics.unlink()
    shutil.rmtree(copied.tokens.directory)
    report = replay_step(copied.root, 3)
    assert report.verdict == "not compared" and report.replayed["loss"] != 0


def test_the_runs_of_an_earlier_version_are_replayed_by_any_machine(
    recorded: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(str(recorded))
    assert main(["replay", str(recorded / "rl"), "1"]) == 0  # one step: rounding is about 1e-7, without Adam's
    assert "trainer_logprobs" in capsys.readouterr().out
