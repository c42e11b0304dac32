"""`verify`: every file with a digest is read, what is damaged is named with what recovers."""

import os
import shutil
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.config.files import dump_sealed, has_digest
from headrace.launch.node_messages import DriverAddress
from headrace.launch.own_code import save_folders
from headrace.rollout.batch import Batch, BatchSample
from headrace.rollout.digest import digest_of, seal
from headrace.rollout.schema import DamagedFile
from headrace.rollout.types import Rollout
from headrace.rollout.version import Version
from headrace.runfile.run import RunConfig
from headrace.transport.checkpoint_files import TENSORS, XXH3, BlockDigests, CheckpointMarker
from headrace.transport.digests import DIGESTS, check_directory, check_file, write_digests
from headrace.transport.files import MARKER
from headrace.transport.journal import Journal
from headrace.transport.journal_entries import Entries, Totals
from headrace.transport.rollout_files import RolloutFiles, write_eval_rollouts
from headrace.transport.run_dir import RolloutKind, RunDir
from headrace.transport.verification import verify
from tests.rollout.strategies import sample

OLD_RUNS = Path(__file__).parents[1] / "data" / "recorded-runs"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A small run directory with one file of each kind."""
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    run.config.write_text(dump_sealed(RunConfig.model_construct()))
    save_folders(["/somewhere"], run)
    write_eval_rollouts(RolloutKind.EVAL.path(run.rollouts, 0), 0, [Rollout(env="math", task_key="1")])
    record = run.batches.prepare(Batch(1, 0, [BatchSample(sample(2, 2), "math", 0)], [0]))
    journal = Journal(run.journal)
    journal.commit(Entries([], [], Totals()), shipped=1, files=[record])
    journal.close()
    run.batches.announce(1)
    run.probes.write(Version(0, 1), [BatchSample(sample(1, 1), "math", 0)])
    run.weights.publish(Version(0, 0), lambda draft: (draft / "model.safetensors").write_bytes(b"weights"))
    run.weights.acknowledge(Version(0, 0))
    shutil.copytree(run.weights.path(Version(0, 0)), run.final_model, ignore=shutil.ignore_patterns(MARKER))
    checkpoint = run.checkpoints / "step-00000000"
    (checkpoint / TENSORS).mkdir(parents=True)
    (checkpoint / TENSORS / "a.safetensors").write_bytes(b"tensors")
    (checkpoint / "state.json").write_text('{"step": 0}')
    tensors = {"a.safetensors": BlockDigests(7, 7, [digest_of(b"tensors")], XXH3)}
    marker = CheckpointMarker(0, tensors=tensors, files={"state.json": digest_of(b'{"step": 0}')})
    (checkpoint / MARKER).write_bytes(seal(marker))
    run.metrics.write_text('{"step": 1}\n')
    return run


def test_a_whole_run_has_only_its_logs_without_a_digest(run: RunDir):
    found = verify(run, has_digest)
    assert found.damages == []
    assert [str(path) for path in found.without_digest] == ["metrics.jsonl"]
    assert main(["verify", str(run.root)]) == 0


def test_a_change_of_any_other_file_is_found_with_what_recovers(run: RunDir, capsys: pytest.CaptureFixture[str]):
    for path in sorted(verify(run, has_digest).whole - {Path(f"{run.journal}{end}") for end in ("-wal", "-shm")}):
        content = path.read_bytes()
        path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
        assert main(["verify", str(run.root)]) == 1, path
        assert capsys.readouterr().out.count(str(path)) == 1
        path.write_bytes(content)
    assert verify(run, has_digest).damages == []


def test_every_flipped_bit_of_the_drivers_address_is_found(tmp_path: Path):
    run = RunDir(tmp_path)
    run.driver.write_bytes(content := seal(DriverAddress("http://127.0.0.1:40123", 32 * "5a")))
    assert verify(run, has_digest).whole == {run.driver}
    for bit in range(0, 8 * len(content), 7):  # in every byte
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        run.driver.write_bytes(damaged)
        (damage,) = verify(run, has_digest).damages
        assert str(run.driver) in damage.problem


def test_a_missing_batch_that_no_checkpoint_covers_is_named(run: RunDir):
    run.batches.path(1).unlink()
    (damage,) = verify(run, has_digest).damages
    assert str(run.batches.path(1)) in damage.problem


def test_a_journal_without_the_commit_of_a_batch_is_named_with_its_log(run: RunDir):
    """SQLite drops transactions from a damaged frame of the log on, and sees nothing wrong."""
    run.batches.prepare(Batch(2, 0, [BatchSample(sample(2, 2), "math", 0)], [1]))
    run.batches.announce(2)
    (damage,) = verify(run, has_digest).damages
    assert all(str(path) in damage.problem for path in (run.journal, f"{run.journal}-wal", run.batches.path(2)))


@pytest.mark.timeout(20)
def test_a_fifo_in_place_of_a_file_is_refused_at_once(tmp_path: Path):
    os.mkfifo(tmp_path / "model.safetensors")
    assert isinstance(check_file(tmp_path / "model.safetensors", ""), DamagedFile)
    write_digests(tmp_path)  # a directory has digests of regular files alone
    assert list(check_directory(tmp_path)) == [tmp_path / DIGESTS]


def test_digests_that_were_copied_with_the_files_of_a_model_are_replaced(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    write_digests(tmp_path)
    write_digests(tmp_path)
    assert list(check_directory(tmp_path)) == [tmp_path / DIGESTS, tmp_path / "config.json"]


def test_damaged_rollouts_are_not_read(run: RunDir):
    path = RolloutKind.EVAL.path(run.rollouts, 0)
    content = bytearray(path.read_bytes())
    content[10] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedFile) as damage:
        RolloutFiles(run.rollouts, RolloutKind.EVAL).read(0)
    assert damage.value.file == path


@pytest.mark.parametrize("name", ["rl", "sft", "hackable"])
def test_an_old_run_is_not_damaged(name: str, tmp_path: Path):
    copy = shutil.copytree(OLD_RUNS / name, tmp_path / name)  # SQLite writes files beside a journal that it reads
    assert verify(RunDir(copy), has_digest).damages == []
