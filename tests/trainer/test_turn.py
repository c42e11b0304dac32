"""The trainer's turns on a device that it shares."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from headrace.observe.status import Status, read_status
from headrace.trainer.turn import TrainerTurn
from headrace.transport.turns import POLL, Turn

CPU = torch.device("cpu")


@pytest.fixture
def status(tmp_path: Path) -> Iterator[Status]:
    status = Status(tmp_path / "status", "trainer")
    yield status
    status.close("done")


class Engine(threading.Thread):
    """Holds the turn unless the trainer wants it, and a cache, which it gives up if all is asked for."""

    def __init__(self, directory: Path, *, slow: bool) -> None:
        super().__init__()
        self.asked: list[int | None] = []
        self._look = 5 * POLL if slow else POLL / 4
        self._turn = Turn(directory, trainer=False)
        assert self._turn.try_take()
        self._turn.keep_cache()
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(self._look):
            if self._turn.is_ours and self._turn.is_wanted:
                self.asked.append(self._turn.wanted_memory)
                if self.asked[-1] is None:
                    self._turn.lend_cache()
                self._turn.leave()
            elif self._turn.try_take():
                self._turn.keep_cache()
        self._turn.close()

    def wait_for_turn(self) -> None:
        while not self._turn.is_ours:
            time.sleep(POLL / 4)

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
    turn = TrainerTurn(None, CPU, status)
    with turn.taken(never) as is_ours:
        assert is_ours
        assert turn.compute(lambda: 5, lambda: None, never) == 5
        with pytest.raises(torch.OutOfMemoryError):
            turn.compute(failing(1, []), lambda: None, never)


def test_the_turn_comes_from_the_engine_and_goes_back_to_it(tmp_path: Path, status: Status, engine: Engine) -> None:
    turn, other = TrainerTurn(tmp_path / "turns", CPU, status), Turn(tmp_path / "turns", trainer=False)
    for _ in range(3):
        with turn.taken(never) as is_ours:
            assert is_ours
            assert not other.try_take()
            other.leave()
    assert set(engine.asked) == {0}


def test_a_trainer_that_is_stopped_does_not_wait_on(tmp_path: Path, status: Status) -> None:
    busy = Turn(tmp_path / "turns", trainer=False)
    busy.try_take()
    looks: list[str] = []

    def stopped() -> bool:
        status._write()
        looks.append(read_status(tmp_path / "status")["trainer"].waiting_for)
        return len(looks) == 3

    with TrainerTurn(tmp_path / "turns", CPU, status).taken(stopped) as is_ours:
        assert not is_ours
    assert looks == ["its turn on the GPU from the engine"] * 3
    assert not busy.is_wanted


def test_an_error_ends_the_turn(tmp_path: Path, status: Status) -> None:
    with pytest.raises(ZeroDivisionError), TrainerTurn(tmp_path / "turns", CPU, status).taken(never):
        1 / 0  # noqa: B018
    assert Turn(tmp_path / "turns", trainer=False).try_take()


def test_a_step_that_runs_out_of_memory_is_tried_once_more_with_all_there_is(
    tmp_path: Path, status: Status, engine: Engine
) -> None:
    turn, calls = TrainerTurn(tmp_path / "turns", CPU, status), list[str]()
    with turn.taken(never):
        assert turn.compute(failing(1, calls), lambda: calls.append("undone"), never) == "done"
    assert calls == ["tried", "undone", "tried"]
    assert engine.asked[-1] is None  # also where the engine is slower to see it than the trainer to ask again
    with turn.taken(never), pytest.raises(torch.OutOfMemoryError):
        turn.compute(failing(2, []), lambda: None, never)


def test_a_trainer_that_is_stopped_does_not_wait_for_memory_that_no_engine_gives(
    tmp_path: Path, status: Status
) -> None:
    silent = Turn(tmp_path / "turns", trainer=False)  # has a cache, and does not look
    silent.keep_cache()
    looks: list[bool] = []

    def stopped() -> bool:
        looks.append(True)
        return len(looks) > 1

    turn = TrainerTurn(tmp_path / "turns", CPU, status)
    with turn.taken(never):
        assert turn.compute(failing(1, []), lambda: None, stopped) is None
    assert silent.try_take()


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


def test_a_step_gets_all_at_first_and_then_what_steps_have_taken_and_a_tenth_of_what_they_give_back(
    tmp_path: Path, status: Status, gpu: Gpu, engine: Engine
) -> None:
    turn = TrainerTurn(tmp_path / "turns", torch.device("cuda"), status)
    gpu.allocated = 10_000
    for most in (14_000, 40_000, 40_000):
        with turn.taken(never):
            gpu.compute(most)
        engine.wait_for_turn()
    with turn.taken(never):
        gpu.reserved = 30_000
    engine.wait_for_turn()
    with turn.taken(never):
        pass
    # All was lent for the first, which gave it back; what the others have reserved they keep.
    assert engine.asked[0] is None
    asked = [(memory or 0) / (1 << 20) for memory in engine.asked[1:]]
    assert asked == [4000 + 512, 3000, 3000, 10_000 + 3000]


@pytest.mark.parametrize(
    ("engines", "left"), [(["keeps"], 40_000), (["lends"], 10_000), (["keeps", "lends"], 10_000), ([], 10_000)]
)
def test_what_a_step_took_goes_back_unless_every_engine_has_its_own(
    tmp_path: Path, status: Status, gpu: Gpu, engines: list[str], left: int
) -> None:
    """Nor is it kept where no engine is up: the one that comes will look at what is free."""
    turn = TrainerTurn(tmp_path / "turns", torch.device("cuda"), status)
    turn._peak = 0
    gpu.allocated = 10_000
    others = [Turn(tmp_path / "turns", trainer=False) for _ in engines]
    with turn.taken(never) as is_ours:
        assert is_ours
        for other, does in zip(others, engines, strict=True):  # the first turn may come before an engine is up
            other.keep_cache()
            if does == "lends":
                other.lend_cache()
        gpu.compute(40_000)
    assert gpu.reserved == left
