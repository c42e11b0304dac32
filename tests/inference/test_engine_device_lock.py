"""An engine that shares its device with a trainer: paused while the trainer holds the device lock."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.inference.backend import EngineError, RequestCancelled
from headrace.inference.embedded import engine as engine_module
from headrace.inference.embedded import thread as device_lock_module
from headrace.inference.embedded.cuda.kv_storage import OutOfDeviceMemory
from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.runner import PlainRunner
from headrace.inference.embedded.thread import EngineDeviceLock, EngineThread
from headrace.inference.schema import SamplingParams
from headrace.rollout.version import Version
from headrace.transport.lock import DeviceLock
from tests.inference.plain_forward import assert_like_plain

LONG = SamplingParams(ignore_eos=True)
GIB = 1 << 30


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[DeviceLock]:
    lock = DeviceLock(tmp_path, trainer=True)
    yield lock
    lock.close()


def engine_lock(directory: Path) -> DeviceLock:
    """Return an engine's lock, held as at the start."""
    lock = DeviceLock(directory, trainer=False)
    assert lock.try_acquire()
    return lock


@pytest.fixture
def thread(model: Any, tmp_path: Path) -> Iterator[EngineThread]:
    thread = EngineThread(Engine(model, max_model_len=128, max_running=4), engine_lock(tmp_path))
    yield thread
    thread.stop()


def take(trainer: DeviceLock) -> None:
    until(trainer.try_acquire, "the engine does not release the lock")


def test_requests_are_paused_for_the_trainer_and_continue_after(
    thread: EngineThread, trainer: DeviceLock, model: Any
) -> None:
    request = thread.submit([5, 6], SamplingParams(max_tokens=40, ignore_eos=True))
    until(lambda: request.sampled_since(0).token_ids, "nothing is sampled")
    take(trainer)
    until(lambda: thread.state().waits_for_trainer, "the engine does not wait")  # it notices right after the release
    assert thread.state().hand_overs == 1
    sampled = len(request.sampled_since(0).token_ids)
    assert 0 < sampled < 40
    late = thread.submit([7], SamplingParams(max_tokens=2))  # waits in the queue
    thread.pause()  # the thread has polled the lock by now
    thread.resume()
    assert len(request.sampled_since(0).token_ids) == sampled and not late.future.done()
    assert (thread.state().running, thread.state().waiting) == (1, 1)
    trainer.release()
    for each in (request, late):
        each.future.result(timeout=30)
    thread.pause()
    assert not thread.state().waits_for_trainer
    for each in (request, late):
        assert_like_plain(each, model)


def test_an_idle_and_a_paused_engine_release_the_lock_too(thread: EngineThread, trainer: DeviceLock) -> None:
    take(trainer)
    trainer.release()
    until(lambda: not thread.state().waits_for_trainer, "the lock is not acquired again")
    thread.pause()
    take(trainer)
    assert thread.state().hand_overs == 2


def test_the_engine_steps_between_two_steps_of_the_trainer(thread: EngineThread, trainer: DeviceLock) -> None:
    thread.submit([5], LONG)
    counts = []
    for _ in range(4):
        take(trainer)
        counts.append(thread.state().tokens_sampled)
        until(lambda: thread.state().waits_for_trainer, "the engine does not wait")
        time.sleep(0.02)  # a training step: the engine waits for the lock by now
        trainer.release()
    assert counts == sorted(set(counts))


def test_weights_are_installed_while_the_trainer_computes(
    thread: EngineThread,
    trainer: DeviceLock,
    make_model: Callable[[int], Any],
    publish: Callable[[Any, Version], Any],
) -> None:
    take(trainer)
    request = thread.submit([5, 6], SamplingParams(max_tokens=3))
    thread.update_weights(publish(make_model(1), Version(0, 1)), Version(0, 1))
    assert thread.state().version == Version(0, 1) and not request.future.done()
    trainer.release()
    request.future.result(timeout=30)
    assert_like_plain(request, {Version(0, 1): make_model(1)})


def test_a_request_cancelled_while_the_trainer_computes_ends_at_once(thread: EngineThread, trainer: DeviceLock) -> None:
    take(trainer)
    request = thread.submit([5], LONG)
    thread.cancel(request)
    with pytest.raises(RequestCancelled):
        request.future.result(timeout=30)
    assert thread.state().waits_for_trainer


def test_an_engine_that_waits_for_the_lock_can_be_stopped(model: Any, tmp_path: Path, trainer: DeviceLock) -> None:
    take(trainer)
    waiting = EngineThread(Engine(model, max_model_len=64), DeviceLock(tmp_path, trainer=False))
    waiting.submit([5], LONG)
    waiting.stop()
    trainer.release()
    take(trainer)


def test_a_failed_engine_holds_the_lock_as_long_as_its_memory(
    model: Any, tmp_path: Path, trainer: DeviceLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = engine_lock(tmp_path)
    dying = EngineThread(Engine(model, max_model_len=64), lock)
    monkeypatch.setattr(dying.engine.scheduler, "schedule", lambda _: 1 / 0)
    dying.submit([5], LONG)
    dying.failure.result(timeout=30)
    dying.stop()
    assert not trainer.try_acquire()
    lock.close()  # as the end of its process does
    assert trainer.try_acquire()


class LendingRunner(PlainRunner):
    """A runner that only records that its cache is released."""

    cache_bytes = GIB
    lent = is_short = False

    def release(self) -> int:
        given, self.lent = 0 if self.lent else GIB, True
        return given

    def restore(self) -> None:
        if self.is_short:
            raise OutOfDeviceMemory("1.0 GiB are needed")
        self.lent = False

    def launch(self, *arguments: Any) -> Any:
        assert not self.lent
        return super().launch(*arguments)


@pytest.fixture
def lending_engine(model: Any, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(engine_module, "PlainRunner", LendingRunner)
    return Engine(model, max_model_len=128)


@pytest.fixture
def lending(lending_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineThread]:
    monkeypatch.setattr(device_lock_module, "free_bytes", lambda _: 2 * GIB)
    thread = EngineThread(lending_engine, engine_lock(tmp_path))
    yield thread
    thread.stop()


@pytest.mark.parametrize(("needed", "lent"), [(None, True), (3 * GIB, True), (2 * GIB, False)])
def test_the_cache_is_released_if_memory_is_short_and_restored_for_the_next_request(
    lending: EngineThread, trainer: DeviceLock, model: Any, needed: int | None, lent: bool
) -> None:
    request = lending.submit([5, 6], SamplingParams(max_tokens=40, ignore_eos=True))
    until(lambda: request.sampled_since(0).token_ids, "nothing is sampled")
    trainer.request_memory(needed)
    take(trainer)
    assert trainer.any_cache_is_resident is not lent
    assert lending.state().cache_releases == lent
    trainer.release()
    request.future.result(timeout=30)
    lending.pause()
    assert trainer.any_cache_is_resident
    assert_like_plain(request, model)


def test_an_idle_engine_restores_its_cache_only_for_a_request(lending: EngineThread, trainer: DeviceLock) -> None:
    for _ in range(2):
        trainer.request_memory(None)
        take(trainer)
        assert not trainer.any_cache_is_resident
        trainer.release()
    until(lambda: not lending.state().waits_for_trainer, "the lock is not acquired again")
    assert not trainer.any_cache_is_resident and lending.state().cache_releases == 1
    assert lending.submit([5], SamplingParams(max_tokens=1)).future.result(timeout=30)
    assert trainer.any_cache_is_resident


def test_a_cache_that_cannot_be_restored_is_retried_and_logged(
    lending: EngineThread, trainer: DeviceLock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device_lock_module, "FIRST_NOTICE_S", 0.01)
    lending.engine.runner.is_short = True
    trainer.request_memory(None)
    take(trainer)
    trainer.release()
    with caplog.at_level(logging.INFO):
        request = lending.submit([5], SamplingParams(max_tokens=1))
        until(lambda: "1.0 GiB are needed" in caplog.text, "nothing is logged")
        take(trainer)  # it may acquire the lock again meanwhile
        trainer.release()
        lending.engine.runner.is_short = False
        request.future.result(timeout=30)
    assert "restored" in caplog.text


def test_a_cache_that_stays_unrestored_fails_the_engine(
    lending: EngineThread, trainer: DeviceLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_lock_module, "RESTORE_TIMEOUT_S", 0.01)
    lending.engine.runner.is_short = True
    trainer.request_memory(None)
    take(trainer)
    trainer.release()
    lending.submit([5], LONG)
    assert "inference.kv_cache_gb" in lending.failure.result(timeout=30)


def test_the_trainers_steps_do_not_count_towards_the_restore_timeout(
    lending_engine: Engine, tmp_path: Path, trainer: DeviceLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(device_lock_module, "time", clock)
    lock = EngineDeviceLock(lending_engine, engine_lock(tmp_path))
    lending_engine.runner.is_short = True
    lending_engine.submit([5], LONG)
    for _ in range(3):
        trainer.request_memory(None)
        assert not trainer.try_acquire()
        assert not lock.poll() and trainer.try_acquire()
        clock.now += 100.0
        assert not lock.poll()
        trainer.release()
        for _ in range(5):
            assert not lock.poll()
            clock.now += 10.0
    clock.now += 20.0
    with pytest.raises(EngineError, match="70 s"):
        lock.poll()
    lock.close()
