"""The journal: states of a draw, restarts, forks, and that everything else is a fold over the draws."""

import os
import sqlite3
from pathlib import Path

import pytest

from headrace.errors import BadInput, Failure
from headrace.transport.journal import (
    AlgorithmState,
    Clock,
    Draw,
    Entries,
    Journal,
    Outcome,
    Totals,
    fork,
    network_file_system,
)
from tests.refusals import refused


def draws(*ids: int) -> list[Draw]:
    return [Draw(i, "env", f"key{i}", i) for i in ids]


def learned(state: str, algorithm: str = "mine:Algorithm") -> AlgorithmState:
    return AlgorithmState(algorithm, state.encode())


def entries(drawn: list[Draw], *outcomes: Outcome, state: str | None = None, clock: Clock | None = None) -> Entries:
    return Entries(
        drawn,
        list(outcomes),
        Totals(),
        {} if state is None else {"env": learned(state)},
        clock or Clock(),
    )


def shipped(draw: int, rollouts: int = 4, tokens: int = 40, **drops: int) -> Outcome:
    return Outcome(draw, "", rollouts, tokens, drops, credit=draw, rewards=[("policy", float(draw))])


def dropped(draw: int, reason: str, rollouts: int = 4) -> Outcome:
    return Outcome(draw, reason, rollouts, 10 * rollouts, {reason: rollouts})


def test_a_draw_is_shipped_then_trained_or_dropped_with_its_reason(tmp_path: Path):
    journal = Journal(tmp_path / "journal.sqlite")
    journal.commit(entries(draws(0, 1, 2, 3), shipped(0), shipped(1), dropped(2, "zero_advantage")), shipped=1)
    assert journal.states() == {"shipped": 2, "dropped:zero_advantage": 1, "drawn": 1}
    journal.mark_trained(1)
    assert journal.states() == {"trained": 2, "dropped:zero_advantage": 1, "drawn": 1}


def test_what_was_open_at_a_crash_is_open_again_under_the_same_id(tmp_path: Path):
    path = tmp_path / "journal.sqlite"
    first = Journal(path)
    first.commit(entries(draws(0, 1, 2), shipped(1, timeout=1), clock=Clock(12.5, 99)), shipped=1)
    # No close: the process was killed.
    second = Journal(path)
    assert second.open_draws() == draws(0, 2)
    assert second.last_step() == 1
    assert second.totals() == Totals(4, 40, {"timeout": 1})
    assert second.clock() == Clock(12.5, 99)
    assert second.next_credit() == 2
    assert second.drawn_per_env() == {"env": 3}


def test_totals_are_the_sum_over_the_outcomes_of_the_steps_asked_for(tmp_path: Path):
    journal = Journal(tmp_path / "journal.sqlite")
    journal.commit(entries(draws(0, 1), shipped(0, timeout=1), dropped(1, "off_policy")), shipped=1)
    journal.commit(entries(draws(2), dropped(2, "off_policy", rollouts=3)))  # while step 2 is collected
    assert journal.totals(through=1) == Totals(8, 80, {"timeout": 1, "off_policy": 4})
    assert journal.totals() == Totals(11, 110, {"timeout": 1, "off_policy": 7})


def test_a_draw_that_is_drawn_again_keeps_one_record(tmp_path: Path):
    journal = Journal(tmp_path / "journal.sqlite")
    journal.commit(entries(draws(0, 1)))
    journal.commit(entries(draws(0), shipped(0)), shipped=1)
    assert journal.states() == {"shipped": 1, "drawn": 1}


def test_an_outcome_is_recorded_once_or_not_at_all(tmp_path: Path):
    journal = Journal(tmp_path / "journal.sqlite")
    journal.commit(entries(draws(0), shipped(0)), shipped=1)
    with pytest.raises(RuntimeError, match="draw 0"):
        journal.commit(entries(draws(1), dropped(0, "off_policy"), dropped(1, "off_policy")))
    assert journal.states() == {"shipped": 1}
    with pytest.raises(RuntimeError, match="draw 7"):
        journal.commit(entries([], shipped(7)), shipped=2)
    assert journal.last_step() == 1


def test_a_fork_reopens_what_shipped_after_its_step_and_takes_state_and_totals_back(tmp_path: Path):
    journal = Journal(tmp_path / "journal.sqlite")
    for step in (1, 2, 3):
        first, second = 2 * step - 2, 2 * step - 1
        outcomes = [shipped(first), dropped(second, "zero_advantage")]
        seconds = Clock(seconds=float(step))
        journal.commit(entries(draws(first, second), *outcomes, state=f"[{step}]", clock=seconds), shipped=step)
    journal.mark_trained(2)
    fork(tmp_path / "journal.sqlite", tmp_path / "fork" / "journal.sqlite", step=1)
    copy = Journal(tmp_path / "fork" / "journal.sqlite")
    assert copy.last_step() == 1
    assert copy.open_draws() == draws(2, 3, 4, 5)
    assert copy.states() == {"trained": 1, "dropped:zero_advantage": 1, "drawn": 4}
    assert copy.totals() == Totals(8, 80, {"zero_advantage": 4})
    assert copy.algorithm_states() == {"env": learned("[1]")}
    assert copy.clock().seconds == 1.0
    assert copy.next_credit() == 1
    assert journal.last_step() == 3
    assert journal.algorithm_states() == {"env": learned("[3]")}


def test_a_state_committed_between_two_steps_is_the_newest(tmp_path: Path):
    journal = Journal(tmp_path / "journal.sqlite")
    journal.commit(entries(draws(0), shipped(0), state="1"), shipped=1)
    journal.commit(entries(draws(1), dropped(1, "zero_advantage"), state="2"))
    assert journal.algorithm_states() == {"env": learned("2")}
    journal.rewind(1)
    assert journal.algorithm_states() == {"env": learned("1")}
    assert journal.open_draws() == draws(1)


def test_rewards_come_back_in_the_order_of_credit(tmp_path: Path):
    journal = Journal(tmp_path / "journal.sqlite")
    late, early = (Outcome(i, "", 1, 1, {}, credit, [("a", float(i))]) for i, credit in ((0, 1), (1, 0)))
    journal.commit(entries(draws(0, 1), late, early), shipped=1)
    assert list(journal.credits()) == [(1, "env", [("a", 1.0)]), (0, "env", [("a", 0.0)])]


def test_lessons_are_in_the_order_of_credit_and_tell_failures_from_what_was_given_up(tmp_path: Path):
    journal = Journal(tmp_path / "journal.sqlite")
    late, early = (Outcome(i, "", 1, 1, {}, credit, [("a", float(i)), ("b", 0.5)]) for i, credit in ((0, 1), (1, 0)))
    partly = Outcome(4, "timeout", 2, 0, {"timeout": 1, "group_failed": 1})
    outcomes = [late, early, dropped(2, "timeout", rollouts=3), dropped(3, "on_policy"), partly]
    journal.commit(entries(draws(0, 1, 2, 3, 4, 5), *outcomes), shipped=1)
    lessons = [(lesson.draw, lesson.task_key, lesson.rewards, lesson.failed) for lesson in journal.lessons()]
    assert lessons == [
        (1, "key1", [1.0, 0.5], 0),
        (0, "key0", [0.0, 0.5], 0),
        (2, "key2", [], 3),
        (3, "key3", [], 0),
        (4, "key4", [], 0),
    ]


def test_a_step_that_was_begun_can_be_opened_again_and_the_clock_goes_on(tmp_path: Path):
    journal = Journal(tmp_path / "journal.sqlite")
    journal.commit(entries(draws(0), shipped(0), state="1", clock=Clock(1.0)), shipped=1)
    journal.commit(entries(draws(1, 2), dropped(1, "gated"), state="2", clock=Clock(5.0, 7)))
    journal.reopen()
    assert journal.open_draws() == draws(1, 2)
    assert journal.algorithm_states() == {"env": learned("1")}
    assert journal.totals() == Totals(4, 40, {})
    assert journal.clock() == Clock(5.0, 7)


def test_drops_are_counted_by_environment(tmp_path: Path):
    journal = Journal(tmp_path / "journal.sqlite")
    drawn = [Draw(0, "a", "x", 0), Draw(1, "b", "y", 0), Draw(2, "a", "z", 1)]
    outcomes = [dropped(0, "timeout", 2), dropped(1, "timeout", 3), dropped(2, "gated", 4)]
    journal.commit(entries(drawn, *outcomes))
    assert journal.drops_per_env() == {"a": {"timeout": 2, "gated": 4}, "b": {"timeout": 3}}


def test_a_commit_that_would_leave_out_a_draw_is_refused(tmp_path: Path):
    journal = Journal(tmp_path / "journal.sqlite")
    journal.commit(entries(draws(0, 1)))
    with pytest.raises(RuntimeError, match=r"\b2\b.*\[3\]"):
        journal.commit(entries(draws(3)))
    assert journal.drawn_per_env() == {"env": 2}


def test_a_local_disk_is_no_network_file_system(tmp_path: Path):
    assert network_file_system(tmp_path) is None


def test_what_is_still_open_at_the_end_of_a_run_is_dropped_with_a_reason(tmp_path: Path):
    journal = Journal(tmp_path / "journal.sqlite")
    journal.commit(entries(draws(0, 1), shipped(0)), shipped=1)
    journal.drop_open("max_steps")
    assert journal.states() == {"shipped": 1, "dropped:max_steps": 1}


@pytest.mark.parametrize("read_only", [True, False])
def test_a_damaged_journal_is_refused_with_what_to_do(read_only: bool, tmp_path: Path):
    path = tmp_path / "journal.sqlite"
    Journal(path).close()
    os.truncate(path, 4096)
    with refused(BadInput, file=path):
        Journal(path, read_only=read_only)


@pytest.mark.parametrize(("version", "says"), [(1, "written by an older Headrace"), (99, "newer version")])
def test_a_journal_of_another_time_is_refused(version: int, says: str, tmp_path: Path):
    with sqlite3.connect(tmp_path / "journal.sqlite") as db:
        db.execute(f"PRAGMA user_version={version}")
    with pytest.raises((Failure, ValueError), match=says):
        Journal(tmp_path / "journal.sqlite")


def test_every_start_of_a_run_has_a_number_of_its_own_whatever_is_rewound(tmp_path: Path):
    path = tmp_path / "journal.sqlite"
    first = Journal(path)
    assert first.start() == 1
    first.commit(entries(draws(0), shipped(0)), shipped=1)
    second = Journal(path)
    assert second.start() == 2
    second.rewind(0)
    assert Journal(path).start() == 3
    fork(path, tmp_path / "fork" / "journal.sqlite", step=0)
    assert Journal(tmp_path / "fork" / "journal.sqlite").start() == 4
