"""Tensor files of checkpoints: one copy or a bounded buffer, readable by any number of ranks, refused when damaged."""

import os
import signal
import subprocess
import sys
import time
from hashlib import blake2b
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from headrace.errors import Repaired
from headrace.rollout.schema import DamagedFile
from headrace.trainer import checkpoint, tensor_files
from headrace.trainer.checkpoint import Checkpoints, TrainState
from headrace.trainer.host_copies import BUCKET_BYTES, STREAM_BUCKETS
from headrace.trainer.model import PackedModel
from headrace.trainer.model_files import write_tensors
from headrace.trainer.ranks import Ranks
from headrace.trainer.tensor_files import (
    Shard,
    TensorFileWriter,
    load_shards,
    local_shards,
    read_shards,
    write_shards,
)
from headrace.transport import checkpoint_files
from headrace.transport.checkpoint_files import PART_BYTES, READER_THREADS, BlockDigests, find_damage
from headrace.transport.files import MARKER
from tests.trainer import saving_process
from tests.trainer.training_samples import ARCHITECTURES, write_random_model

Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors begin and end inside of blocks, and inside of the parts in which these are read."""
    monkeypatch.setattr(tensor_files, "BUCKET_BYTES", 100)
    for module in (tensor_files, checkpoint_files):
        monkeypatch.setattr(module, "PART_BYTES", 32)


def some_tensors() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {
        "half": torch.randn(7, generator=generator).half(),
        "matrix": torch.randn(13, 5, generator=generator),
        "transposed": torch.randn(4, 6, generator=generator).t(),
        "stack": torch.randn(3, 2, 4, generator=generator),
        "step": torch.tensor(3.0),
        "counts": torch.arange(5),
        "none": torch.empty(0, 4),
    }


def write(path: Path, shards: list[Shard], blocks: int = 100) -> BlockDigests:
    return write_shards(path, shards, blocks=blocks).finish()


def like(tensors: Tensors) -> Tensors:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def assert_same(first: Tensors, second: Tensors) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype
        assert torch.equal(tensor, second[name]), name


@pytest.mark.parametrize("blocks", [1, 2, 100], ids=["one block at a time", "two blocks", "one copy"])
def test_a_file_is_what_safetensors_and_torch_read(blocks: int, tmp_path: Path):
    Ranks()
    tensors = some_tensors()
    write(tmp_path / "shard-00001-model-00001-of-00001.safetensors", local_shards(tensors), blocks)
    assert_same(load_file(tmp_path / "shard-00001-model-00001-of-00001.safetensors"), tensors)
    found = like(tensors)
    load(found, storage_reader=HuggingFaceStorageReader(str(tmp_path)))
    assert_same(found, tensors)


def test_what_torch_wrote_is_read(tmp_path: Path):
    Ranks()
    tensors = {name: tensor.contiguous() for name, tensor in some_tensors().items()}
    save(tensors, storage_writer=HuggingFaceStorageWriter(str(tmp_path), save_distributed=True))
    found = like(tensors)
    (path,) = tmp_path.glob("*.safetensors")
    load_shards(read_shards(path), local_shards(found), {})
    assert_same(found, tensors)


@pytest.mark.parametrize("writers", [1, 2, 3])
@pytest.mark.parametrize("readers", [1, 2, 5])
def test_any_number_of_ranks_reads_what_any_number_wrote(writers: int, readers: int, tmp_path: Path):
    whole = torch.arange(13 * 5, dtype=torch.float32).view(13, 5)
    saved, digests = [], {}
    for number, part in enumerate(sharded(whole, writers)):
        path = tmp_path / f"{number}.safetensors"
        digests[path.name] = write(path, [part])
        saved += read_shards(path)
    for part in sharded(whole, readers):
        found = part._replace(local=torch.zeros_like(part.local))
        load_shards(saved, [found], digests)
        assert torch.equal(found.local, part.local)


def sharded(whole: torch.Tensor, ranks: int) -> list[Shard]:
    parts = whole.chunk(ranks)
    origins = [sum(map(len, parts[:number])) for number in range(len(parts))]
    return [Shard("matrix", part, origin, len(whole)) for part, origin in zip(parts, origins, strict=True)]


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        ({"matrix": torch.zeros(12, 5)}, "matrix has 13 rows"),
        ({"matrix": torch.zeros(14, 5)}, "matrix has 13 rows"),
        ({"matrix": torch.zeros(13, 4)}, r"matrix is \[13, 5\]"),
        ({"matrix": torch.zeros(13, 5).half()}, "matrix is .* F32"),
        ({"others": torch.zeros(2)}, "others has 0 rows"),
    ],
)
def test_tensors_of_another_model_are_refused(other: Tensors, problem: str, tmp_path: Path):
    path = tmp_path / "a.safetensors"
    write(path, local_shards(some_tensors()))
    with pytest.raises(ValueError, match=problem):
        load_shards(read_shards(path), local_shards(other), {})


def test_a_shard_that_is_missing_is_noticed(tmp_path: Path):
    first, _, last = sharded(torch.zeros(13, 5), 3)
    for number, part in enumerate((first, last)):
        write(tmp_path / f"{number}.safetensors", [part])
    saved = [shard for path in sorted(tmp_path.iterdir()) for shard in read_shards(path)]
    with pytest.raises(ValueError, match="rows of matrix are missing"):
        load_shards(saved, sharded(torch.zeros(13, 5), 1), {})


def test_every_flipped_bit_that_is_read_is_refused(tmp_path: Path):
    path, tensors = tmp_path / "a.safetensors", some_tensors()
    digests = {path.name: write(path, local_shards(tensors))}
    content = path.read_bytes()
    for place in range(0, len(content), 11):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(DamagedFile):
            load_shards(read_shards(path, digests[path.name]), local_shards(like(tensors)), digests)


def test_the_digests_of_older_versions_are_checked(tmp_path: Path):
    """They have BLAKE2b of each block, and none of the header."""
    path, tensors = tmp_path / "a.safetensors", some_tensors()
    new = write(path, local_shards(tensors))
    content = path.read_bytes()
    blocks = [content[start:end] for start, end in checkpoint_files.block_spans(len(content), new.block_size)]
    old = BlockDigests(new.size, new.block_size, [blake2b(block, digest_size=16).hexdigest() for block in blocks])
    found = like(tensors)
    load_shards(read_shards(path, old), local_shards(found), {path.name: old})
    assert_same(found, tensors)
    for place in (20, len(content) - 1):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(DamagedFile):
            load_shards(read_shards(path, old), local_shards(found), {path.name: old})


@pytest.mark.parametrize(
    "content", [b"", b"1234567", b"\xff" * 20, b"\x02" + b"\0" * 7 + b"[]", b"\x02" + b"\0" * 7 + b"{]"]
)
def test_what_has_no_header_is_damaged(content: bytes, tmp_path: Path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(DamagedFile):
        read_shards(path)


def test_tensors_that_differ_from_the_header_are_refused(tmp_path: Path):
    options = {"device": torch.device("cpu"), "blocks": 1, "durable": False}
    writer = TensorFileWriter(tmp_path / "short", {"a": torch.zeros(3)}, **options)
    writer.append(torch.zeros(2))
    with pytest.raises(ValueError, match="fewer bytes"):
        writer.finish()
    writer = TensorFileWriter(tmp_path / "long", {"a": torch.zeros(3)}, **options)
    with pytest.raises(ValueError, match="more bytes"):
        writer.append(torch.zeros(4))
    writer.finish()


def test_a_model_with_integers_between_odd_numbers_of_floats_is_written(tmp_path: Path):
    model = PackedModel(write_random_model(tmp_path / "model", ARCHITECTURES["qwen3"]))
    tensors = {
        "a.odd": torch.ones(3),
        "a.flags": torch.tensor([True, False, True]),
        "b.counts": torch.arange(5),
        "b.odd": torch.ones(5),
    }
    write_tensors(tmp_path, model.module, tensors, torch.bfloat16, Ranks())
    path = tmp_path / "model.safetensors"
    converted = {name: value.bfloat16() if value.is_floating_point() else value for name, value in tensors.items()}
    assert_same(load_file(path), converted)
    with safe_open(path, "pt") as file:
        assert torch.equal(file.get_slice("b.counts")[1:], tensors["b.counts"][1:])


def save_in_a_process(size: int, directory: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", saving_process.__name__, str(size), directory]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are those of Linux")
def test_saving_takes_one_copy_or_a_bounded_buffer_and_loading_a_bounded_buffer(tmp_path: Path):
    size, block = 128 << 20, saving_process.BUCKET_BYTES
    printed, _ = save_in_a_process(size, tmp_path).communicate()
    copied, streamed, loading = map(int, printed.split())
    others = 32 << 20  # stacks and allocators; a second copy would exceed it
    assert copied <= 1.15 * size + others
    assert streamed <= STREAM_BUCKETS * block + others
    assert loading <= READER_THREADS * PART_BYTES + others


def save_one(directory: Path, step: int, value: float) -> None:
    checkpoints = Checkpoints(directory, Ranks(), keep_last=2)
    tensors = {"model.a": torch.full((1000,), value)}

    def write_files(directory: Path) -> None:
        directory.mkdir()
        (directory / "config.json").write_text('{"hidden_size": 64}')

    checkpoints.begin(tensors, write_files, TrainState(step=step))
    checkpoints.finish(wait=True)


def test_a_process_killed_while_it_writes_leaves_the_checkpoint_before(tmp_path: Path):
    save_one(tmp_path, 0, 7.0)
    writing = save_in_a_process(128 << 20, tmp_path)
    draft = tmp_path / ".step-00000001.tmp"
    while not any(path.stat().st_size for path in draft.glob("tensors/*.safetensors")):
        assert writing.poll() is None
        time.sleep(0.001)
    os.kill(writing.pid, signal.SIGKILL)
    writing.communicate()
    newest = checkpoint.find_latest(tmp_path)
    assert newest is not None
    assert newest.name == "step-00000000"
    tensors = {"model.a": torch.zeros(1000)}
    checkpoint.load_tensors(newest, tensors)
    assert (tensors["model.a"] == 7).all()
    Checkpoints(tmp_path, Ranks(), keep_last=2)
    assert not draft.exists()


def flip_a_byte(checkpoint_directory: Path) -> Path:
    (path,) = checkpoint_directory.glob("tensors/*.safetensors")
    content = bytearray(path.read_bytes())
    content[-5] ^= 16
    path.write_bytes(content)
    return path


def test_a_damaged_checkpoint_is_refused_by_file(tmp_path: Path):
    for step in (1, 2):
        save_one(tmp_path, step, float(step))
    older, newer = checkpoint.list_complete(tmp_path)
    path = flip_a_byte(newer)
    with pytest.raises(DamagedFile) as caught:
        checkpoint.load_tensors(newer, {"model.a": torch.zeros(1000)})
    assert caught.value.file == path
    assert not list(find_damage(older))
    assert [problem.file for problem in find_damage(newer)] == [path]
    path.unlink()
    assert [problem.file for problem in find_damage(newer)] == [path]
    with pytest.raises(DamagedFile) as caught:
        checkpoint.saved_names(newer)
    assert caught.value.file == path


def test_a_damaged_checkpoint_is_set_aside_if_there_is_an_older_one(tmp_path: Path):
    for step in (1, 2):
        save_one(tmp_path, step, float(step))
    older, newer = checkpoint.list_complete(tmp_path)
    damage = DamagedFile("damaged", file=newer / "state.json")
    assert isinstance(checkpoint.set_aside(damage, newer, tmp_path, Ranks()), Repaired)
    assert checkpoint.list_complete(tmp_path) == [older]
    assert (tmp_path / f"damaged-{newer.name}" / "state.json").is_file()
    with pytest.raises(DamagedFile) as caught:  # the last one stays in its place
        checkpoint.set_aside(damage, older, tmp_path, Ranks())
    assert caught.value.fix
    assert checkpoint.list_complete(tmp_path) == [older]


@pytest.mark.parametrize("name", ["state.json", MARKER, "model/config.json"])
def test_a_flipped_bit_in_any_other_file_is_found(name: str, tmp_path: Path):
    save_one(tmp_path, 1, 1.0)
    (saved,) = checkpoint.list_complete(tmp_path)
    path = saved / name
    content = path.read_bytes()
    for place in range(0, 8 * len(content), 61):
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        assert [str(problem.file) for problem in find_damage(saved)] == [str(path)]
        with pytest.raises(DamagedFile):
            checkpoint.read_state(saved)


def test_a_checkpoint_without_digests_is_loaded(tmp_path: Path):
    save_one(tmp_path, 1, 5.0)
    (saved,) = checkpoint.list_complete(tmp_path)
    (saved / MARKER).write_text('{"step":1,"schema":1}')
    tensors = {"model.a": torch.zeros(1000)}
    checkpoint.load_tensors(saved, tensors)
    assert (tensors["model.a"] == 5).all()
    assert not list(find_damage(saved))


def test_a_full_disk_is_reported_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_space(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", no_space)
    checkpoints = Checkpoints(tmp_path, Ranks(), keep_last=1)
    checkpoints.begin({"model.a": torch.zeros(1000)}, lambda path: path.mkdir(), TrainState(step=1))
    with pytest.raises(OSError, match="No space") as caught:
        checkpoints.finish(wait=True)
    assert str(caught.value.filename).endswith(".safetensors")
    assert checkpoint.find_latest(tmp_path) is None


@pytest.mark.parametrize(
    ("free", "file_system", "copies"),
    [(0, "ext4", False), (2, "ext4", True), (3, "tmpfs", False), (4, "tmpfs", True)],
)
def test_a_copy_is_taken_where_it_fits_beside_checkpoints_in_memory(
    free: int, file_system: str, copies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(checkpoint, "file_system", lambda _: file_system)
    checkpoints = Checkpoints(tmp_path, Ranks(), keep_last=1)
    size = 100 * BUCKET_BYTES
    taken = checkpoints.plan(size, free * size)
    assert checkpoints.copies_to_host is copies
    assert taken == (size if copies else STREAM_BUCKETS * BUCKET_BYTES)
