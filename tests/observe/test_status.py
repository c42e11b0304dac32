"""Status files of processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.observe.status import ProcessStatus, Progress, Status, StatusReader


def written(status: Status) -> ProcessStatus:
    status.notify("written now")
    return StatusReader(status.path.parent).read()[status.current.process]


def test_progress_belongs_to_a_state_and_has_the_time_of_its_last_change(tmp_path: Path) -> None:
    status = Status(tmp_path, "trainer", interval=60.0)
    status.set("training step 1")
    status.advance("micro-batch", 1, 7)
    first = status.current.progress
    assert first == Progress("micro-batch", 1, 7, first.since if first else 0.0)
    status.advance("micro-batch", 1, 7)
    assert status.current.progress is first
    status.set("training step 2")
    assert written(status).progress is None
    status.close("finished")


def test_a_problem_keeps_the_time_at_which_it_began_while_its_text_changes(tmp_path: Path) -> None:
    status = Status(tmp_path, "orchestrator", interval=60.0)
    status.set_problem("1 batch had nothing to train on")
    began = status.current.problem_since
    assert began > 0
    status.set_problem("2 batches in a row had nothing to train on")
    assert status.current.problem_since == began
    status.set_problem("")
    assert written(status).problem == ""
    status.set_problem("1 batch had nothing to train on")
    assert status.current.problem_since > began
    status.close("finished")
    assert StatusReader(tmp_path).read()["orchestrator"].problem == ""


class Clocks:
    """The clocks of a machine: a wall clock that can be set, and a monotonic one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall, self.monotonic = 1.8e9, 500.0
        monkeypatch.setattr("time.time", lambda: self.wall)
        monkeypatch.setattr("time.monotonic", lambda: self.monotonic)

    def advance(self, seconds: float) -> None:
        self.wall += seconds
        self.monotonic += seconds


@pytest.mark.parametrize("jump_s", [172_800.0, -172_800.0, 0.0])
def test_setting_the_wall_clock_changes_no_age_and_reports_no_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    clocks = Clocks(monkeypatch)
    status = Status(tmp_path, "trainer", interval=3600.0)
    reader = StatusReader(tmp_path, lambda: clocks.monotonic)
    status.set("training")
    status.begin_wait("batch 7 from the orchestrator")
    status.set_problem("every reward was 0")
    status.advance("micro-batch", 1, 7)
    for second in range(50):
        written(status)
        seen = reader.read()["trainer"]
        assert seen.silent_s == 0.0
        ages = [seen.age(since) for since in (seen.waiting_since, seen.problem_since, seen.progress.since)]
        assert ages == pytest.approx([second] * 3, abs=1e-5)  # rounding: a wall clock has 1e-7 s
        assert seen.clock_jump_s == pytest.approx(jump_s if second > 20 else 0.0, abs=1e-5)
        clocks.advance(1.0)
        if second == 20:
            clocks.wall += jump_s
    status.close("failed")
    reader.read()
    clocks.advance(30.0)
    clocks.wall += jump_s
    assert reader.read()["trainer"].silent_s == pytest.approx(30.0)
