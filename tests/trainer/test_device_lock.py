"""The trainer's side of the device lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from headrace.observe.status import Status, StatusReader
from headrace.trainer.device_lock import TrainerDeviceLock
from headrace.transport.lock import POLL_S, DeviceLock

CPU = torch.device("cpu")


@pytest.fixture
def status(tmp_path: Path) -> Iterator[Status]:
    status = Status(tmp_path / "status", "trainer")
    yield status
    status.close("done")


class Engine(threading.Thread):
    """Holds the lock unless the trainer requests it, and a cache, which it releases if all memory is requested."""

    def __init__(self, directory: Path, *, slow: bool) -> None:
        super().__init__()
        self.requested: list[int | None] = []
        self._look = 5 * POLL_S if slow else POLL_S / 4
        self._lock = DeviceLock(directory, trainer=False)
        assert self._lock.try_acquire()
        self._lock.mark_cache_resident()
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(self._look):
            if self._lock.is_held and self._lock.is_requested_by_trainer:
                self.requested.append(self._lock.requested_memory)
                if self.requested[-1] is None:
                    self._lock.mark_cache_released()
                self._lock.release()
            elif self._lock.try_acquire():
                self._lock.mark_cache_resident()
        self._lock.close()

    def wait_for_lock(self) -> None:
        while not self._lock.is_held:
            time.sleep(POLL_S / 4)

    def end(self) -> None:
        self._ended.set()
        self.join()


@pytest.fixture(params=["quick", "slow"])
def engine(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = Engine(tmp_path / "turns", slow=request.param == "slow")
    engine.start()
    yield engine
    engine.end()


def failing(times: int, calls: list[str]) -> Callable[[], str]:
    """Work whose memory does not suffice so many times."""

    def work() -> str:
        calls.append("tried")
        if len([call for call in calls if call == "tried"]) <= times:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return "done"

    return work


def never() -> bool:
    return False


def test_a_device_of_its_own_is_always_the_trainers(status: Status) -> None:
    lock = TrainerDeviceLock(None, CPU, status)
    with lock.hold(never) as is_held:
        assert is_held
        assert lock.run_with_oom_retry(lambda: 5, lambda: None, never) == 5
        with pytest.raises(torch.OutOfMemoryError):
            lock.run_with_oom_retry(failing(1, []), lambda: None, never)


def test_the_lock_passes_from_the_engine_and_back(tmp_path: Path, status: Status, engine: Engine) -> None:
    lock, other = TrainerDeviceLock(tmp_path / "turns", CPU, status), DeviceLock(tmp_path / "turns", trainer=False)
    for _ in range(3):
        with lock.hold(never) as is_held:
            assert is_held
            assert not other.try_acquire()
            other.release()
    assert set(engine.requested) == {0}


def test_a_stopped_trainer_does_not_wait_for_the_lock(tmp_path: Path, status: Status) -> None:
    busy = DeviceLock(tmp_path / "turns", trainer=False)
    busy.try_acquire()
    looks: list[str] = []

    def stopped() -> bool:
        status._write()
        looks.append(StatusReader(tmp_path / "status").read()["trainer"].waiting_for)
        return len(looks) == 3

    with TrainerDeviceLock(tmp_path / "turns", CPU, status).hold(stopped) as is_held:
        assert not is_held
    assert looks == ["the GPU from the engine"] * 3
    assert not busy.is_requested_by_trainer


def test_an_error_releases_the_lock(tmp_path: Path, status: Status) -> None:
    with pytest.raises(ZeroDivisionError), TrainerDeviceLock(tmp_path / "turns", CPU, status).hold(never):
        1 / 0  # noqa: B018
    assert DeviceLock(tmp_path / "turns", trainer=False).try_acquire()


def test_a_step_that_runs_out_of_memory_is_retried_once_with_all_there_is(
    tmp_path: Path, status: Status, engine: Engine
) -> None:
    lock, calls = TrainerDeviceLock(tmp_path / "turns", CPU, status), list[str]()
    with lock.hold(never):
        assert lock.run_with_oom_retry(failing(1, calls), lambda: calls.append("undone"), never) == "done"
    assert calls == ["tried", "undone", "tried"]
    assert (
        engine.requested[-1] is None
    )  # also where the engine is slower to see it than the trainer to request it again
    with lock.hold(never), pytest.raises(torch.OutOfMemoryError):
        lock.run_with_oom_retry(failing(2, []), lambda: None, never)


def test_a_stopped_trainer_does_not_wait_for_memory_that_no_engine_releases(tmp_path: Path, status: Status) -> None:
    silent = DeviceLock(tmp_path / "turns", trainer=False)  # has a cache, and does not poll
    silent.mark_cache_resident()
    looks: list[bool] = []

    def stopped() -> bool:
        looks.append(True)
        return len(looks) > 1

    lock = TrainerDeviceLock(tmp_path / "turns", CPU, status)
    with lock.hold(never):
        assert lock.run_with_oom_retry(failing(1, []), lambda: None, stopped) is None
    assert silent.try_acquire()


class Gpu:
    """What torch says of one, in MiB, without a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = self.reserved = self.peak = 0
        for name, answer in {
            "synchronize": lambda _: None,
            "memory_allocated": lambda _: self.allocated << 20,
            "memory_reserved": lambda _: self.reserved << 20,
            "max_memory_reserved": lambda _: self.peak << 20,
            "empty_cache": self._empty,
        }.items():
            monkeypatch.setattr(torch.cuda, name, answer)

    def compute(self, most: int) -> None:
        self.reserved, self.peak = most, max(self.peak, most)

    def _empty(self) -> None:
        self.reserved = self.allocated


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def test_the_first_step_requests_all_memory_and_later_ones_the_peak_and_a_margin(
    tmp_path: Path, status: Status, gpu: Gpu, engine: Engine
) -> None:
    lock = TrainerDeviceLock(tmp_path / "turns", torch.device("cuda"), status)
    gpu.allocated = 10_000
    for most in (14_000, 40_000, 40_000):
        with lock.hold(never):
            gpu.compute(most)
        engine.wait_for_lock()
    with lock.hold(never):
        gpu.reserved = 30_000
    engine.wait_for_lock()
    with lock.hold(never):
        pass
    # All was lent for the first, which gave it back; what the others have reserved they keep.
    assert engine.requested[0] is None
    requested = [(memory or 0) / (1 << 20) for memory in engine.requested[1:]]
    assert requested == [4000 + 512, 3000, 3000, 10_000 + 3000]


@pytest.mark.parametrize(
    ("engines", "left"), [(["keeps"], 40_000), (["lends"], 10_000), (["keeps", "lends"], 10_000), ([], 10_000)]
)
def test_memory_of_a_step_is_returned_unless_every_engine_has_its_cache(
    tmp_path: Path, status: Status, gpu: Gpu, engines: list[str], left: int
) -> None:
    """It is returned without engines, too: an engine that starts sizes its cache by what is free."""
    lock = TrainerDeviceLock(tmp_path / "turns", torch.device("cuda"), status)
    lock._peak = 0
    gpu.allocated = 10_000
    others = [DeviceLock(tmp_path / "turns", trainer=False) for _ in engines]
    with lock.hold(never) as is_held:
        assert is_held
        for other, does in zip(others, engines, strict=True):  # the first step may come before an engine is up
            other.mark_cache_resident()
            if does == "lends":
                other.mark_cache_released()
        gpu.compute(40_000)
    assert gpu.reserved == left
