"""Which process is started again and when: the rule on a clock of its own, then the supervisor over real processes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from headrace.launch.restarts import MAX_RESTART_DELAY_S, Restarts
from headrace.observe.metrics import History
from tests.launch.launching import (
    assert_all_gone,
    events,
    finish,
    is_alive,
    launch,
    next_line,
    wait_for_start,
)


def trained(*steps: int) -> History:
    return History([{"step": step, "time": 0.0, "loss": 0.5} for step in steps])


def starts_of(run: Path, name: str) -> int:
    return sum(event[:2] == [name, "started"] for event in events(run))


# -- the rule -----------------------------------------------------------------------------------------------------


def test_the_wait_grows_with_every_restart_in_a_row_up_to_a_limit() -> None:
    restarts = Restarts(most=100)
    assert [restarts.schedule("trainer", 0.0) for _ in range(4)] == [0, 1, 2, 3]
    assert max(restarts.schedule("trainer", 0.0) for _ in range(90)) == MAX_RESTART_DELAY_S


def test_a_process_is_due_when_its_wait_is_over_and_only_once() -> None:
    restarts = Restarts(most=3)
    restarts.schedule("trainer", 10.0)
    assert restarts.take_due(10.0) == ["trainer"]
    restarts.schedule("trainer", 20.0)
    assert "trainer" in restarts.due
    assert [restarts.take_due(now) for now in (20.9, 21.0, 22.0)] == [[], ["trainer"], []]
    assert "trainer" not in restarts.due


def test_each_process_has_its_own_count() -> None:
    restarts = Restarts(most=1)
    restarts.schedule("trainer", 0.0)
    assert not restarts.allows("trainer")
    assert restarts.allows("inference")


def test_progress_clears_the_count() -> None:
    restarts = Restarts(most=1)
    restarts.record_progress(trained(1))
    restarts.schedule("trainer", 0.0)
    restarts.record_progress(trained(1, 2))
    assert restarts.allows("trainer")


def test_steps_that_are_trained_again_are_no_progress() -> None:
    restarts = Restarts(most=1)
    restarts.record_progress(trained(1, 2, 3))
    restarts.schedule("trainer", 0.0)
    restarts.record_progress(trained(1, 2, 3, 1))
    restarts.record_progress(trained(1, 2, 3, 1, 2, 3))
    assert not restarts.allows("trainer")
    restarts.record_progress(trained(1, 2, 3, 1, 2, 3, 4))
    assert restarts.allows("trainer")


def test_a_closed_evaluation_is_progress() -> None:
    restarts = Restarts(most=1)
    restarts.schedule("inference", 0.0)
    restarts.record_progress(History([{"step": 0, "time": 0.0, "eval/letters/avg@1": 0.5}]))
    assert restarts.allows("inference")


# -- real processes -----------------------------------------------------------------------------------------------


def test_a_killed_process_is_restarted_alone_with_resume(tmp_path: Path) -> None:
    code, out, _ = finish(launch(tmp_path, "inference=works", "trainer=killed-then-finishes", "orchestrator=finishes"))
    assert code == 0
    assert "trainer was ended by SIGKILL; restarting it (1 of 3)" in out
    assert [starts_of(tmp_path, name) for name in ("inference", "trainer", "orchestrator")] == [1, 2, 1]
    assert [name for name, event, _ in events(tmp_path) if event == "resumed"] == ["trainer"]
    assert_all_gone(tmp_path)


def test_what_a_killed_process_had_started_is_gone_before_the_next_one_works(tmp_path: Path) -> None:
    launcher = launch(tmp_path, "inference=works", "trainer=killed-then-works", "orchestrator=works")
    wait_for_start(tmp_path, 5)  # with the grandchild, and the second trainer
    grandchildren = [int(pid) for name, _, pid in events(tmp_path) if name == "grandchild"]
    assert len(grandchildren) == 1
    assert not is_alive(grandchildren[0])
    launcher.terminate()
    finish(launcher)
    assert_all_gone(tmp_path)


def test_a_restarted_server_finds_neither_address_nor_status_of_the_dead_one(tmp_path: Path) -> None:
    launcher = launch(tmp_path, "inference=killed-then-works", "trainer=works")
    wait_for_start(tmp_path, 3)
    found = [event for name, event, _ in events(tmp_path) if name == "inference" and event.startswith("finds")]
    assert found == ["finds-nothing", "finds-nothing"]
    launcher.terminate()
    assert finish(launcher)[0] == 143
    ended = [name for name, event, _ in events(tmp_path) if event == "ended"]
    assert ended == ["trainer", "inference"]  # in the order of their first start, last first


def test_one_that_is_killed_again_and_again_ends_the_run_with_the_end_of_its_last_log(tmp_path: Path) -> None:
    code, out, err = finish(launch(tmp_path, "inference=works", "trainer=killed", "max_restarts=2"))
    assert code == 1
    assert out.count("restarting it") == 2
    assert "restarting it in 0.1 s (2 of 2)" in out
    assert "headrace: trainer was ended by SIGKILL after 2 restarts" in err
    assert "start 3 ends here" in err
    assert "start 2 ends here" not in err
    assert_all_gone(tmp_path)


@pytest.mark.full
def test_repeating_the_same_step_does_not_count_as_progress(tmp_path: Path) -> None:
    code, _, err = finish(launch(tmp_path, "trainer=killed-after-the-same-step", "max_restarts=1"))
    assert code == 1
    assert "after 1 restart " in err


def test_a_run_that_gets_further_between_two_kills_goes_on(tmp_path: Path) -> None:
    code, out, _ = finish(launch(tmp_path, "trainer=killed-after-a-new-step", "max_restarts=1"))
    assert code == 0
    assert out.count("restarting it (1 of 1)") == 2
    assert starts_of(tmp_path, "trainer") == 3


def test_without_restarts_a_kill_ends_the_run_at_once(tmp_path: Path) -> None:
    code, out, err = finish(launch(tmp_path, "inference=killed", "trainer=works", "max_restarts=0"))
    assert code == 1
    assert "restarting it" not in out
    assert "headrace: inference was ended by SIGKILL; the end of" in err
    assert starts_of(tmp_path, "inference") == 1
    assert_all_gone(tmp_path)


def test_a_server_whose_engine_died_is_started_again_within_the_same_limits(tmp_path: Path) -> None:
    launcher = launch(tmp_path, "inference=engine-dies-then-works", "trainer=works")
    next_line(launcher, "inference ended because its engine died; restarting it (1 of 3)")
    wait_for_start(tmp_path, 3)
    launcher.terminate()
    assert finish(launcher)[0] == 143
    assert starts_of(tmp_path, "inference") == 2


def test_a_server_whose_engine_dies_again_and_again_ends_the_run_and_says_of_what(tmp_path: Path) -> None:
    code, out, err = finish(launch(tmp_path, "inference=engine-dies", "trainer=works", "max_restarts=1"))
    assert code == 1
    assert out.count("restarting it") == 1
    assert "inference ended because its engine died after 1 restart" in err
    assert "the engine died: out of memory" in err
    assert_all_gone(tmp_path)


@pytest.mark.parametrize(
    ("behaviour", "how"),
    [
        ("crash", "ended with exit status 3"),
        ("terminated", "was ended by SIGTERM"),
        ("fails-and-is-killed", "was ended by SIGKILL"),
    ],
)
def test_what_failed_or_was_asked_to_end_is_not_started_again(tmp_path: Path, behaviour: str, how: str) -> None:
    code, out, err = finish(launch(tmp_path, "inference=works", f"trainer={behaviour}"))
    assert code == 1
    assert f"headrace: trainer {how}" in err
    assert "restarting it" not in out
    assert starts_of(tmp_path, "trainer") == 1
    assert_all_gone(tmp_path)


@pytest.mark.full
def test_a_restarted_process_that_does_not_come_up_ends_the_run_by_name(tmp_path: Path) -> None:
    arguments = ("inference=works", "trainer=killed-then-never-up", "start_timeout=2")
    code, _, err = finish(launch(tmp_path, *arguments))
    assert code == 1
    assert "not up after 2 s (launch.start_timeout): trainer (starting)" in err
    assert starts_of(tmp_path, "trainer") == 2
    assert_all_gone(tmp_path)


def test_a_signal_ends_the_wait_for_a_restart_and_nothing_is_started_any_more(tmp_path: Path) -> None:
    launcher = launch(tmp_path, "inference=works", "trainer=killed", "restart_delay_s=60")
    next_line(launcher, "trainer was ended by SIGKILL; restarting it in 60 s (2 of 3)")
    launcher.send_signal(signal.SIGTERM)
    code, out, _ = finish(launcher)
    assert code == 143
    assert "SIGTERM: stopping inference\n" in out
    assert starts_of(tmp_path, "trainer") == 2
    assert_all_gone(tmp_path)


def test_a_launcher_killed_without_a_word_leaves_no_orphan_that_it_had_started_again(tmp_path: Path) -> None:
    launcher = launch(tmp_path, "inference=killed-then-works", "trainer=works")
    wait_for_start(tmp_path, 3)
    launcher.kill()
    launcher.wait()
    assert_all_gone(tmp_path)
