"""What is seen of the runs while they run."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from headrace.tools.sweep.record import State
from headrace.tools.sweep.runner import RunProgress, SweepView, progress_table
from tests.observe.runs import write_run


def progress(directory: Path, name: str, state: State, rewards: list[float]) -> RunProgress:
    if rewards:
        write_run(directory / name, rewards)
    return RunProgress(name, directory / name, state, 4)


def drawn(runs: list[RunProgress]) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(progress_table("lr-sweep", runs))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_every_run_has_its_state_step_reward_and_time(tmp_path: Path):
    runs = [progress(tmp_path, "lr=1", "running", [0.25, 0.5]), progress(tmp_path, "lr=2", "waiting", [])]
    first, second = [line.split("│")[1:-1] for line in drawn(runs).splitlines() if "lr=" in line]
    assert [cell.strip() for cell in first] == ["lr=1", "running", "2/4", "0.500", "4 s"]
    assert [cell.strip() for cell in second] == ["lr=2", "waiting", "0/4", "", ""]
    assert "lr-sweep: 0 of 2 finished" in drawn(runs)


def test_of_many_runs_those_are_shown_that_run_or_have_failed(tmp_path: Path):
    states: list[State] = ["finished"] * 20 + ["running", "failed", "waiting"]
    picture = drawn([progress(tmp_path, f"run-{number}", state, []) for number, state in enumerate(states)])
    assert "20 of 23 finished, 1 failed" in picture
    assert "run-20" in picture and "run-21" in picture
    assert "run-19" not in picture and "run-22" not in picture


def test_without_a_terminal_a_line_now_and_then_shows_how_far_runs_have_come(tmp_path: Path):
    console = Console(file=io.StringIO(), width=40)
    view = SweepView("lr-sweep", [progress(tmp_path, f"lr={n}", "running", [0.25, 0.5]) for n in (1, 2)], console)
    view.show()
    view.show()  # too soon for another
    view.close()
    assert console.file.getvalue() == "0 of 2 finished; lr=1 2/4 0.500; lr=2 2/4 0.500\n"  # type: ignore[attr-defined]
