"""The logger on a time axis."""

import asyncio
import logging
import time

import pytest

from headrace.orchestrator.periodic import PeriodicLogger, lag_metrics


async def test_gauges_and_lag_come_out_at_every_interval():
    seen: list[dict[str, float]] = []
    logger = PeriodicLogger(0.06, lambda: {"dispatcher/queued": 3.0}, seen.append)
    running = asyncio.create_task(logger.run())
    while len(seen) < 2:
        await asyncio.sleep(0.01)
    running.cancel()
    assert seen[0].keys() == {"dispatcher/queued", *(f"event_loop_lag/{q}" for q in ("p50", "p90", "p99", "max"))}
    assert seen[0]["dispatcher/queued"] == 3.0


async def test_an_event_loop_that_stood_still_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("headrace.orchestrator.periodic.ALARMING_LAG", 0.1)
    caplog.set_level(logging.WARNING)
    seen: list[dict[str, float]] = []
    running = asyncio.create_task(PeriodicLogger(0.06, dict, seen.append).run())
    await asyncio.sleep(0.01)
    time.sleep(0.3)  # noqa: ASYNC251  an environment that computes where it should not
    while len(seen) < 2:
        await asyncio.sleep(0.01)
    running.cancel()
    assert seen[0]["event_loop_lag/max"] > 0.1
    assert caplog.text.count("the event loop stood still") == 1
    assert "workers = N" in caplog.text


def test_lag_is_told_in_quantiles():
    metrics = lag_metrics([0.0] * 98 + [1.0, 2.0])
    assert metrics["event_loop_lag/p50"] == 0.0
    assert metrics["event_loop_lag/max"] == 2.0
