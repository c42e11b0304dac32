"""What is said when a run goes on with other tasks."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from headrace.config.orchestrator import EnvConfig
from headrace.environments.base import Environment, tasks_of
from headrace.observe.status import Status
from headrace.orchestrator.signals import Kind
from headrace.orchestrator.wiring import Environments, notify_changed_tasks
from headrace.transport.journal import Journal, fork


class Sums(Environment):
    def __init__(self, *sums: str) -> None:
        self._sums = sums

    def tasks(self) -> Iterator[dict[str, str]]:
        return ({"key": str(number), "sum": text} for number, text in enumerate(self._sums))


def environments(train: Sums, evaluated: Sums) -> Environments:
    entry = EnvConfig(id="sums")
    return {
        (kind, "sums"): (entry, environment, tasks_of(environment, "sums"))
        for kind, environment in ((Kind.TRAIN, train), (Kind.EVAL, evaluated))
    }


def start(tmp_path: Path, train: Sums, evaluated: Sums, journal: str = "journal.sqlite") -> list[str]:
    """What an orchestrator that starts now has to say."""
    status = Status(tmp_path / "status", "orchestrator")
    with closing(Journal(tmp_path / journal)) as opened:
        notify_changed_tasks(environments(train, evaluated), opened, status)
    status.close("finished")
    return status.current.notices


def test_a_run_that_goes_on_with_its_tasks_says_nothing(tmp_path: Path):
    assert start(tmp_path, Sums("1+1", "1+2"), Sums("2+2")) == []
    assert start(tmp_path, Sums("1+1", "1+2"), Sums("2+2")) == []


def test_changed_tasks_are_logged_once_in_log_and_status_with_what_follows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    start(tmp_path, Sums("1+1", "1+2"), Sums("2+2"))
    train, evaluated = start(tmp_path, Sums("1+1"), Sums("2+3"))
    changed = "environment 'sums' have changed since the run last started"
    assert train.startswith(f"the tasks of the train {changed}: 2 examples before, 1 now.")
    assert "output_dir" in train
    assert evaluated.startswith(f"the tasks of the eval {changed}: still 1 examples")
    assert train in caplog.text and evaluated in caplog.text
    assert start(tmp_path, Sums("1+1"), Sums("2+3")) == []


def test_a_run_that_is_forked_knows_the_tasks_of_its_origin(tmp_path: Path):
    start(tmp_path, Sums("1+1", "1+2"), Sums("2+2"))
    fork(tmp_path / "journal.sqlite", tmp_path / "fork.sqlite", 0)
    assert len(start(tmp_path, Sums("1+1"), Sums("2+2"), "fork.sqlite")) == 1
