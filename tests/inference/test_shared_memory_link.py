"""Weights in memory that trainer and engine share: who may read, write and close it, and what happens when one dies.

Between real processes, over files that stand in for a GPU's memory (`host_driver`); `tests/gpu` has the rest.
"""

import itertools
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.inference import cuda_driver
from headrace.inference.cuda_driver import DriverError, ExportedMemory
from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.thread import EngineThread
from headrace.inference.vllm.worker import Fetcher
from headrace.inference.weights.link import CarrierUnavailable, WeightsReceiver, choose_carrier
from headrace.inference.weights.reading import WeightsError, WeightsUnreachable
from headrace.rollout.version import Version
from headrace.trainer.snapshot import size_of, take_snapshot
from headrace.trainer.weights_link import WeightsSender
from headrace.transport.weights import WeightStore
from headrace.transport.weights_link import FetchRequest, FetchResponse, LinkPeer, connect, read_manifest
from tests.inference.host_driver import HostDriver, use
from tests.inference.test_weights_link import assert_samples_like, edit_manifest, save
from tests.inference.weights_sender import SenderProcess

CPU = torch.device("cpu")
MakeModel = Callable[[int], Any]
versions = (Version(0, step) for step in itertools.count(1))
"""Each is published once in this file."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def trainers(place: Path) -> Iterator[list[SenderProcess]]:
    """Started together since that takes longest. The second one may be killed."""
    started = [SenderProcess(place / "weights", "auto", "cpu", place / "memory") for _ in range(2)]
    yield started
    for trainer in started:
        trainer.kill()


@pytest.fixture
def store(place: Path) -> WeightStore:
    return WeightStore(place / "weights")


@pytest.fixture
def driver(place: Path, monkeypatch: pytest.MonkeyPatch) -> HostDriver:
    """That of this process, which is the engine's."""
    driver = HostDriver(place / "memory")
    use(driver, replace=monkeypatch.setattr)
    return driver


@pytest.fixture
def receiver(driver: HostDriver) -> Iterator[WeightsReceiver]:
    receiver = WeightsReceiver(CPU, timeout_s=10.0)
    yield receiver
    receiver.close()
    assert driver.depth == 0


@pytest.fixture
def trainer(trainers: list[SenderProcess], store: WeightStore, receiver: WeightsReceiver, tmp_path: Path) -> Any:
    """One that knows of an engine on its GPU: it has asked once."""
    version = write(trainers[0], tmp_path, 0)
    receiver.receive(store.path(version), version).release()
    return trainers[0]


def write(trainer: SenderProcess, folder: Path, fill: int, size: int = 100) -> Version:
    """Publish a version with such a tensor."""
    version = next(versions)
    save_file({"weight": torch.full((size,), float(fill)), "odd": torch.tensor([True])}, folder / "next.safetensors")
    trainer.publish(version, folder / "next.safetensors")
    return version


def assert_full_of(tensors: dict[str, torch.Tensor], fill: int) -> None:
    assert torch.equal(tensors["weight"], torch.full((100,), float(fill))) and tensors["odd"].item()


def test_the_first_version_is_sent_and_those_after_it_are_opened(
    trainers: list[SenderProcess], store: WeightStore, driver: HostDriver, receiver: WeightsReceiver, tmp_path: Path
) -> None:
    opened = []
    for fill in range(5):
        version = write(trainers[0], tmp_path, fill)
        received = receiver.receive(store.path(version), version)
        opened.append(len(driver.open))
        assert_full_of(received.tensors, fill)
        received.release()
        received.release()  # once more costs nothing
        assert not driver.open
    # Another test may have registered an engine on this trainer's GPU already.
    assert opened in ([0, 1, 1, 1, 1], [1, 1, 1, 1, 1])


def test_an_engine_goes_on_with_what_it_opened_and_leaves_nothing_open(
    make_model: MakeModel, trainer: SenderProcess, store: WeightStore, driver: HostDriver, tmp_path: Path
) -> None:
    engine = Engine(make_model(0), max_model_len=64)
    thread = EngineThread(Engine(make_model(0), max_model_len=64))
    opened: list[int] = []
    reading = engine.read

    def read(*arguments: Any) -> Any:
        published = reading(*arguments)
        opened.append(len(driver.open))
        return published

    engine.read = read  # type: ignore[method-assign]
    for seed in (1, 2):
        version = next(versions)
        checksum = trainer.publish(version, save(make_model(seed), tmp_path))
        assert engine.update_weights(store.path(version), version) == checksum
        assert thread.update_weights(store.path(version), version) == checksum
        assert not driver.open
        assert_samples_like(engine, make_model(seed))
    assert opened[-1] == 1
    thread.stop()


def test_a_version_that_is_being_read_is_left_alone_and_the_next_one_goes_another_way(
    trainer: SenderProcess, store: WeightStore, driver: HostDriver, receiver: WeightsReceiver, tmp_path: Path
) -> None:
    version = write(trainer, tmp_path, 1)
    reading = receiver.receive(store.path(version), version)
    assert len(driver.open) == 1
    later = WeightsReceiver(CPU, timeout_s=10.0)
    version = write(trainer, tmp_path, 2)
    assert_full_of(later.receive(store.path(version), version).tensors, 2)
    assert len(driver.open) == 1  # the one that is being read
    assert_full_of(reading.tensors, 1)
    reading.release()
    version = write(trainer, tmp_path, 3)
    received = later.receive(store.path(version), version)
    assert len(driver.open) == 1
    assert_full_of(received.tensors, 3)
    received.release()
    later.close()


def test_versions_before_the_newest_can_still_be_had(
    trainer: SenderProcess, store: WeightStore, driver: HostDriver, receiver: WeightsReceiver, tmp_path: Path
) -> None:
    published = [write(trainer, tmp_path, fill) for fill in range(3)]
    for fill in (2, 0, 1):
        received = receiver.receive(store.path(published[fill]), published[fill])
        assert len(driver.open) == (fill == 2)
        assert_full_of(received.tensors, fill)
        received.release()


def test_requesting_another_version_releases_the_last(
    trainer: SenderProcess, store: WeightStore, driver: HostDriver, receiver: WeightsReceiver, tmp_path: Path
) -> None:
    first = write(trainer, tmp_path, 1)
    forgotten = receiver.receive(store.path(first), first)
    received = receiver.receive(store.path(first), first)
    assert len(driver.open) == 1
    forgotten.release()  # too late: it is another one's by now
    assert len(driver.open) == 1
    assert_full_of(received.tensors, 1)
    received.release()
    assert not driver.open


def test_memory_that_is_not_what_was_published_is_refused_and_closed(
    trainer: SenderProcess, store: WeightStore, driver: HostDriver, receiver: WeightsReceiver, tmp_path: Path
) -> None:
    version = write(trainer, tmp_path, 1)
    damaged = shutil.copytree(store.path(version), tmp_path / "damaged")
    edit_manifest(damaged, digests=[read_manifest(damaged).digests[0] + 1])
    with pytest.raises(WeightsUnreachable, match="bucket 1"):
        receiver.receive(damaged, version)
    assert not driver.open
    received = receiver.receive(store.path(version), version)
    assert_full_of(received.tensors, 1)
    received.release()


def test_an_engine_that_dies_while_it_reads_is_not_waited_for(
    trainer: SenderProcess, store: WeightStore, driver: HostDriver, receiver: WeightsReceiver, tmp_path: Path
) -> None:
    version = write(trainer, tmp_path, 1)
    manifest = read_manifest(store.path(version))
    dying = connect(manifest.host, manifest.port, "the trainer", 10.0)
    engine = LinkPeer("of another time", "GPU-0", ["ipc"])
    dying.send(FetchRequest(manifest.sender, version.incarnation, version.step, engine))
    answer = dying.receive(FetchResponse, "the answer")
    assert answer.carrier == "ipc" and len(bytes.fromhex(answer.memory)) == 64
    dying.close()
    version = write(trainer, tmp_path, 2)
    received = receiver.receive(store.path(version), version)
    assert len(driver.open) == 1
    assert_full_of(received.tensors, 2)
    received.release()


def test_what_a_killed_trainer_lent_stays_until_it_is_released_and_its_successor_is_followed(
    trainers: list[SenderProcess],
    trainer: SenderProcess,
    store: WeightStore,
    driver: HostDriver,
    receiver: WeightsReceiver,
    tmp_path: Path,
) -> None:
    mortal = trainers[1]
    for fill in (1, 2):
        version = write(mortal, tmp_path, fill)
        received = receiver.receive(store.path(version), version)
    mortal.kill()
    assert_full_of(received.tensors, 2)
    received.release()
    assert not driver.open
    with pytest.raises(WeightsUnreachable):
        receiver.receive(store.path(version), version)
    version = write(trainer, tmp_path, 3)
    received = receiver.receive(store.path(version), version)
    assert len(driver.open) == 1
    assert_full_of(received.tensors, 3)
    received.release()


def test_memory_that_cannot_be_opened_is_sent_instead_and_not_tried_again(
    trainer: SenderProcess,
    store: WeightStore,
    driver: HostDriver,
    receiver: WeightsReceiver,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver.refuses_to_open = True
    for fill in (1, 2):
        version = write(trainer, tmp_path, fill)
        assert_full_of(receiver.receive(store.path(version), version).tensors, fill)
    assert caplog.text.count("its memory cannot be opened") == 1
    assert "to open the memory of another process: it is refused" in caplog.text


def test_a_gpu_without_room_to_compare_on_has_it_done_by_the_host(
    trainer: SenderProcess,
    store: WeightStore,
    driver: HostDriver,
    receiver: WeightsReceiver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def short(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("headrace.inference.weights.link.digests", short)
    version = write(trainer, tmp_path, 1)
    received = receiver.receive(store.path(version), version)
    assert len(driver.open) == 1
    assert_full_of(received.tensors, 1)
    received.release()
    damaged = shutil.copytree(store.path(version), tmp_path / "damaged")
    edit_manifest(damaged, digests=[read_manifest(damaged).digests[0] + 1])
    with pytest.raises(WeightsUnreachable, match="bucket 1"):
        receiver.receive(damaged, version)


@pytest.mark.parametrize(
    ("error", "raised"), [(torch.OutOfMemoryError("no room"), WeightsUnreachable), (KeyError("a bug"), KeyError)]
)
def test_whatever_ends_a_fetch_leaves_nothing_open_and_the_next_one_succeeds(
    error: Exception,
    raised: type[Exception],
    trainer: SenderProcess,
    store: WeightStore,
    driver: HostDriver,
    receiver: WeightsReceiver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*arguments: Any) -> None:
        raise error

    version = write(trainer, tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr("headrace.inference.weights.link.view_tensors", fail)
        with pytest.raises(raised):
            receiver.receive(store.path(version), version)
    assert not driver.open and receiver._connection is None
    received = receiver.receive(store.path(version), version)
    assert_full_of(received.tensors, 1)
    received.release()


def test_memory_that_the_driver_cannot_close_counts_as_released(
    trainer: SenderProcess,
    store: WeightStore,
    driver: HostDriver,
    receiver: WeightsReceiver,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver.refuses_to_close = True
    for fill in (1, 2):
        version = write(trainer, tmp_path, fill)
        received = receiver.receive(store.path(version), version)
        assert receiver._borrowed is not None
        assert_full_of(received.tensors, fill)
        received.release()
        assert receiver._borrowed is None
    assert caplog.text.count("to close the memory of another process: it is refused") == 2


def test_closing_the_link_keeps_borrowed_memory_valid(
    trainer: SenderProcess, store: WeightStore, driver: HostDriver, tmp_path: Path
) -> None:
    receiver = WeightsReceiver(CPU, timeout_s=10.0)
    version = write(trainer, tmp_path, 1)
    received = receiver.receive(store.path(version), version)
    receiver.close()
    assert len(driver.open) == 1 and receiver._connection is not None
    assert_full_of(received.tensors, 1)
    received.release()
    assert not driver.open and receiver._connection is None
    with pytest.raises(WeightsUnreachable):
        receiver.receive(store.path(version), version)


def test_a_vllm_worker_releases_versions_that_are_not_installed(
    make_model: MakeModel,
    model_directory: Path,
    trainer: SenderProcess,
    store: WeightStore,
    driver: HostDriver,
    tmp_path: Path,
) -> None:
    fetcher = Fetcher(CPU, model_directory, torch.float32, tied=True)
    good, bad = next(versions), next(versions)
    trainer.publish(good, save(make_model(1), tmp_path))
    fetcher.begin(store.path(good), good)
    fetcher.wait(store.path(good), good, 10)
    assert len(driver.open) == 1
    fetcher.begin(store.path(good), good)  # the first one is forgotten
    taken = fetcher.take(store.path(good), good)
    assert len(driver.open) == 1
    assert torch.equal(taken.tensors["model.norm.weight"], make_model(1).model.norm.weight)
    taken.release()
    assert not driver.open and not taken.tensors
    save_file({**load_file(tmp_path / "model.safetensors"), "extra": torch.ones(1)}, tmp_path / "more.safetensors")
    trainer.publish(bad, tmp_path / "more.safetensors")
    with pytest.raises(WeightsError, match="extra"):
        fetcher.take(store.path(bad), bad)
    assert not driver.open


# One process is enough for the rest.


def test_a_gpu_without_room_has_versions_go_through_the_host(
    driver: HostDriver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    driver.room = 1 << 20
    sender = WeightsSender(device=CPU, carrier="ipc")
    for _ in range(2):
        assert sender.writable_buffer(lambda: 3 << 20) is None
    assert caplog.text.count("through the host") == 1
    assert "0.0042 GB of memory: out of memory" in caplog.text
    sender.close()


def test_memory_is_taken_at_once_where_engines_are_known_to_be_on_the_gpu(driver: HostDriver) -> None:
    sender = WeightsSender(device=CPU)
    sender.allocate_shared(100)
    assert len(driver.open) == 1
    row = sender.writable_buffer(lambda: 0)
    assert row is not None and len(driver.open) == 1
    sender.close()
    for carrier in ("stream", "nccl"):
        other = WeightsSender(device=CPU, carrier=carrier)  # type: ignore[arg-type]
        other.allocate_shared(100)
        assert other.writable_buffer(lambda: 100) is None
        other.close()
    assert len(driver.open) == 1


def test_nothing_is_taken_of_the_gpu_until_an_engine_on_it_has_asked(driver: HostDriver) -> None:
    sender = WeightsSender(device=CPU)
    assert sender.writable_buffer(lambda: 100) is None
    sender._respond(FetchRequest(sender._id, 0, 1, LinkPeer("another", "GPU-1", ["stream", "ipc"])))
    assert sender.writable_buffer(lambda: 100) is None
    sender.close()


def test_a_row_is_lent_for_its_version_and_reusable_without_readers(
    driver: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = WeightsSender(device=CPU, carrier="ipc")
    tensors = {"a": torch.arange(7.0), "b": torch.arange(100, dtype=torch.int16)}
    row = sender.writable_buffer(lambda: size_of(tensors.values()))
    assert row is not None and size_of(tensors.values()) == 32 + 208
    assert len(row.bytes) == 1 << 21  # whole pages
    first = take_snapshot(tensors.items(), bucket_size=64, buffer=row)
    monkeypatch.setattr("headrace.trainer.snapshot.READERS_TIMEOUT_S", 0.01)
    with first.lend() as one, first.lend() as two:
        assert one == two and one is not None
        assert not row.begin_write()
    assert sender.writable_buffer(lambda: 0) is row
    with first.lend() as one:
        assert one is None  # it is being written
    tensors["a"].zero_()
    second = take_snapshot(tensors.items(), bucket_size=64, buffer=row)
    with first.lend() as one, second.lend() as two:
        assert one is None and two is not None
    assert torch.equal(torch.cat(first.buckets)[:28].view(torch.float32), torch.arange(7.0))  # kept on the host
    sender.close()
    assert driver.open.keys() == {row.bytes.data_ptr()}  # an engine may be reading it


def test_tensors_that_a_row_has_no_room_for_are_refused(driver: HostDriver) -> None:
    sender = WeightsSender(device=CPU, carrier="ipc")
    row = sender.writable_buffer(lambda: 64)
    with pytest.raises(ValueError, match="2097152"):
        take_snapshot([("big", torch.zeros((1 << 21) + 8, dtype=torch.uint8))], buffer=row)
    sender.close()


def test_memory_that_cannot_be_exported_is_not_kept(driver: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "cuIpcGetMemHandle", lambda handle, address: 1)
    with pytest.raises(DriverError):
        ExportedMemory(100, CPU)
    assert not driver.open and driver.depth == 0


def test_without_a_driver_memory_cannot_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(cuda_driver, "library", missing)
    assert not cuda_driver.is_available()
    assert not cuda_driver.has_virtual_memory(CPU)


def test_virtual_memory_is_an_attribute_of_the_gpu(driver: HostDriver) -> None:
    assert not cuda_driver.has_virtual_memory(CPU)
    driver.attributes[102] = 1
    assert cuda_driver.has_virtual_memory(CPU)


def end(process: str, gpu: str | None, *carriers: Any) -> LinkPeer:
    return LinkPeer(process, gpu, ["stream", *carriers])


TRAINER = end("trainer", "GPU-0", "nccl", "ipc")


@pytest.mark.parametrize(
    ("wanted", "engine", "expected"),
    [
        ("auto", end("engine", "GPU-0", "nccl", "ipc"), "ipc"),
        ("auto", end("engine", "GPU-1", "nccl", "ipc"), "nccl"),
        ("auto", end("trainer", "GPU-0", "nccl", "ipc"), "stream"),
        ("auto", end("engine", "GPU-0", "nccl"), "stream"),
        ("auto", end("engine", "GPU-1", "ipc"), "stream"),
        ("auto", end("engine", None), "stream"),
        ("auto", LinkPeer(), "stream"),
        ("stream", end("engine", "GPU-0", "nccl", "ipc"), "stream"),
        ("nccl", end("engine", "GPU-0", "nccl", "ipc"), "nccl"),
        ("ipc", end("engine", "GPU-0", "ipc"), "ipc"),
    ],
)
def test_the_best_common_carrier_is_chosen(wanted: Any, engine: LinkPeer, expected: str) -> None:
    assert choose_carrier(wanted, TRAINER, engine) == expected


@pytest.mark.parametrize(
    ("wanted", "engine", "why"),
    [
        ("nccl", end("engine", None), "NCCL.*the engine"),
        ("ipc", end("engine", None), "CUDA IPC.*the engine"),
        ("ipc", end("engine", "GPU-1", "ipc"), "different GPUs"),
        ("ipc", end("trainer", "GPU-0", "ipc"), "same process"),
    ],
)
def test_a_configured_carrier_that_is_unavailable_is_refused(wanted: Any, engine: LinkPeer, why: str) -> None:
    with pytest.raises(CarrierUnavailable, match=why):
        choose_carrier(wanted, TRAINER, engine)


def test_a_fetch_request_survives_encoding() -> None:
    ask = FetchRequest("sender", 1, 2, end("engine:7", "GPU-0", "ipc"))
    assert msgspec.json.decode(msgspec.json.encode(ask), type=FetchRequest) == ask


def test_an_unexpected_message_instead_of_a_release_closes_only_the_connection(
    driver: HostDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.trainer.snapshot.READERS_TIMEOUT_S", 0.01)
    sender = WeightsSender(device=CPU, carrier="ipc", timeout_s=2.0)
    store, version = WeightStore(tmp_path / "weights"), Version(0, 1)
    tensors = {"weight": torch.ones(3)}
    snapshot = take_snapshot(tensors.items(), buffer=sender.writable_buffer(lambda: size_of(tensors.values())))
    store.publish(version, lambda draft: sender.offer(version, snapshot, draft))
    manifest = read_manifest(store.path(version))
    confused = connect(manifest.host, manifest.port, "the trainer", 2.0)
    confused.send(FetchRequest(manifest.sender, 0, 1, LinkPeer("another", "GPU-0", ["ipc"])))
    assert confused.receive(FetchResponse, "the answer").memory
    assert not sender._buffer.begin_write()  # type: ignore[union-attr]
    confused.send_bytes(memoryview(b"GET / HTTP/1.1\r\n\r\n"), "nonsense")
    while sender._connections:
        threading.Event().wait(0.01)
    assert sender._buffer.begin_write()  # type: ignore[union-attr]
    confused.close()
    sender.close()
