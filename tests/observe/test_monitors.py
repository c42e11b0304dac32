"""Metrics reach TensorBoard and Weights & Biases once, restarts included, and a missing package is named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headrace.config.run import TensorboardConfig, WandbConfig
from headrace.observe.history import Record
from headrace.observe.metrics import MetricsLog
from headrace.observe.monitors import Forwarder, MonitorError, forwarding
from headrace.transport.run_dir import RunDir


class Collector:
    """A monitor that keeps what it is sent, and breaks when told to."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.broken = False

    def send(self, records: list[Record]) -> None:
        if self.broken:
            raise ConnectionError("the monitor's server is down")
        self.steps += [record["step"] for record in records]

    def close(self) -> None:
        pass


def test_a_restart_neither_loses_nor_repeats(tmp_path: Path) -> None:
    run, monitor = RunDir(tmp_path), Collector()
    log = MetricsLog(run.metrics, "trainer")
    log.log(1, {"loss": 1.0})
    with Forwarder(run, "collector", monitor, interval=0.01):
        log.log(2, {"loss": 1.0})
    log.log(3, {"loss": 1.0})  # while nobody forwards
    with Forwarder(run, "collector", monitor, interval=0.01):
        log.log(4, {"loss": 1.0})
    assert monitor.steps == [1, 2, 3, 4]


def test_a_broken_monitor_does_not_hurt_the_run_and_is_made_up_for_later(tmp_path: Path) -> None:
    run, monitor = RunDir(tmp_path), Collector()
    log = MetricsLog(run.metrics, "trainer")
    monitor.broken = True
    with Forwarder(run, "collector", monitor, interval=0.01):
        log.log(1, {"loss": 1.0})
    monitor.broken = False
    with Forwarder(run, "collector", monitor, interval=0.01):
        pass
    assert monitor.steps == [1]


def test_tensorboard_gets_the_numbers_of_all_processes_at_their_steps(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = RunDir(tmp_path)
    with forwarding(run, None, TensorboardConfig()):
        MetricsLog(run.metrics, "orchestrator").log(1, {"reward/all/mean": 0.25, "note": "not a number"})
        MetricsLog(run.metrics, "trainer").log(1, {"loss": 0.5})
    with forwarding(run, None, TensorboardConfig()):
        MetricsLog(run.metrics, "orchestrator").log(2, {"reward/all/mean": 0.75})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["loss", "reward/all/mean"]
    assert [(event.step, event.value) for event in events.Scalars("reward/all/mean")] == [(1, 0.25), (2, 0.75)]


def test_wandb_offline_writes_one_run_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens there
    run = RunDir(tmp_path / "my-run")
    for step in (1, 2):
        with forwarding(run, WandbConfig(project="p", mode="offline"), None):
            MetricsLog(run.metrics, "trainer").log(step, {"loss": 0.5})
    identity = (run.root / "monitors" / "wandb.id").read_text()
    assert list((run.root / "wandb").glob(f"offline-run-*-{identity}/run-{identity}.wandb"))


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_monitor_that_is_not_installed_names_the_extra_to_install(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    for module in [module for module in sys.modules if module.startswith(f"{name}.")]:
        monkeypatch.setitem(sys.modules, module, None)
    configs = (WandbConfig(), None) if name == "wandb" else (None, TensorboardConfig())
    with (
        pytest.raises(MonitorError, match=rf"pip install 'headrace\[{name}\]'"),
        forwarding(RunDir(tmp_path), *configs),
    ):
        pass
