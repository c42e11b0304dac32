"""Metrics and rollouts reach TensorBoard and Weights & Biases once, restarts included; a missing package is named."""

from __future__ import annotations

import json
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest

from headrace.config.monitors import TensorboardConfig, WandbConfig
from headrace.observe.histograms import count
from headrace.observe.metrics import MetricsLog, Record
from headrace.observe.monitors import (
    Forwarder,
    MonitorError,
    format_messages,
    forwarding,
    histograms_in,
    spread_over,
)
from headrace.rollout.types import Rollout, RolloutError, Sample
from headrace.transport.rollout_files import write_eval_rollouts, write_rollouts
from headrace.transport.run_dir import RolloutKind, RunDir


@pytest.fixture(autouse=True)
def no_exported_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)


class Collector:
    """A monitor that keeps what it is sent, and fails on request."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.samples: dict[int, list[Record]] = {}
        self.evaluated: list[tuple[str, int, list[float]]] = []
        self.histograms: list[tuple[str, int, int]] = []
        self.broken = False

    def send(self, records: list[Record]) -> None:
        if self.broken:
            raise ConnectionError("the monitor's server is down")
        for record in records:
            self.steps.append(record["step"])
            for name, (counts, edges) in histograms_in(record).items():
                assert len(edges) == len(counts) + 1
                self.histograms.append((name, record["step"], int(counts.sum())))

    def send_samples(self, name: str, step: int, samples: list[Record]) -> None:
        if name != "samples":
            self.evaluated.append((name, step, [sample["reward"] for sample in samples]))
            return
        assert step not in self.samples
        self.samples[step] = samples

    def close(self) -> None:
        pass


def dump(run: RunDir, step: int, rewards: tuple[float, ...] = (0.0, 0.5, 1.0)) -> None:
    """The file of a step with one kept rollout per reward, one that was filtered and one that failed."""
    kept = [rollout_of(reward) for reward in rewards]
    dropped = [(rollout_of(0.25), "repetition"), (Rollout(env="e", error=RolloutError("timeout")), "timeout")]
    write_rollouts(run.rollouts, step, kept, dropped)


def rollout_of(reward: float) -> Rollout:
    sample = Sample([1, 2], [False, True], [0.0, -1.0], [-1, 0], 1)
    sample.set_stream("advantages", [0.0, reward - 0.5])
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": f"worth {reward}"}]
    return Rollout("e", reward=reward, messages=messages, samples=[sample], stop_reason="stop")


def test_a_restart_neither_loses_nor_repeats(tmp_path: Path) -> None:
    run, monitor = RunDir(tmp_path), Collector()
    log = MetricsLog(run.metrics, "trainer")
    log.log(1, {"loss": 1.0})
    with Forwarder(run, "collector", monitor, interval=0.01):
        log.log(2, {"loss": 1.0})
    log.log(3, {"loss": 1.0})  # while nothing is forwarded
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
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # no server listens there
    run = RunDir(tmp_path / "my-run")
    for step in (1, 2):
        with forwarding(run, WandbConfig(project="p", mode="offline"), None):
            MetricsLog(run.metrics, "trainer").log(step, {"loss": 0.5})
    identity = (run.root / "monitors" / "wandb.id").read_text()
    assert list((run.root / "wandb").glob(f"offline-run-*-{identity}/run-{identity}.wandb"))


@pytest.mark.parametrize(
    ("written", "exported", "folder"),
    [
        ("online", "offline", "wandb"),
        ("online", "dryrun", "wandb"),
        ("offline", "disabled", None),
        ("disabled", "", None),
        ("disabled", "offline", "wandb"),
    ],
)
def test_an_exported_wandb_mode_wins_over_the_run_file(
    written: Literal["online", "offline", "disabled"],
    exported: str,
    folder: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setenv("WANDB_MODE", exported)
    run = RunDir(tmp_path)
    with forwarding(run, WandbConfig(mode=written), None):
        MetricsLog(run.metrics, "trainer").log(1, {"loss": 0.5})
    assert [path.name for path in tmp_path.iterdir() if path.name == "wandb"] == ([folder] if folder else [])
    assert not folder or list((tmp_path / "wandb").glob("offline-run-*"))


def test_an_unknown_exported_wandb_mode_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "quiet")
    with pytest.raises(MonitorError) as error, forwarding(RunDir(tmp_path), WandbConfig(), None):
        pass
    assert (error.value.key, error.value.value) == ("WANDB_MODE", "quiet")


def wandb_records(run: RunDir) -> list[Any]:
    """What W&B would upload, oldest first."""
    records: list[Any] = []
    for path in sorted((run.root / "wandb").glob("offline-run-*/run-*.wandb")):
        found: list[Any] = []
        while not any(record.HasField("exit") for record in found):
            time.sleep(0.01)  # its own process may write the end of the file after `finish` has returned
            found = list(parse_wandb(path.read_bytes()))
        records += found
    return records


def parse_wandb(content: bytes) -> Iterator[Any]:
    """Its files are LevelDB logs of protobufs, after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record as WandbRecord

    position, parts = 7, b""
    while position + 7 <= len(content):
        if (left := 32768 - position % 32768) < 7:  # the end of a block is padding
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if position <= len(content) and kind in (1, 4):  # a whole record, or the last part of one
            yield WandbRecord.FromString(parts)
            parts = b""


def wandb_history(run: RunDir) -> list[dict[str, Any]]:
    records = [record.history.item for record in wandb_records(run) if record.HasField("history")]
    return [{".".join(item.nested_key): json.loads(item.value_json) for item in items} for items in records]


def test_wandb_shows_gauges_over_time_and_the_rest_over_steps(tmp_path: Path) -> None:
    run, config = RunDir(tmp_path), WandbConfig(mode="offline")
    write_metrics = MetricsLog(run.metrics, "orchestrator").log
    with forwarding(run, config, None):
        write_metrics(1, {"reward/all/mean": 0.25})
    with forwarding(run, config, None):
        write_metrics(1, {"dispatcher/queued": 3, "event_loop_lag/max": 0.01})
    axes = {
        r.metric.name or r.metric.glob_name: r.metric.step_metric for r in wandb_records(run) if r.HasField("metric")
    }
    assert axes["dispatcher/queued"] == axes["event_loop_lag/max"] == "time/elapsed"
    assert axes["*"] == "step" and axes["time/elapsed"] == ""
    first, second = wandb_history(run)
    assert (first["reward/all/mean"], first["step"], first["time/elapsed"]) == (0.25, 1, 0.0)
    assert second["dispatcher/queued"] == 3
    assert second["time/elapsed"] > 0  # since the first record, which another process had forwarded


def test_wandb_offline_gets_a_table_of_rollouts(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    dump(run, 5)
    log_advantages(run, 5)
    with forwarding(run, WandbConfig(mode="offline", samples=4, samples_interval=5), None):
        pass
    (path,) = (run.root / "wandb").glob("offline-run-*/files/media/table/samples_*.table.json")
    table = json.loads(path.read_text())
    assert table["columns"] == ["step", "env", "reward", "advantage_mean", "drop_reason", "stop_reason", "messages"]
    text = "user: 2 + 2?\n\nassistant: worth"
    assert table["data"] == [
        [5, "e", 0.0, -0.5, None, "stop", f"{text} 0.0"],
        [5, "e", 0.25, -0.25, "repetition", "stop", f"{text} 0.25"],
        [5, "e", 0.5, 0.0, None, "stop", f"{text} 0.5"],
        [5, "e", 1.0, 0.5, None, "stop", f"{text} 1.0"],
    ]
    (histogram,) = (record for record in wandb_history(run) if "advantages._type" in record)
    assert (histogram["step"], histogram["advantages._type"]) == (5, "histogram")
    assert sum(histogram["advantages.values"]) == 4


def test_tensorboard_shows_rollouts_as_a_text_table(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = RunDir(tmp_path)
    dump(run, 10)
    log_advantages(run, 10)
    with forwarding(run, None, TensorboardConfig(samples=2)):
        pass
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (event,) = events.Tensors("samples")
    shape = [dimension.size for dimension in event.tensor_proto.tensor_shape.dim]
    assert (event.step, shape) == (10, [3, 6])
    assert event.tensor_proto.string_val[:2] == [b"env", b"reward"]
    assert event.tensor_proto.string_val[6:9] == [b"e", b"0.0", b"-0.5"]
    (event,) = events.Tensors("advantages")
    bins = np.frombuffer(event.tensor_proto.tensor_content).reshape(-1, 3)  # left, right, count
    assert (event.step, bins[:, 2].sum()) == (10, 4)
    assert bins[0, 0] < -0.5 <= bins[0, 1] and bins[-1, 0] < 0.5 <= bins[-1, 1]


def test_rollouts_of_every_nth_step_are_shown_once_and_later_files_too(tmp_path: Path) -> None:
    run, monitor = RunDir(tmp_path), Collector()
    for step in (1, 2, 3, 4):
        dump(run, step)
    with Forwarder(run, "collector", monitor, interval=0.01, samples=2, samples_interval=2):
        pass
    assert list(monitor.samples) == [2, 4]
    for step in (5, 6):  # while nothing is forwarded
        dump(run, step)
    with Forwarder(run, "collector", monitor, interval=0.01, samples=2, samples_interval=2):
        pass
    assert list(monitor.samples) == [2, 4, 6]


def log_advantages(run: RunDir, step: int) -> None:
    values = count("advantages", [-0.5, 0.0, 0.5, -0.25])
    MetricsLog(run.metrics, "orchestrator").log(step, {"histogram/advantages": values.encode(), "histogram/new": "?"})


def test_histograms_of_every_step_are_sent_once(tmp_path: Path) -> None:
    run, monitor = RunDir(tmp_path), Collector()
    log_advantages(run, 1)
    for _ in range(2):
        with Forwarder(run, "collector", monitor, interval=0.01):
            pass
    log_advantages(run, 2)
    with Forwarder(run, "collector", monitor, interval=0.01):
        pass
    assert monitor.histograms == [("advantages", 1, 4), ("advantages", 2, 4)]


def evaluate(run: RunDir, step: int, env: str, *rewards: float) -> None:
    rollouts = [msgspec.structs.replace(rollout_of(reward), env=env) for reward in rewards]
    write_eval_rollouts(RolloutKind.EVAL.path(run.rollouts, step), step, rollouts)


def test_every_evaluation_of_every_environment_is_shown_once_in_whatever_order_they_end(tmp_path: Path) -> None:
    run, monitor = RunDir(tmp_path), Collector()
    evaluate(run, 20, "quick", 0.0, 1.0, 0.5)
    evaluate(run, 10, "slow", 0.0)
    with Forwarder(run, "collector", monitor, interval=0.01, eval_samples=2):
        pass
    assert monitor.evaluated == [("eval/slow/samples", 10, [0.0]), ("eval/quick/samples", 20, [0.0, 1.0])]
    evaluate(run, 10, "late", 0.25)  # its version's file has been read already
    evaluate(run, 20, "quick", 0.75)  # again, after a resume
    with Forwarder(run, "collector", monitor, interval=0.01, eval_samples=2):
        pass
    assert monitor.evaluated[2:] == [("eval/late/samples", 10, [0.25])]


def test_no_rollouts_are_shown_when_none_are_asked_for(tmp_path: Path) -> None:
    run, monitor = RunDir(tmp_path), Collector()
    dump(run, 10)
    evaluate(run, 10, "e", 1.0)
    with Forwarder(run, "collector", monitor, interval=0.01, samples=0):
        pass
    assert not monitor.samples and not monitor.evaluated


def test_samples_are_spread_over_rewards_and_leave_out_what_failed(tmp_path: Path) -> None:
    run, monitor = RunDir(tmp_path), Collector()
    dump(run, 1, rewards=(0.0,) * 30 + (1.0,) * 2)
    with Forwarder(run, "collector", monitor, interval=0.01, samples=4):
        pass
    rewards = [sample["reward"] for sample in monitor.samples[1]]
    assert rewards == [0.0, 0.25, 1.0, 1.0]  # 0, 1/3, 2/3 and 1, or what is nearest


@pytest.mark.parametrize(
    ("rewards", "count", "expected"),
    [
        ([0.0, 0.1, 0.2, 0.3, 0.4, 1.0], 3, [0.0, 0.4, 1.0]),  # 0.5 is wanted
        ([0.0, 0.1, 0.5, 1.0], 4, [0.0, 0.1, 0.5, 1.0]),
        ([2.0, float("nan"), 2.0], 8, [2.0, 2.0]),
        ([float("nan")], 2, []),
        ([], 2, []),
    ],
)
def test_rewards_are_chosen_evenly_from_the_lowest_to_the_highest(
    rewards: list[float], count: int, expected: list[float]
) -> None:
    chosen = spread_over(np.array(rewards, np.float64), count, seed=0)
    assert [rewards[index] for index in chosen] == expected
    assert len(set(chosen)) == len(chosen)


def test_messages_become_text_and_tool_calls_stay_json() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": "[2, 2]"}]}
    messages = [{"role": "system", "content": "Be brief."}, call, {"role": "tool", "content": "4"}]
    assert format_messages(messages) == (
        "system: Be brief.\n\n"
        'assistant: {"tool_calls":[{"name":"add","arguments":"[2, 2]"}]}\n\n'
        "tool: 4"
    )  # fmt: skip


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_monitor_that_is_not_installed_names_the_extra_to_install(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    for module in [module for module in sys.modules if module.startswith(f"{name}.")]:
        monkeypatch.setitem(sys.modules, module, None)
    configs = (WandbConfig(), None) if name == "wandb" else (None, TensorboardConfig())
    with pytest.raises(MonitorError) as error, forwarding(RunDir(tmp_path), *configs):
        pass
    assert error.value.key == f"[{name}]"
    assert error.value.fix is not None and f"pip install 'headrace[{name}]'" in error.value.fix
