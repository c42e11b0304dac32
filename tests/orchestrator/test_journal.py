"""The journal: states of a draw, restarts, forks."""

from pathlib import Path

import pytest

from headrace.orchestrator.journal import Draw, Journal, Totals, fork


def draws(*ids: int) -> list[Draw]:
    return [Draw(i, "env", f"key{i}", i) for i in ids]


def test_a_draw_is_shipped_then_trained_or_dropped_with_its_reason(tmp_path: Path):
    journal = Journal(tmp_path / "journal.sqlite")
    journal.ship(1, draws(0, 1, 2, 3), shipped=[0, 1], dropped={2: "zero_advantage"}, totals=Totals(rollouts=32))
    assert journal.states() == {"shipped": 2, "dropped:zero_advantage": 1, "drawn": 1}
    journal.mark_trained(1)
    assert journal.states() == {"trained": 2, "dropped:zero_advantage": 1, "drawn": 1}


def test_what_was_open_at_a_crash_is_open_again_under_the_same_id(tmp_path: Path):
    path = tmp_path / "journal.sqlite"
    first = Journal(path)
    first.ship(1, draws(0, 1, 2), shipped=[1], dropped={}, totals=Totals(rollouts=8, dropped={"timeout": 1}))
    # No close: the process was killed.
    second = Journal(path)
    assert second.open_draws() == draws(0, 2)
    assert second.last_step() == 1
    assert second.totals() == Totals(rollouts=8, dropped={"timeout": 1})
    assert second.drawn_per_env() == {"env": 3}


def test_a_draw_that_is_drawn_again_keeps_one_record(tmp_path: Path):
    journal = Journal(tmp_path / "journal.sqlite")
    journal.close_session(draws(0, 1), {}, Totals())
    journal.ship(1, draws(0), shipped=[0], dropped={}, totals=Totals())
    assert journal.states() == {"shipped": 1, "drawn": 1}


def test_a_shipped_draw_cannot_be_dropped_afterwards(tmp_path: Path):
    journal = Journal(tmp_path / "journal.sqlite")
    journal.ship(1, draws(0), shipped=[0], dropped={}, totals=Totals())
    journal.close_session([], {0: "off_policy"}, Totals())
    assert journal.states() == {"shipped": 1}


def test_a_fork_reopens_what_shipped_after_its_step(tmp_path: Path):
    journal = Journal(tmp_path / "journal.sqlite")
    for step in (1, 2, 3):
        drops = {10 + step: "zero_advantage"}
        journal.ship(step, draws(step, 10 + step), shipped=[step], dropped=drops, totals=Totals(rollouts=step))
    journal.mark_trained(2)
    fork(tmp_path / "journal.sqlite", tmp_path / "fork" / "journal.sqlite", step=1)
    copy = Journal(tmp_path / "fork" / "journal.sqlite")
    assert copy.last_step() == 1
    assert copy.open_draws() == draws(2, 3, 12, 13)
    assert copy.states() == {"trained": 1, "dropped:zero_advantage": 1, "drawn": 4}
    assert journal.last_step() == 3


def test_a_failed_transaction_leaves_nothing_behind(tmp_path: Path):
    journal = Journal(tmp_path / "journal.sqlite")
    unserializable = Totals(dropped={"x": object()})  # type: ignore[dict-item]
    with pytest.raises(TypeError):
        journal.ship(1, draws(0), shipped=[0], dropped={}, totals=unserializable)
    assert journal.states() == {}
    assert journal.last_step() == 0


def test_what_is_still_open_at_the_end_of_a_run_is_dropped_with_a_reason(tmp_path: Path):
    journal = Journal(tmp_path / "journal.sqlite")
    journal.ship(1, draws(0, 1), shipped=[0], dropped={}, totals=Totals())
    journal.drop_open("max_steps")
    assert journal.states() == {"shipped": 1, "dropped:max_steps": 1}
