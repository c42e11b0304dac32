"""An engine that shares its device with a trainer: it stands still for it, and answers all the same."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.inference.backend import EngineError, RequestCancelled
from headrace.inference.embedded import turn as engine_turn
from headrace.inference.embedded.device_memory import OutOfDeviceMemory
from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.thread import EngineThread
from headrace.inference.embedded.turn import EngineTurn
from headrace.inference.schema import SamplingParams
from headrace.rollout.version import Version
from headrace.transport.turns import Turn
from tests.inference.plain_forward import assert_like_plain

LONG = SamplingParams(ignore_eos=True)
GIB = 1 << 30


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Turn]:
    turn = Turn(tmp_path, trainer=True)
    yield turn
    turn.close()


def own_turn(directory: Path) -> Turn:
    """An engine's, which is taken when it starts."""
    turn = Turn(directory, trainer=False)
    assert turn.try_take()
    return turn


@pytest.fixture
def thread(model: Any, tmp_path: Path) -> Iterator[EngineThread]:
    thread = EngineThread(Engine(model, max_model_len=128, max_running=4), own_turn(tmp_path))
    yield thread
    thread.stop()


def take(trainer: Turn) -> None:
    until(trainer.try_take, "the engine does not give way")


def test_requests_stand_still_for_the_trainer_and_go_on_after(thread: EngineThread, trainer: Turn, model: Any) -> None:
    request = thread.submit([5, 6], SamplingParams(max_tokens=40, ignore_eos=True))
    until(lambda: request.piece(0).token_ids, "nothing is sampled")
    take(trainer)
    assert thread.state().stands_still and thread.state().hand_overs == 1
    sampled = len(request.piece(0).token_ids)
    assert 0 < sampled < 40
    late = thread.submit([7], SamplingParams(max_tokens=2))  # is put in line
    thread.pause()  # a round through the thread: it had its chance
    thread.resume()
    assert len(request.piece(0).token_ids) == sampled and not late.future.done()
    assert (thread.state().running, thread.state().waiting) == (1, 1)
    trainer.leave()
    for each in (request, late):
        each.future.result(timeout=30)
    thread.pause()
    assert not thread.state().stands_still
    for each in (request, late):
        assert_like_plain(each, model)


def test_an_idle_and_a_paused_engine_give_way_too(thread: EngineThread, trainer: Turn) -> None:
    take(trainer)
    trainer.leave()
    until(lambda: not thread.state().stands_still, "the turn is not taken back")
    thread.pause()
    take(trainer)
    assert thread.state().hand_overs == 2


def test_between_two_turns_of_the_trainer_the_engine_has_one(thread: EngineThread, trainer: Turn) -> None:
    thread.submit([5], LONG)
    counts = []
    for _ in range(4):
        take(trainer)
        counts.append(thread.state().tokens_sampled)
        until(lambda: thread.state().stands_still, "the engine does not wait")
        time.sleep(0.02)  # a training step: by now the engine has its hand up
        trainer.leave()
    assert counts == sorted(set(counts))


def test_weights_are_installed_while_the_trainer_computes(
    thread: EngineThread,
    trainer: Turn,
    make_model: Callable[[int], Any],
    publish: Callable[[Any, Version], Any],
) -> None:
    take(trainer)
    request = thread.submit([5, 6], SamplingParams(max_tokens=3))
    thread.update_weights(publish(make_model(1), Version(0, 1)), Version(0, 1))
    assert thread.state().version == Version(0, 1) and not request.future.done()
    trainer.leave()
    request.future.result(timeout=30)
    assert_like_plain(request, {Version(0, 1): make_model(1)})


def test_a_request_that_is_cancelled_meanwhile_ends_at_once(thread: EngineThread, trainer: Turn) -> None:
    take(trainer)
    request = thread.submit([5], LONG)
    thread.cancel(request)
    with pytest.raises(RequestCancelled):
        request.future.result(timeout=30)
    assert thread.state().stands_still


def test_an_engine_that_waits_for_its_turn_can_be_stopped(model: Any, tmp_path: Path, trainer: Turn) -> None:
    take(trainer)
    waiting = EngineThread(Engine(model, max_model_len=64), Turn(tmp_path, trainer=False))
    waiting.submit([5], LONG)
    waiting.stop()
    trainer.leave()
    take(trainer)


def test_one_that_died_has_its_turn_as_long_as_its_memory(
    model: Any, tmp_path: Path, trainer: Turn, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = own_turn(tmp_path)
    dying = EngineThread(Engine(model, max_model_len=64), turn)
    monkeypatch.setattr(dying.engine.scheduler, "plan", lambda _: 1 / 0)
    dying.submit([5], LONG)
    dying.failure.result(timeout=30)
    dying.stop()
    assert not trainer.try_take()
    turn.close()  # as the end of its process does
    assert trainer.try_take()


class LendingEngine(Engine):
    """With a cache that is given back on paper."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, max_model_len=128)
        self.lent = False
        self.is_short = False

    @property
    def cache_bytes(self) -> int:
        return GIB

    def release_cache(self) -> int:
        given, self.lent = 0 if self.lent else GIB, True
        for request in self.scheduler.running:
            self.scheduler.compute_again(request, self._weights)
        return given

    def restore_cache(self) -> None:
        if self.is_short:
            raise OutOfDeviceMemory("1.0 GiB were asked for")
        self.lent = False

    def step(self) -> None:
        assert not self.lent
        super().step()


@pytest.fixture
def lending(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineThread]:
    monkeypatch.setattr(engine_turn, "free_bytes", lambda _: 2 * GIB)
    thread = EngineThread(LendingEngine(model), own_turn(tmp_path))
    yield thread
    thread.stop()


@pytest.mark.parametrize(("needed", "lent"), [(None, True), (3 * GIB, True), (2 * GIB, False)])
def test_the_cache_is_given_up_if_memory_is_short_and_comes_back_with_the_next_request(
    lending: EngineThread, trainer: Turn, model: Any, needed: int | None, lent: bool
) -> None:
    request = lending.submit([5, 6], SamplingParams(max_tokens=40, ignore_eos=True))
    until(lambda: request.piece(0).token_ids, "nothing is sampled")
    trainer.ask_for(needed)
    take(trainer)
    assert trainer.cache_is_kept is not lent
    assert lending.state().cache_releases == lent
    trainer.leave()
    request.future.result(timeout=30)
    lending.pause()
    assert trainer.cache_is_kept
    assert_like_plain(request, model)


def test_an_idle_engine_leaves_its_memory_to_the_trainer_until_it_is_needed(
    lending: EngineThread, trainer: Turn
) -> None:
    for _ in range(2):
        trainer.ask_for(None)
        take(trainer)
        assert not trainer.cache_is_kept
        trainer.leave()
    until(lambda: not lending.state().stands_still, "the turn is not taken back")
    assert not trainer.cache_is_kept and lending.state().cache_releases == 1
    assert lending.submit([5], SamplingParams(max_tokens=1)).future.result(timeout=30)
    assert trainer.cache_is_kept


def test_memory_that_does_not_come_back_is_waited_for_and_said(
    lending: EngineThread, trainer: Turn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_turn, "FIRST_NOTICE", 0.01)
    assert isinstance(lending.engine, LendingEngine)
    lending.engine.is_short = True
    trainer.ask_for(None)
    take(trainer)
    trainer.leave()
    with caplog.at_level(logging.INFO):
        request = lending.submit([5], SamplingParams(max_tokens=1))
        until(lambda: "its memory is not back: 1.0 GiB were asked for" in caplog.text, "nothing is said")
        take(trainer)  # who may come again meanwhile
        trainer.leave()
        lending.engine.is_short = False
        request.future.result(timeout=30)
    assert "the memory for the KV cache is back" in caplog.text


def test_memory_that_never_comes_back_ends_the_engine_with_what_to_do(
    lending: EngineThread, trainer: Turn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_turn, "PATIENCE", 0.01)
    assert isinstance(lending.engine, LendingEngine)
    lending.engine.is_short = True
    trainer.ask_for(None)
    take(trainer)
    trainer.leave()
    lending.submit([5], LONG)
    assert "set inference.kv_cache_gb to less" in lending.failure.result(timeout=30)


def test_the_trainers_turns_do_not_count_as_time_without_the_memory(
    model: Any, tmp_path: Path, trainer: Turn, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(engine_turn, "time", clock)
    engine = LendingEngine(model)
    turn = EngineTurn(engine, own_turn(tmp_path))
    engine.is_short = True
    engine.submit([5], LONG)
    for _ in range(3):
        trainer.ask_for(None)
        assert not trainer.try_take()
        assert not turn.look() and trainer.try_take()
        clock.now += 100.0
        assert not turn.look()
        trainer.leave()
        for _ in range(5):
            assert not turn.look()
            clock.now += 10.0
    clock.now += 20.0
    with pytest.raises(EngineError, match="has not fitted beside the trainer for 70 s"):
        turn.look()
    turn.close()
