"""The supervisor over real processes that crash, hang, ignore signals or are left alone."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from headrace.launch.errors import BadRequest
from headrace.launch.run_directory import hold
from tests.launch.launching import assert_all_gone, events, finish, launch, next_line, pids, wait_for_start
from tests.refusals import refused

ALL_WORK = ("inference=works", "trainer=works", "orchestrator=works")


def test_a_run_whose_workers_finish_says_once_what_they_notified_ends_with_0_and_stops_the_service(
    tmp_path: Path,
) -> None:
    code, out, _ = finish(launch(tmp_path, "inference=works", "trainer=finishes", "orchestrator=finishes"))
    assert code == 0
    assert "step 1/5" in out
    assert [out.count(f"{name}: {name} has something to say") for name in ("trainer", "orchestrator")] == [1, 1]
    assert events(tmp_path)[-1][:2] == ["inference", "ended"]
    assert_all_gone(tmp_path)


def test_a_crash_stops_the_others_and_shows_who_how_and_the_last_lines(tmp_path: Path) -> None:
    code, _, err = finish(launch(tmp_path, "inference=works", "trainer=crash", "orchestrator=works"))
    assert code == 1
    assert "headrace: trainer ended with exit status 3" in err
    assert f"{tmp_path}/logs/trainer.log" in err
    assert "the flux capacitor is missing" in err
    assert "line 39" in err
    assert "line 20" not in err
    ended = [name for name, event, _ in events(tmp_path) if event == "ended"]
    assert sorted(ended) == ["inference", "orchestrator"]
    assert_all_gone(tmp_path)


def test_a_process_that_set_a_damaged_file_aside_ends_the_others_for_a_restart_of_all(tmp_path: Path) -> None:
    code, _, err = finish(launch(tmp_path, "inference=works", "trainer=sets-aside", "orchestrator=works"))
    assert code == 1
    assert "headrace: trainer set a damaged file aside" in err
    assert [name for name, event, _ in events(tmp_path) if event == "started"].count("trainer") == 1
    assert_all_gone(tmp_path)


def test_a_service_that_ends_early_is_a_failure_even_with_exit_status_0(tmp_path: Path) -> None:
    code, _, err = finish(launch(tmp_path, "inference=finishes", "trainer=works"))
    assert code == 1
    assert "headrace: inference ended with exit status 0" in err
    assert_all_gone(tmp_path)


def test_what_a_crashed_process_had_started_does_not_stay_behind(tmp_path: Path) -> None:
    code, _, _ = finish(launch(tmp_path, "inference=works", "trainer=parent"))
    assert code == 1
    assert any(name == "grandchild" for name, _, _ in events(tmp_path))
    assert_all_gone(tmp_path)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_orchestrator_trainer_and_inference_in_this_order(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    launcher = launch(tmp_path, *ALL_WORK)
    wait_for_start(tmp_path, 3)
    launcher.send_signal(number)
    ended, out, _ = finish(launcher)
    assert ended == code
    assert "did not stop" not in out
    assert [name for name, event, _ in events(tmp_path) if event == "ended"] == ["orchestrator", "trainer", "inference"]
    assert_all_gone(tmp_path)


@pytest.mark.parametrize(
    ("receiver", "number", "options"),
    [
        ("launcher", signal.SIGUSR1, []),
        ("trainer", signal.SIGUSR1, []),
        ("launcher", signal.SIGTERM, ["save_on_sigterm=1"]),
    ],
)
def test_a_signal_saves_the_trainer_before_the_others_end_in_order(
    tmp_path: Path, receiver: str, number: signal.Signals, options: list[str]
) -> None:
    launcher = launch(tmp_path, *ALL_WORK, *options)
    wait_for_start(tmp_path, 3)
    trainer = next(int(pid) for name, event, pid in events(tmp_path) if (name, event) == ("trainer", "started"))
    os.kill(trainer if receiver == "trainer" else launcher.pid, number)
    code, out, _ = finish(launcher)
    assert code == 128 + number
    assert "restarting it" not in out
    last = [(name, event) for name, event, _ in events(tmp_path)][-3:]
    assert last == [("trainer", "saved"), ("orchestrator", "ended"), ("inference", "ended")]
    assert_all_gone(tmp_path)


def test_one_that_ignores_sigterm_is_killed_and_the_others_still_end_in_order(tmp_path: Path) -> None:
    launcher = launch(tmp_path, "inference=works", "trainer=stubborn", "orchestrator=works", "stop_timeout=3")
    wait_for_start(tmp_path, 3)
    launcher.terminate()
    code, out, _ = finish(launcher)
    assert code == 143
    assert "trainer did not stop and is killed" in out
    assert [name for name, event, _ in events(tmp_path) if event == "ended"] == ["orchestrator", "inference"]
    assert_all_gone(tmp_path)


def test_a_second_signal_ends_the_patience(tmp_path: Path) -> None:
    launcher = launch(tmp_path, "inference=stubborn", "trainer=stubborn")
    wait_for_start(tmp_path, 2)
    launcher.send_signal(signal.SIGINT)
    next_line(launcher, "SIGINT: stopping")
    launcher.send_signal(signal.SIGINT)
    assert finish(launcher)[0] == 130
    assert_all_gone(tmp_path)


def test_ctrl_c_in_the_terminal_reaches_the_launcher_alone(tmp_path: Path) -> None:
    launcher = launch(tmp_path, *ALL_WORK)
    wait_for_start(tmp_path, 3)
    assert all(os.getpgid(pid) == pid for pid in pids(tmp_path))
    launcher.send_signal(signal.SIGINT)
    finish(launcher)


def test_a_launcher_killed_without_a_word_leaves_no_orphan(tmp_path: Path) -> None:
    launcher = launch(tmp_path, "inference=works", "trainer=stubborn", "orchestrator=works")
    wait_for_start(tmp_path, 3)
    launcher.kill()
    launcher.wait()
    assert_all_gone(tmp_path)
    assert sorted(name for name, event, _ in events(tmp_path) if event == "ended") == ["inference", "orchestrator"]


def test_a_run_whose_launcher_was_killed_is_free_again_once_its_last_process_has_ended(tmp_path: Path) -> None:
    launcher = launch(tmp_path, "inference=works", "trainer=stubborn")
    wait_for_start(tmp_path, 2)
    with refused(BadRequest, key="output_dir", value=tmp_path), hold(tmp_path):
        pass
    launcher.kill()
    launcher.wait()
    with hold(tmp_path):  # waits
        assert_all_gone(tmp_path)


def test_a_process_that_does_not_come_up_in_time_is_named(tmp_path: Path) -> None:
    code, _, err = finish(launch(tmp_path, "inference=works", "trainer=never-up", "start_timeout=1.5"))
    assert code == 1
    assert re.search(r"not up after 2 s \(launch.start_timeout\): .*trainer \(", err)
    assert_all_gone(tmp_path)


def test_when_nothing_moves_one_sentence_says_who_waits_for_whom(tmp_path: Path) -> None:
    launcher = launch(tmp_path, "inference=works", "trainer=waits", "stall_s=1.5")
    sentence = next_line(launcher, "run: no progress for")
    while "waiting for" not in sentence:  # on a busy machine the trainer may still be starting
        sentence = next_line(launcher, "run: no progress for")
    assert "trainer: working, waiting for batch 7 from the orchestrator" in sentence
    launcher.terminate()
    finish(launcher)


def test_a_process_without_heartbeat_is_named(tmp_path: Path) -> None:
    launcher = launch(tmp_path, "inference=works", "trainer=frozen", "stall_s=1")
    while "thinking" not in (sentence := next_line(launcher, "trainer: no heartbeat")):
        pass  # a busy machine delays heartbeats
    assert re.search(r"trainer: .* \d+ s; .*: thinking", sentence)
    launcher.terminate()
    finish(launcher)


@pytest.mark.parametrize("days", [2, -2])
def test_a_process_whose_wall_clock_is_set_is_not_called_silent(tmp_path: Path, days: int) -> None:
    (tmp_path / "days").write_text(str(days))
    code, out, _ = finish(launch(tmp_path, "trainer=clock-is-set"))
    assert code == 0
    assert "heartbeat" not in out and "no progress" not in out


def test_a_process_that_failed_but_does_not_end_is_ended_and_ends_the_run(tmp_path: Path) -> None:
    code, out, err = finish(launch(tmp_path, "inference=works", "trainer=fails-but-stays", "stop_timeout=1"))
    assert code == 1
    assert "trainer was ended by SIGKILL" in err
    assert "restarting it" not in out
