"""Turns on a shared device: who may compute, who comes next, and what a kill leaves behind."""

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

from headrace.transport.turns import Turn

PARTY = Path(__file__).parent / "turn_party.py"


@pytest.fixture
def trainer(tmp_path: Path) -> Turn:
    return Turn(tmp_path, trainer=True)


@pytest.fixture
def engine(tmp_path: Path) -> Turn:
    return Turn(tmp_path, trainer=False)


class Party:
    """A side in a process of its own."""

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
def party(directory: Path, side: str) -> Iterator[Party]:
    process = subprocess.Popen(
        [sys.executable, str(PARTY), str(directory), side], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield Party(process)
    finally:
        process.kill()
        process.communicate()


def takes(turn: Turn) -> bool:
    """Whether the turn comes to one that waits for it."""
    deadline = time.monotonic() + 10
    while not turn.try_take():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def test_the_trainer_computes_alone_and_engines_together(tmp_path: Path, trainer: Turn, engine: Turn) -> None:
    other = Turn(tmp_path, trainer=False)
    assert engine.try_take() and other.try_take()
    assert not trainer.try_take()
    engine.leave()
    assert not trainer.try_take()
    other.leave()
    assert trainer.try_take() and trainer.is_ours
    assert not engine.try_take() and not other.try_take()


def test_an_engine_sees_that_the_trainer_waits_and_what_it_needs(trainer: Turn, engine: Turn) -> None:
    engine.try_take()
    assert not engine.is_wanted
    trainer.ask_for(123 << 30)
    assert not engine.is_wanted
    trainer.try_take()
    assert engine.is_wanted and engine.wanted_memory == 123 << 30
    engine.leave()
    assert trainer.try_take()
    trainer.leave()
    engine.try_take()
    trainer.ask_for(None)
    trainer.try_take()
    assert engine.is_wanted and engine.wanted_memory is None


def test_whoever_waits_is_not_passed_by_the_other_side(trainer: Turn, engine: Turn) -> None:
    engine.try_take()
    for _ in range(3):
        assert not trainer.try_take()
        engine.leave()
        assert not engine.try_take()  # the trainer had asked before
        assert trainer.try_take()
        assert not engine.try_take()
        trainer.leave()
        assert not trainer.try_take()  # and now the engine had
        assert engine.try_take()


def test_an_engine_that_waits_is_not_taken_for_a_trainer_that_does(tmp_path: Path, trainer: Turn, engine: Turn) -> None:
    other = Turn(tmp_path, trainer=False)
    trainer.try_take()
    assert not engine.try_take() and not other.try_take()
    trainer.leave()
    assert engine.try_take()
    assert not engine.is_wanted  # though the other one still has its hand up
    assert other.try_take()


def test_whoever_stops_waiting_holds_nobody_up(trainer: Turn, engine: Turn) -> None:
    engine.try_take()
    trainer.try_take()
    trainer.leave()
    assert not engine.is_wanted
    engine.leave()
    trainer.try_take()
    engine.try_take()
    engine.close()
    trainer.leave()
    assert trainer.try_take()


def test_a_cache_is_kept_until_it_is_given_up_or_its_owner_is_gone(tmp_path: Path, trainer: Turn, engine: Turn) -> None:
    assert not trainer.cache_is_kept and not trainer.is_all_kept
    engine.keep_cache()
    engine.keep_cache()
    assert trainer.cache_is_kept and trainer.is_all_kept
    with party(tmp_path, "engine") as other:
        assert other.ask("keep") == "kept"
        engine.lend_cache()
        assert trainer.cache_is_kept and not trainer.is_all_kept
        other.kill()
    assert not trainer.cache_is_kept and not trainer.is_all_kept
    engine.keep_cache()
    assert trainer.is_all_kept


def test_a_look_of_the_trainer_is_in_no_engines_way(tmp_path: Path, trainer: Turn, engine: Turn) -> None:
    with open(tmp_path / "cache") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # what a look is, for longer
        end = threading.Timer(0.05, fcntl.flock, (file, fcntl.LOCK_UN))
        end.start()
        engine.keep_cache()
        end.join()
        assert trainer.cache_is_kept


@pytest.mark.parametrize(("side", "state"), [(s, n) for s in ("trainer", "engine") for n in ("has it", "waits")])
def test_a_side_that_is_killed_leaves_the_turn_to_the_other(
    tmp_path: Path, trainer: Turn, engine: Turn, side: str, state: str
) -> None:
    ours = trainer if side == "engine" else engine
    with party(tmp_path, side) as killed:
        if state == "waits":
            assert ours.try_take()
        assert killed.ask("take") == str(state == "has it")
        if state == "has it":
            assert not ours.try_take()
        killed.kill()
        assert takes(ours) and not engine.is_wanted
        ours.leave()
        assert takes(ours)  # nobody is in the way of a second turn, either
        ours.leave()
        with party(tmp_path, side) as again:
            assert again.ask("take") == "True"


def test_many_turns_of_three_processes_never_overlap(tmp_path: Path) -> None:
    with party(tmp_path, "trainer") as trainer, party(tmp_path, "engine") as one, party(tmp_path, "engine") as two:
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
