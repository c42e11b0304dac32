"""Warnings and timeout of a trainer whose weights are not acknowledged."""

import logging
import re
from pathlib import Path

import pytest

from headrace.rollout.version import Version
from headrace.transport.weights import AcknowledgementMonitor, NotAcknowledged, WeightStore


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def publish(store: WeightStore, step: int) -> None:
    store.publish(Version(0, step), lambda draft: None)


def pass_time(clock: Clock, acknowledgements: AcknowledgementMonitor, seconds: int) -> None:
    for _ in range(seconds):
        clock.now += 1.0
        acknowledgements.check()


def test_versions_wait_until_one_as_new_is_acknowledged(store: WeightStore) -> None:
    for step in (1, 2, 3):
        publish(store, step)
    assert store.unacknowledged() == [Version(0, 1), Version(0, 2), Version(0, 3)]
    store.acknowledge(Version(0, 2))
    assert store.unacknowledged() == [Version(0, 3)]
    store.acknowledge(Version(1, 0))
    assert store.unacknowledged() == []


def test_the_wait_is_said_after_a_minute_and_given_up_at_the_deadline(
    store: WeightStore, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    acknowledgements = AcknowledgementMonitor(store, 300.0, clock=clock)
    publish(store, 4)
    pass_time(clock, acknowledgements, 60)
    assert caplog.text == ""
    pass_time(clock, acknowledgements, 240)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    # The wait began at second 1: the first warning comes at 62, after 61 s, then after double that, and so on.
    assert [re.findall(r"weights (\S+) for (\d+) s", message) for message in warnings] == [
        [("0-4", str(seconds))] for seconds in (61, 123, 247)
    ]
    with pytest.raises(NotAcknowledged, match=r"301 s.*trainer\.weights\.ack_timeout"):
        pass_time(clock, acknowledgements, 2)


def test_every_acknowledgement_restarts_the_wait(store: WeightStore, clock: Clock) -> None:
    acknowledgements = AcknowledgementMonitor(store, 10.0, clock=clock)
    for step in range(1, 6):
        publish(store, step)
        store.acknowledge(Version(0, step - 1))  # always one behind
        pass_time(clock, acknowledgements, 9)
    store.acknowledge(Version(0, 5))
    pass_time(clock, acknowledgements, 100)
    publish(store, 6)
    pass_time(clock, acknowledgements, 9)
    with pytest.raises(NotAcknowledged, match="weights 0-6"):
        pass_time(clock, acknowledgements, 5)


def test_without_a_deadline_it_waits_for_ever(store: WeightStore, clock: Clock) -> None:
    acknowledgements = AcknowledgementMonitor(store, None, clock=clock)
    publish(store, 1)
    pass_time(clock, acknowledgements, 100)
    clock.now += 1e6
    acknowledgements.check()
