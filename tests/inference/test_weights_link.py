"""Weights from a trainer's memory into an engine, between two processes; whatever goes wrong leaves the model alone."""

import contextlib
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from headrace.inference.embedded.engine import Engine
from headrace.inference.server.replies import error_reply
from headrace.inference.weights.link import WeightsReceiver
from headrace.inference.weights.reading import WeightsError, WeightsUnreachable
from headrace.rollout.version import Version
from headrace.trainer.snapshot import Snapshot, take_snapshot
from headrace.trainer.weights_link import WeightsSender
from headrace.transport.digests import DIGESTS
from headrace.transport.weights import WeightStore, read_marker
from headrace.transport.weights_link import MANIFEST, FetchRequest, LinkBroken, Manifest, connect, read_manifest
from tests.inference.plain_forward import assert_like_plain
from tests.inference.test_weight_updates import run_all, start_requests
from tests.inference.weights_sender import SenderProcess
from tests.refusals import refused

V0, V1, V2 = Version(0, 0), Version(0, 1), Version(0, 2)
MakeModel = Callable[[int], Any]


@pytest.fixture(scope="module")
def senders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WeightStore, list[SenderProcess]]]:
    """Two trainers of one run, started together since that takes longest; the second one may be killed."""
    store = WeightStore(tmp_path_factory.mktemp("run") / "weights")
    started = [SenderProcess(store.directory) for _ in range(2)]
    yield store, started
    for sender in started:
        sender.kill()


@pytest.fixture
def store(senders: tuple[WeightStore, list[SenderProcess]]) -> WeightStore:
    return senders[0]


@pytest.fixture
def trainer(senders: tuple[WeightStore, list[SenderProcess]]) -> SenderProcess:
    """One that all tests share, and leave alive."""
    return senders[1][0]


def save(model: Any, directory: Path) -> Path:
    model.save_pretrained(directory)
    return directory / "model.safetensors"


def assert_samples_like(engine: Engine, model: Any) -> None:
    requests = start_requests(engine)
    run_all(engine)
    for request in requests:
        assert_like_plain(request, {engine.version: model})


def big(path: Path) -> Path:
    """More than sockets hold on the way."""
    save_file({"big": torch.zeros(1 << 25, dtype=torch.uint8)}, path)
    return path


def test_an_engine_takes_a_version_that_has_no_files(
    make_model: MakeModel, trainer: SenderProcess, store: WeightStore, tmp_path: Path
) -> None:
    engine = Engine(make_model(0), max_model_len=64)
    requests = start_requests(engine)
    checksum = trainer.publish(V1, save(make_model(1), tmp_path))
    assert sorted(path.name for path in store.path(V1).iterdir()) == [DIGESTS, "COMPLETE.json", MANIFEST]
    assert engine.update_weights(store.path(V1), V1) == checksum == read_marker(store.path(V1)).checksum
    run_all(engine)
    for request in requests:
        assert request.future.result().version_spans == [(V0, 0, 4), (V1, 4, 10)]
        assert_like_plain(request, {V0: make_model(0), V1: make_model(1)})


def test_the_connection_stays_for_the_next_version_and_for_the_one_before(
    make_model: MakeModel, trainer: SenderProcess, store: WeightStore, tmp_path: Path
) -> None:
    engine = Engine(make_model(0), max_model_len=64)
    for step in (1, 2):
        trainer.publish(Version(3, step), save(make_model(step), tmp_path))
    used = set()
    for step in (1, 2, 1):
        engine.update_weights(store.path(Version(3, step)), Version(3, step))
        used.add(engine.link._connection)
        assert_samples_like(engine, make_model(step))
    assert len(used) == 1


def test_an_engine_that_dies_during_a_transfer_affects_no_other(
    make_model: MakeModel, trainer: SenderProcess, store: WeightStore, tmp_path: Path
) -> None:
    version = Version(4, 1)
    trainer.publish(version, big(tmp_path / "big.safetensors"))
    manifest = read_manifest(store.path(version))
    dying = connect(manifest.host, manifest.port, "the trainer", 10.0)
    dying.send(FetchRequest(manifest.sender, version.incarnation, version.step))
    dying.receive_bytes(memoryview(bytearray(1 << 20)), "the beginning")
    dying._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset, as by a kill
    dying._socket.close()
    received = receive(store.path(version), version)  # it was started again
    assert received["big"].shape == (1 << 25,)
    engine = Engine(make_model(0), max_model_len=64)
    trainer.publish(Version(4, 2), save(make_model(2), tmp_path))
    engine.update_weights(store.path(Version(4, 2)), Version(4, 2))
    assert_samples_like(engine, make_model(2))


def test_a_trainer_that_comes_back_elsewhere_is_followed(
    make_model: MakeModel, senders: tuple[WeightStore, list[SenderProcess]], tmp_path: Path
) -> None:
    store, [second, first] = senders
    engine = Engine(make_model(0), max_model_len=64)
    versions = Version(5, 7), Version(5, 8), Version(6, 7)
    first.publish(versions[0], save(make_model(1), tmp_path))
    first.publish(versions[1], save(make_model(2), tmp_path))
    engine.update_weights(store.path(versions[0]), versions[0])
    first.kill()
    with pytest.raises(WeightsUnreachable, match=r"5-8.*weights\.host"):
        engine.update_weights(store.path(versions[1]), versions[1])
    assert engine.version == versions[0]
    assert_samples_like(engine, make_model(1))
    second.publish(versions[2], save(make_model(3), tmp_path))
    engine.update_weights(store.path(versions[2]), versions[2])
    assert engine.version == versions[2]
    assert_samples_like(engine, make_model(3))


def test_a_trainer_that_hangs_is_given_up_at_the_deadline(
    make_model: MakeModel, trainer: SenderProcess, store: WeightStore, tmp_path: Path
) -> None:
    version = Version(7, 1)
    trainer.publish(version, save(make_model(1), tmp_path))
    engine = Engine(make_model(0), max_model_len=64)
    engine.link = WeightsReceiver(engine.device, timeout_s=0.2)
    os.kill(trainer.pid, signal.SIGSTOP)
    try:
        with pytest.raises(WeightsUnreachable, match=r"0\.2 s.*7-1"):
            engine.update_weights(store.path(version), version)
    finally:
        os.kill(trainer.pid, signal.SIGCONT)
    assert engine.version == V0
    assert_samples_like(engine, make_model(0))
    engine.link = WeightsReceiver(engine.device)
    engine.update_weights(store.path(version), version)
    assert_samples_like(engine, make_model(1))


# One process is enough for the rest.


@pytest.fixture
def sender() -> Iterator[WeightsSender]:
    sender = WeightsSender(timeout_s=0.2)
    yield sender
    sender.close()


def publish(
    sender: WeightsSender,
    store: WeightStore,
    version: Version,
    tensors: dict[str, torch.Tensor],
    bucket_size: int = 64,
) -> Path:
    snapshot = take_snapshot(tensors.items(), bucket_size)
    store.publish(version, lambda draft: sender.offer(version, snapshot, draft))
    return store.path(version)


def receive(directory: Path, version: Version) -> dict[str, torch.Tensor]:
    return WeightsReceiver(torch.device("cpu"), timeout_s=2.0).receive(directory, version).tensors


def edit_manifest(directory: Path, **changes: Any) -> None:
    manifest = msgspec.structs.replace(read_manifest(directory), **changes)
    (directory / MANIFEST).write_bytes(msgspec.json.encode(manifest))


def test_tensors_of_any_type_and_size_arrive_as_they_were(sender: WeightsSender, tmp_path: Path) -> None:
    tensors = {
        "half": torch.randn(3, 5).bfloat16(),
        "odd": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "nothing": torch.empty(0, 4),
        "several buckets": torch.randn(7, 11),
        "turned": torch.randn(4, 6).t(),
    }
    found = receive(publish(sender, WeightStore(tmp_path), V1, tensors), V1)
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
    # 30, 3, 8, 0, 308 and 96 bytes, each filled up to sixteens: 32 + 16 + 16 + 0 + 320 + 96 = 480
    manifest = read_manifest(tmp_path / "v-0-1")
    assert [place.offset for place in manifest.tensors] == [0, 32, 48, 64, 64, 384]
    assert manifest.size == 480 and len(manifest.digests) == 8 and manifest.spans[-1] == (448, 480)


def test_what_is_published_is_a_copy(sender: WeightsSender, tmp_path: Path) -> None:
    weight = torch.ones(100)
    directory = publish(sender, WeightStore(tmp_path), V1, {"weight": weight})
    weight.zero_()  # the next optimizer step
    assert torch.equal(receive(directory, V1)["weight"], torch.ones(100))


def test_a_version_that_is_no_longer_kept_is_refused_by_name(sender: WeightsSender, tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    old = publish(sender, store, V1, {"weight": torch.ones(3)})
    new = publish(sender, store, V2, {"weight": torch.zeros(3)})
    sender.keep([V2])
    with pytest.raises(WeightsUnreachable, match=r"0-1.*0-2"):
        receive(old, V1)
    assert torch.equal(receive(new, V2)["weight"], torch.zeros(3))


def test_another_trainer_on_the_same_port_is_not_taken_for_the_one_that_published(
    sender: WeightsSender, tmp_path: Path
) -> None:
    directory = publish(sender, WeightStore(tmp_path), V1, {"weight": torch.ones(3)})
    edit_manifest(directory, sender="of another time")
    with pytest.raises(WeightsUnreachable, match="another trainer"):
        receive(directory, V1)


def test_bytes_that_are_not_those_that_were_published_are_refused(sender: WeightsSender, tmp_path: Path) -> None:
    directory = publish(sender, WeightStore(tmp_path), V1, {"weight": torch.arange(100)})
    digests = read_manifest(directory).digests
    edit_manifest(directory, digests=[*digests[:-1], digests[-1] + 1])
    receiver = WeightsReceiver(torch.device("cpu"))
    with pytest.raises(WeightsUnreachable, match=f"bucket {len(digests)}"):
        receiver.receive(directory, V1)
    assert receiver._connection is None  # the next try begins with another one
    edit_manifest(directory, digests=digests)
    assert torch.equal(receiver.receive(directory, V1).tensors["weight"], torch.arange(100))


def test_a_receiver_that_is_closed_fetches_nothing(sender: WeightsSender, tmp_path: Path) -> None:
    directory = publish(sender, WeightStore(tmp_path), V1, {"weight": torch.ones(3)})
    receiver = WeightsReceiver(torch.device("cpu"))
    receiver.close()
    with pytest.raises(WeightsUnreachable):
        receiver.receive(directory, V1)


def test_closing_ends_a_connection_without_an_answer(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        with contextlib.suppress(TimeoutError):
            while True:  # until its backlog is full, and further connections get no answer
                stack.enter_context(socket.create_connection(listener.getsockname(), 0.2))
        manifest = Manifest("127.0.0.1", listener.getsockname()[1], "x", [], 64, 64, [0])
        (tmp_path / MANIFEST).write_bytes(msgspec.json.encode(manifest))
        receiver = WeightsReceiver(torch.device("cpu"), timeout_s=3600.0)
        errors: list[Exception] = []

        def fetch() -> None:
            try:
                receiver.receive(tmp_path, V1)
            except WeightsUnreachable as error:
                errors.append(error)

        fetching = threading.Thread(target=fetch, daemon=True)
        fetching.start()
        while not receiver._lock.locked():
            threading.Event().wait(0.01)
        closing = threading.Thread(target=receiver.close, daemon=True)
        closing.start()
        closing.join(30)
        assert not closing.is_alive() and errors


def test_a_trainer_that_sends_next_to_nothing_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = connect("127.0.0.1", listener.getsockname()[1], "the trainer", 0.3)
        trickling, _ = listener.accept()

        def trickle() -> None:
            with contextlib.suppress(OSError):
                for _ in range(20):
                    trickling.sendall(b"x")
                    threading.Event().wait(0.05)

        thread = threading.Thread(target=trickle)
        thread.start()
        with pytest.raises(LinkBroken, match=r"0\.3 s.*the rest"):
            connection.receive_bytes(memoryview(bytearray(20)), "the rest")
        connection.close()
        thread.join()
        trickling.close()


def test_a_manifest_that_was_changed_no_longer_has_the_markers_checksum(
    make_model: MakeModel, sender: WeightsSender, tmp_path: Path
) -> None:
    directory = publish(sender, WeightStore(tmp_path), V1, dict(make_model(1).named_parameters()))
    edit_manifest(directory, port=1)
    with pytest.raises(WeightsError, match="damaged"):
        Engine(make_model(0), max_model_len=64).update_weights(directory, V1)


def test_a_trainer_that_dies_halfway_is_named(tmp_path: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    manifest = Manifest("127.0.0.1", listener.getsockname()[1], "x", [], 96, 64, [0, 0])
    (tmp_path / MANIFEST).write_bytes(msgspec.json.encode(manifest))

    def die() -> None:
        connection, _ = listener.accept()
        answer = b'{"schema": 1}'
        connection.recv(1 << 16)
        connection.sendall(struct.pack("!I", len(answer)) + answer + bytes(80))
        connection.close()

    dying = threading.Thread(target=die)
    dying.start()
    with pytest.raises(WeightsUnreachable, match=r"bucket 2.*0-1"):
        receive(tmp_path, V1)
    dying.join()
    listener.close()


def test_an_engine_that_takes_nothing_is_given_up_and_named_in_the_log(
    sender: WeightsSender, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    big = torch.zeros(1 << 25, dtype=torch.uint8)
    directory = publish(sender, WeightStore(tmp_path), V1, {"big": big}, bucket_size=1 << 24)
    manifest = read_manifest(directory)
    hanging = connect(manifest.host, manifest.port, "the trainer", 10.0)
    hanging.send(FetchRequest(manifest.sender, 0, 1))
    while sender._connections or "is closed" not in caplog.text:
        threading.Event().wait(0.01)
    assert "waited 0.2 s for the engine at 127.0.0.1" in caplog.text
    assert receive(directory, V1)["big"].shape == (1 << 25,)
    hanging.close()


def test_whatever_fails_in_sending_cuts_the_link_and_is_logged(
    sender: WeightsSender, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = WeightStore(tmp_path)
    good = publish(sender, store, V1, {"weight": torch.ones(3)})
    unreadable = Snapshot([], [torch.empty(64, dtype=torch.uint8, device="meta")], [0])
    store.publish(V2, lambda draft: sender.offer(V2, unreadable, draft))
    with pytest.raises(WeightsUnreachable, match="bucket 1"):
        receive(store.path(V2), V2)
    while sender._connections:
        threading.Event().wait(0.01)
    assert "the weights link to the engine at 127.0.0.1" in caplog.text
    assert torch.equal(receive(good, V1)["weight"], torch.ones(3))


def test_an_engine_that_there_is_no_thread_for_is_turned_away_and_may_come_back(
    sender: WeightsSender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more_threads(*_: Any, **__: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("headrace.trainer.weights_link.ACCEPT_RETRY_S", 0.0)
    directory = publish(sender, WeightStore(tmp_path), V1, {"weight": torch.ones(3)})
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more_threads)
        with pytest.raises(WeightsUnreachable):
            receive(directory, V1)
    assert torch.equal(receive(directory, V1)["weight"], torch.ones(3))


def test_a_snapshot_takes_no_more_room_than_its_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[Any] = []
    empty = torch.empty

    def noting(size: Any, **options: Any) -> torch.Tensor:
        sizes.append(size)
        return empty(size, **options)

    weight = torch.arange(32, dtype=torch.float32)  # 128 bytes
    monkeypatch.setattr(torch, "empty", noting)
    assert len(take_snapshot([("weight", weight)], bucket_size=64).buckets) == 2
    assert sizes == [64, 64]


def test_nonsense_at_the_port_is_cut_off(sender: WeightsSender, tmp_path: Path) -> None:
    directory = publish(sender, WeightStore(tmp_path), V1, {"weight": torch.ones(3)})
    manifest = read_manifest(directory)
    for content in (b"GET / HTTP/1.1\r\n\r\n", struct.pack("!I", 2) + b"{}", struct.pack("!I", 12) + b'{"schema":9}'):
        with socket.create_connection((manifest.host, manifest.port), 2.0) as intruder:
            intruder.sendall(content)
            assert intruder.recv(1) == b""
    assert torch.equal(receive(directory, V1)["weight"], torch.ones(3))


def test_an_address_that_cannot_be_listened_on_is_named(sender: WeightsSender) -> None:
    with refused(key="trainer.weights.port", value=sender._port):
        WeightsSender(port=sender._port)


def test_a_configured_carrier_that_cannot_be_is_said(tmp_path: Path) -> None:
    sender = WeightsSender(carrier="nccl")
    directory = publish(sender, WeightStore(tmp_path), V1, {"weight": torch.ones(3)})
    with pytest.raises(WeightsUnreachable, match=r"NCCL.*trainer"):
        receive(directory, V1)
    sender.close()


def test_an_engine_without_its_trainer_says_so_as_a_gateway_does() -> None:
    assert error_reply(WeightsUnreachable("gone")).status_code == 502
    assert error_reply(WeightsError("unfit")).status_code == 400
