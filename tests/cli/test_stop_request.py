"""When a process that is asked to stop does so."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.cli.processes import StopRequest
from headrace.observe.status import Status


@pytest.fixture
def status(tmp_path: Path) -> Iterator[Status]:
    """Of a process whose handlers of signals are put back afterwards."""
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    status = Status(tmp_path, "trainer")
    yield status
    status.close("finished")
    for number, handler in previous.items():
        signal.signal(number, handler)


def test_a_process_at_work_stops_when_it_can(status: Status) -> None:
    request = StopRequest(status)
    status.set("training")
    os.kill(os.getpid(), signal.SIGTERM)
    assert request.stopped.is_set()
    assert request.exit_code == 128 + signal.SIGTERM


@pytest.mark.parametrize("state", ["starting", "loading model"])
def test_a_process_that_has_not_begun_ends_at_once(state: str, status: Status, monkeypatch: pytest.MonkeyPatch) -> None:
    StopRequest(status)
    status.set(state)
    ended: list[tuple[int, int, object]] = []
    kill = os.kill
    monkeypatch.setattr(os, "kill", lambda pid, number: ended.append((pid, number, signal.getsignal(number))))
    kill(os.getpid(), signal.SIGTERM)
    assert ended == [(os.getpid(), signal.SIGTERM, signal.SIG_DFL)]
