"""Weights in memory of one GPU that a trainer and an engine share, with the real driver and real deaths."""

import itertools
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.inference.cuda_driver import ExportedMemory
from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.thread import EngineThread
from headrace.inference.schema import SamplingParams
from headrace.inference.weights.buffers import as_bytes, digest
from headrace.inference.weights.link import Received, WeightsReceiver
from headrace.inference.weights.published import BaseWeights
from headrace.inference.weights.reading import WeightsUnreachable
from headrace.rollout.version import Version
from headrace.transport.adapter import Adapter, AdapterConfig, Matrices
from headrace.transport.weights import WeightStore
from headrace.transport.weights_link import read_manifest
from tests.inference.conftest import make_qwen3
from tests.inference.test_weights_link import edit_manifest
from tests.inference.weights_sender import SenderProcess

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

ROOT = Path(__file__).parents[2]
READING = """
import sys, time, torch
from pathlib import Path
from headrace.inference.weights.link import WeightsReceiver
from headrace.rollout.version import Version
received = WeightsReceiver(torch.device("cuda")).receive(Path(sys.argv[1]), Version.parse(sys.argv[2]))
print("reading", flush=True)
while True:
    total = sum(tensor.sum(dtype=torch.float32) for tensor in received.tensors.values())
    torch.cuda.synchronize()
"""
versions = (Version(0, step) for step in itertools.count(1))
MEBIBYTE = 1 << 20


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> WeightStore:
    return WeightStore(tmp_path_factory.mktemp("run") / "weights")


@pytest.fixture(scope="module")
def trainers(store: WeightStore) -> Iterator[list[SenderProcess]]:
    """Started together since that takes longest. The second one may be killed; torch's memory there can be expanded."""
    started = [SenderProcess(store.directory, "auto", "cuda:0")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        started.append(SenderProcess(store.directory, "ipc", "cuda:0"))
    yield started
    for trainer in started:
        trainer.kill()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two versions of about 300 MB in odd sizes, over several buckets."""
    folder = tmp_path_factory.mktemp("files")
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = [7, 100 * MEBIBYTE + 3, 16, 50 * MEBIBYTE, 1]
    for name in ("0", "1"):
        tensors = {
            f"{n}": torch.randn(size, generator=generator, device="cuda").bfloat16() for n, size in enumerate(sizes)
        }
        save_file({**tensors, "flag": torch.tensor([True], device="cuda")}, folder / name)
    return [folder / "0", folder / "1"]


@pytest.fixture
def receiver() -> Iterator[WeightsReceiver]:
    receiver = WeightsReceiver(torch.device("cuda"), timeout_s=20.0)
    yield receiver
    receiver.close()


def publish(trainer: SenderProcess, file: Path) -> Version:
    version = next(versions)
    assert trainer.publish(version, file), "the trainer is gone"
    return version


def fetch(receiver: WeightsReceiver, store: WeightStore, version: Version, *, shared: bool = True) -> Received:
    received = receiver.receive(store.path(version), version)
    assert (receiver._borrowed is not None) == shared
    return received


def assert_same(received: Received, file: Path) -> None:
    expected = load_file(file, "cuda")
    assert received.tensors.keys() == expected.keys()
    assert all(torch.equal(received.tensors[name], expected[name]) for name in expected)


def free_memory() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def known_to(trainer: SenderProcess, receiver: WeightsReceiver, store: WeightStore, file: Path) -> None:
    """The trainer learns that there is an engine on its GPU when that one asks for the first time."""
    version = publish(trainer, file)
    receiver.receive(store.path(version), version).release()


def test_versions_change_places_in_one_memory_and_none_is_left_behind(
    trainers: list[SenderProcess], store: WeightStore, receiver: WeightsReceiver, files: list[Path]
) -> None:
    known_to(trainers[0], receiver, store, files[0])
    free = []
    for step in range(12):
        version = publish(trainers[0], files[step % 2])
        received = fetch(receiver, store, version)
        assert_same(received, files[step % 2])
        received.release()
        del received
        free.append(free_memory())
    assert min(free[2:]) >= free[1] - 150 * MEBIBYTE, free  # half a version


def test_older_versions_come_from_the_host_as_they_were(
    trainers: list[SenderProcess], store: WeightStore, receiver: WeightsReceiver, files: list[Path]
) -> None:
    known_to(trainers[0], receiver, store, files[0])
    published = [publish(trainers[0], files[number]) for number in (0, 1, 0)]
    for number, shared in ((2, True), (1, False), (0, False)):
        received = fetch(receiver, store, published[number], shared=shared)
        assert_same(received, files[number % 2])
        received.release()


def test_a_version_that_is_read_stays_as_it_is_while_others_are_published(
    trainers: list[SenderProcess], store: WeightStore, receiver: WeightsReceiver, files: list[Path]
) -> None:
    known_to(trainers[0], receiver, store, files[1])
    version = publish(trainers[0], files[0])
    reading = fetch(receiver, store, version)
    later = WeightsReceiver(torch.device("cuda"), timeout_s=20.0)
    version = publish(trainers[0], files[1])
    assert_same(fetch(later, store, version, shared=False), files[1])
    assert_same(reading, files[0])
    reading.release()
    later.close()


def test_other_bytes_than_those_published_are_refused(
    trainers: list[SenderProcess], store: WeightStore, receiver: WeightsReceiver, files: list[Path], tmp_path: Path
) -> None:
    known_to(trainers[0], receiver, store, files[0])
    version = publish(trainers[0], files[1])
    damaged = shutil.copytree(store.path(version), tmp_path / "damaged")
    digests = read_manifest(damaged).digests
    edit_manifest(damaged, digests=[*digests[:-1], digests[-1] + 1])
    with pytest.raises(WeightsUnreachable, match=f"bucket {len(digests)}"):
        receiver.receive(damaged, version)
    assert receiver._borrowed is None
    received = fetch(receiver, store, version)
    assert_same(received, files[1])
    received.release()


def test_an_engine_that_is_killed_while_it_reads_is_not_waited_for(
    trainers: list[SenderProcess], store: WeightStore, receiver: WeightsReceiver, files: list[Path]
) -> None:
    known_to(trainers[0], receiver, store, files[0])
    version = publish(trainers[0], files[0])
    command = [sys.executable, "-c", READING, str(store.path(version)), str(version)]
    engine = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    assert engine.stdout is not None
    assert engine.stdout.readline() == b"reading\n"
    engine.kill()
    engine.communicate()
    version = publish(trainers[0], files[1])
    received = fetch(receiver, store, version)
    assert_same(received, files[1])
    received.release()


def test_memory_of_a_killed_trainer_can_be_read_until_it_is_released(
    trainers: list[SenderProcess], store: WeightStore, receiver: WeightsReceiver, files: list[Path]
) -> None:
    known_to(trainers[0], receiver, store, files[1])
    mortal = trainers[1]
    version = publish(mortal, files[0])
    received = fetch(receiver, store, version)  # it shares from the first version on, as configured
    mortal.kill()
    while_held = free_memory()
    assert_same(received, files[0])
    copies = {name: tensor.clone() for name, tensor in received.tensors.items()}
    torch.cuda.synchronize()
    received.release()
    del copies
    assert free_memory() >= while_held + 250 * MEBIBYTE  # its last memory went with it
    with pytest.raises(WeightsUnreachable, match=r"cannot be reached|closed the connection"):
        receiver.receive(store.path(version), version)
    version = publish(trainers[0], files[1])
    received = fetch(receiver, store, version)
    assert_same(received, files[1])
    received.release()


def test_a_live_engine_installs_borrowed_weights(
    trainers: list[SenderProcess], store: WeightStore, receiver: WeightsReceiver, files: list[Path], tmp_path: Path
) -> None:
    known_to(trainers[0], receiver, store, files[0])
    engine = Engine(make_qwen3(0, head_dim=64).bfloat16().cuda(), max_model_len=128, compile=False, graphs=False)
    thread = EngineThread(engine)
    for seed in (1, 2):
        model = make_qwen3(seed, head_dim=64).bfloat16()
        model.save_pretrained(tmp_path)
        request = thread.submit([5, 6, 7], SamplingParams(max_tokens=60, ignore_eos=True))
        version = publish(trainers[0], tmp_path / "model.safetensors")
        thread.update_weights(store.path(version), version)
        request.future.result(timeout=60)
        assert engine.version == version and engine.link._borrowed is None
        found = engine.model.state_dict()
        assert all(torch.equal(found[name].cpu(), tensor) for name, tensor in model.state_dict().items())
    thread.stop()


def test_an_adapter_is_merged_on_the_gpu_as_on_the_cpu(tmp_path: Path) -> None:
    model = make_qwen3(0).bfloat16()
    model.save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(0)
    layer = "model.layers.1.mlp.up_proj"
    matrices = Matrices(torch.randn(4, 32, generator=generator), torch.randn(64, 4, generator=generator))
    adapter = Adapter(AdapterConfig(4, 8.0, ["up_proj"]), {layer: matrices})
    parameters = model.state_dict()
    ours, plain = (BaseWeights(tmp_path, torch.device(device)) for device in ("cuda", "cpu"))
    expected = plain.merge(adapter, parameters, tmp_path)
    for _ in range(2):  # the second time out of pinned memory
        found = ours.merge(adapter, parameters, tmp_path)
        assert found.keys() == expected.keys() and all(tensor.is_cuda for tensor in found.values())
        merged = found.pop(f"{layer}.weight").cpu()
        assert not torch.equal(merged, parameters[f"{layer}.weight"])
        torch.testing.assert_close(merged, expected[f"{layer}.weight"])
        assert all(torch.equal(tensor.cpu(), parameters[name]) for name, tensor in found.items())
    assert all(tensor.is_pinned() for tensor in ours._pinned.values())


def test_exported_memory_is_ordinary_memory() -> None:
    memory = ExportedMemory(300 * MEBIBYTE, torch.device("cuda"))
    assert memory.bytes.is_cuda and memory.bytes.shape == (300 * MEBIBYTE,)
    memory.bytes.fill_(7)
    assert (memory.bytes == 7).all()


def test_a_digest_is_the_same_on_a_gpu_as_on_a_cpu() -> None:
    row = torch.randn(9_000_000, dtype=torch.float32, generator=torch.Generator().manual_seed(0))
    assert int(digest(as_bytes(row))) == int(digest(as_bytes(row.cuda())))
