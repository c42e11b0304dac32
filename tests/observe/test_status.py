"""Status files of processes."""

from __future__ import annotations

from pathlib import Path

from headrace.observe.status import ProcessStatus, Progress, Status, read_status


def written(status: Status) -> ProcessStatus:
    status.notify("written now")
    return read_status(status.path.parent)[status.current.process]


def test_progress_belongs_to_a_state_and_has_the_time_of_its_last_change(tmp_path: Path) -> None:
    status = Status(tmp_path, "trainer", interval=60.0)
    status.set("training step 1")
    status.advance("micro-batch", 1, 7)
    first = written(status).progress
    assert first == Progress("micro-batch", 1, 7, first.since if first else 0.0)
    status.advance("micro-batch", 1, 7)
    assert written(status).progress == first
    status.set("training step 2")
    assert written(status).progress is None
    status.close("finished")


def test_a_problem_keeps_the_time_at_which_it_began_while_its_text_changes(tmp_path: Path) -> None:
    status = Status(tmp_path, "orchestrator", interval=60.0)
    status.set_problem("1 batch had nothing to train on")
    began = written(status).problem_since
    assert began > 0
    status.set_problem("2 batches in a row had nothing to train on")
    assert written(status).problem_since == began
    status.set_problem("")
    assert written(status).problem == ""
    status.set_problem("1 batch had nothing to train on")
    assert written(status).problem_since > began
    status.close("finished")
    assert read_status(tmp_path)["orchestrator"].problem == ""
