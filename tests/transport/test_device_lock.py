"""The device lock: mutual exclusion, fairness, and release when a process is killed."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.transport.lock import DeviceLock

LOCK_HOLDER = Path(__file__).parent / "lock_holder.py"


@pytest.fixture
def trainer(tmp_path: Path) -> DeviceLock:
    return DeviceLock(tmp_path, trainer=True)


@pytest.fixture
def engine(tmp_path: Path) -> DeviceLock:
    return DeviceLock(tmp_path, trainer=False)


class LockHolder:
    """One side of the lock in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def order(self, order: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{order}\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def ask(self, order: str) -> str:
        self.order(order)
        return self.hear()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def lock_holder(directory: Path, side: str) -> Iterator[LockHolder]:
    process = subprocess.Popen(
        [sys.executable, str(LOCK_HOLDER), str(directory), side],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield LockHolder(process)
    finally:
        process.kill()
        process.communicate()


def acquires(lock: DeviceLock) -> bool:
    """Return whether the lock can be acquired within 10 s."""
    deadline = time.monotonic() + 10
    while not lock.try_acquire():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def test_the_trainer_computes_alone_and_engines_together(
    tmp_path: Path, trainer: DeviceLock, engine: DeviceLock
) -> None:
    other = DeviceLock(tmp_path, trainer=False)
    assert engine.try_acquire() and other.try_acquire()
    assert not trainer.try_acquire()
    engine.release()
    assert not trainer.try_acquire()
    other.release()
    assert trainer.try_acquire() and trainer.is_held
    assert not engine.try_acquire() and not other.try_acquire()


def test_an_engine_sees_that_the_trainer_waits_and_what_it_needs(trainer: DeviceLock, engine: DeviceLock) -> None:
    engine.try_acquire()
    assert not engine.is_requested_by_trainer
    trainer.request_memory(123 << 30)
    assert not engine.is_requested_by_trainer
    trainer.try_acquire()
    assert engine.is_requested_by_trainer and engine.requested_memory == 123 << 30
    engine.release()
    assert trainer.try_acquire()
    trainer.release()
    engine.try_acquire()
    trainer.request_memory(None)
    trainer.try_acquire()
    assert engine.is_requested_by_trainer and engine.requested_memory is None


def test_the_side_that_waits_is_next(trainer: DeviceLock, engine: DeviceLock) -> None:
    engine.try_acquire()
    for _ in range(3):
        assert not trainer.try_acquire()
        engine.release()
        assert not engine.try_acquire()  # the trainer waited first
        assert trainer.try_acquire()
        assert not engine.try_acquire()
        trainer.release()
        assert not trainer.try_acquire()  # and now the engine did
        assert engine.try_acquire()


def test_a_waiting_engine_is_not_mistaken_for_a_waiting_trainer(
    tmp_path: Path, trainer: DeviceLock, engine: DeviceLock
) -> None:
    other = DeviceLock(tmp_path, trainer=False)
    trainer.try_acquire()
    assert not engine.try_acquire() and not other.try_acquire()
    trainer.release()
    assert engine.try_acquire()
    assert not engine.is_requested_by_trainer  # though the other engine still waits
    assert other.try_acquire()


def test_a_side_that_stops_waiting_does_not_block_the_other(trainer: DeviceLock, engine: DeviceLock) -> None:
    engine.try_acquire()
    trainer.try_acquire()
    trainer.release()
    assert not engine.is_requested_by_trainer
    engine.release()
    trainer.try_acquire()
    engine.try_acquire()
    engine.close()
    trainer.release()
    assert trainer.try_acquire()


def test_a_cache_is_resident_until_it_is_released_or_its_engine_is_gone(
    tmp_path: Path, trainer: DeviceLock, engine: DeviceLock
) -> None:
    assert not trainer.any_cache_is_resident and not trainer.all_caches_are_resident
    engine.mark_cache_resident()
    engine.mark_cache_resident()
    assert trainer.any_cache_is_resident and trainer.all_caches_are_resident
    with lock_holder(tmp_path, "engine") as other:
        assert other.ask("keep") == "kept"
        engine.mark_cache_released()
        assert trainer.any_cache_is_resident and not trainer.all_caches_are_resident
        other.kill()
    assert not trainer.any_cache_is_resident and not trainer.all_caches_are_resident
    engine.mark_cache_resident()
    assert trainer.all_caches_are_resident


def test_an_engine_can_mark_its_cache_while_the_trainer_tests_the_lock(
    tmp_path: Path, trainer: DeviceLock, engine: DeviceLock
) -> None:
    with open(tmp_path / "cache") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as the trainer's test does, for longer
        end = threading.Timer(0.05, fcntl.flock, (file, fcntl.LOCK_UN))
        end.start()
        engine.mark_cache_resident()
        end.join()
        assert trainer.any_cache_is_resident


@pytest.mark.parametrize(("side", "state"), [(s, n) for s in ("trainer", "engine") for n in ("has it", "waits")])
def test_the_lock_of_a_killed_process_is_released(
    tmp_path: Path, trainer: DeviceLock, engine: DeviceLock, side: str, state: str
) -> None:
    ours = trainer if side == "engine" else engine
    with lock_holder(tmp_path, side) as killed:
        if state == "waits":
            assert ours.try_acquire()
        assert killed.ask("take") == str(state == "has it")
        if state == "has it":
            assert not ours.try_acquire()
        killed.kill()
        assert acquires(ours) and not engine.is_requested_by_trainer
        ours.release()
        assert acquires(ours)  # and a second time
        ours.release()
        with lock_holder(tmp_path, side) as again:
            assert again.ask("take") == "True"


def test_steps_of_trainer_and_engines_never_overlap(tmp_path: Path) -> None:
    with (
        lock_holder(tmp_path, "trainer") as trainer,
        lock_holder(tmp_path, "engine") as one,
        lock_holder(tmp_path, "engine") as two,
    ):
        for each in (trainer, one, two):
            each.order("compute 100")
        assert {each.hear() for each in (trainer, one, two)} == {"computed"}
    events = (tmp_path / "events").read_text().splitlines()
    assert len(events) == 600
    inside = 0
    for event, after in zip(events, [*events[1:], ""], strict=True):
        inside += {"begins": 1, "ends": -1}[event.split()[1]]
        if event == "trainer begins":
            assert (inside, after) == (1, "trainer ends")
