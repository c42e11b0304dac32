"""Lag metrics of the event loop, and reports about code that blocks it."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import pytest

from headrace.observe.status import Status
from headrace.orchestrator.event_loop import measure_lag, watch_loop


def a_reward_that_sleeps(status: Status) -> None:
    deadline = time.monotonic() + 10
    while not status.current.problem and time.monotonic() < deadline:
        time.sleep(0.01)


async def test_code_that_blocks_the_event_loop_is_named_while_it_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    status = Status(tmp_path, "orchestrator")
    async with watch_loop(status, warning_s=0.1, tick_s=0.01):
        a_reward_that_sleeps(status)
        assert f"a_reward_that_sleeps ({__file__}, line " in status.current.problem
        assert "workers = N on the environment" in caplog.text
    status.close("finished")


async def test_a_responsive_loop_is_not_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    status = Status(tmp_path, "orchestrator")
    with caplog.at_level(logging.WARNING):
        async with watch_loop(status, warning_s=5.0, tick_s=0.01):
            await asyncio.sleep(0.1)
    assert (status.current.state, caplog.text) == ("starting", "")
    status.close("finished")


async def test_the_lag_comes_out_at_every_interval():
    seen: list[dict[str, float]] = []
    running = asyncio.create_task(measure_lag(0.06, seen.append))
    while len(seen) < 2:
        await asyncio.sleep(0.01)
    running.cancel()
    assert seen[0].keys() == {f"event_loop_lag/{q}" for q in ("p50", "p90", "p99", "max")}
    assert seen[0]["event_loop_lag/p50"] <= seen[0]["event_loop_lag/p90"] <= seen[0]["event_loop_lag/max"]


async def test_a_blocked_event_loop_is_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headrace.orchestrator.event_loop.LAG_WARNING_S", 0.1)
    caplog.set_level(logging.WARNING)
    seen: list[dict[str, float]] = []
    running = asyncio.create_task(measure_lag(0.06, seen.append))
    await asyncio.sleep(0.01)
    time.sleep(0.3)  # noqa: ASYNC251  an environment that computes where it should not
    while len(seen) < 2:
        await asyncio.sleep(0.01)
    running.cancel()
    assert seen[0]["event_loop_lag/max"] > 0.1
    assert caplog.text.count("the event loop was blocked") == 1
    assert "workers = N" in caplog.text
