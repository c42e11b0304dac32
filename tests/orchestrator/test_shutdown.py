"""Environments that hang, or fail, when they start and close."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.environments.base import Environment
from headrace.observe.status import Status
from headrace.orchestrator import shutdown
from headrace.orchestrator.shutdown import EnvironmentLifecycle


class Diary(Environment):
    """Writes down what is done with it."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    async def start(self) -> None:
        self.lines.append("started")

    async def close(self) -> None:
        self.lines.append("closed")


class HangsAtTheEnd(Diary):
    async def close(self) -> None:
        self.lines.append("closing")
        await asyncio.Event().wait()


class HangsAtTheStart(Diary):
    async def start(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            self.lines.append("start ended")


class Raises(Diary):
    async def close(self) -> None:
        raise OSError("the container is gone")


@pytest.fixture
def status(tmp_path: Path) -> Iterator[Status]:
    status = Status(tmp_path, "orchestrator")
    yield status
    status.close("done")


async def test_an_environment_that_does_not_close_is_named_and_given_up_and_the_others_are_closed(
    status: Status, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutdown, "CLOSE_WARNING_S", 0.01)
    monkeypatch.setattr(shutdown, "CLOSE_TIMEOUT_S", 0.03)
    hanging, other = HangsAtTheEnd(), Diary()
    environments = EnvironmentLifecycle(status)
    await environments.start("maze", hanging)
    await environments.start("chess", other)
    await environments.close()
    assert (hanging.lines, other.lines) == (["started", "closing"], ["started", "closed"])
    assert [record.args for record in caplog.records] == [(0.03, "maze"), ("maze",)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_wait_for_an_environment_that_does_not_close(
    status: Status, number: signal.Signals
) -> None:
    hanging, environments = HangsAtTheEnd(), EnvironmentLifecycle(status)
    await environments.start("maze", hanging)
    closing = asyncio.create_task(environments.close())
    while hanging.lines != ["started", "closing"]:
        await asyncio.sleep(0)
    assert status.current.waiting_for == "the end of maze"
    os.kill(os.getpid(), number)
    async with asyncio.timeout(shutdown.CLOSE_WARNING_S):
        await closing
    assert status.current.waiting_for == ""


async def test_an_environment_whose_start_hangs_is_shown_and_closed_once_its_start_has_ended(status: Status) -> None:
    hanging, environments = HangsAtTheStart(), EnvironmentLifecycle(status)
    starting = asyncio.create_task(environments.start("maze", hanging))
    while not status.current.waiting_for:
        await asyncio.sleep(0)
    assert status.current.waiting_for == "readiness from maze"
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await environments.close()
    assert hanging.lines == ["start ended", "closed"]


async def test_what_an_environment_raises_when_it_closes_is_raised_once_all_are_closed(status: Status) -> None:
    other, environments = Diary(), EnvironmentLifecycle(status)
    await environments.start("maze", Raises())
    await environments.start("chess", other)
    with pytest.raises(OSError, match="the container is gone"):
        await environments.close()
    assert other.lines == ["started", "closed"]
