"""What is said while the event loop cannot say anything."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import pytest

from headrace.observe.status import Status
from headrace.orchestrator.loop_watch import watching_the_loop


def a_reward_that_sleeps(status: Status) -> None:
    deadline = time.monotonic() + 10
    while not status.current.state.startswith("held up") and time.monotonic() < deadline:
        time.sleep(0.01)


async def test_code_that_holds_the_event_loop_is_named_while_it_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    status = Status(tmp_path, "orchestrator")
    async with watching_the_loop(status, patience=0.1, tick=0.01):
        a_reward_that_sleeps(status)
        assert status.current.state.startswith(f"held up by a_reward_that_sleeps ({__file__}, line ")
        assert "workers = N on the environment" in caplog.text
    status.close("finished")


async def test_a_loop_that_turns_is_left_in_peace(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    status = Status(tmp_path, "orchestrator")
    with caplog.at_level(logging.WARNING):
        async with watching_the_loop(status, patience=5.0, tick=0.01):
            await asyncio.sleep(0.1)
    assert (status.current.state, caplog.text) == ("starting", "")
    status.close("finished")
