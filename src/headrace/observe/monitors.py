"""Hands the run's metrics on to Weights & Biases and TensorBoard.

One thread follows `metrics.jsonl`, into which every process of the run writes, so that one monitor run shows them all
and no process waits for a monitor. How far each monitor has come is kept in the run directory: a restart goes on from
there. Only a kill between handing records on and noting it makes the last few of them appear twice, at the same step.

Left out on purpose: sample tables and system statistics; rollouts are in the run directory as Parquet.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from headrace.config.base import read_toml
from headrace.config.run import TensorboardConfig, WandbConfig
from headrace.errors import BadInput
from headrace.observe.history import Record, Tail
from headrace.transport.files import write_atomically
from headrace.transport.run_dir import RunDir

log = logging.getLogger(__name__)

INTERVAL = 2.0
"""Seconds between two looks for news."""
NOT_METRICS = frozenset({"step", "time", "process"})


class MonitorError(BadInput):
    """A monitor cannot be used. The message says what to do about it."""


class Monitor(Protocol):
    """Where records go. `send` returns once they will survive the end of this process."""

    def send(self, records: list[Record]) -> None: ...

    def close(self) -> None: ...


@contextmanager
def forwarding(run: RunDir, wandb: WandbConfig | None, tensorboard: TensorboardConfig | None) -> Iterator[None]:
    """While inside, metrics are handed on to the monitors that are configured."""
    with ExitStack() as stack:
        if tensorboard is not None and tensorboard.enabled:
            monitor: Monitor = Tensorboard(run.root / "tensorboard")
            stack.enter_context(Forwarder(run, "tensorboard", monitor))
        if wandb is not None:
            stack.enter_context(Forwarder(run, "wandb", Wandb(run, wandb)))
        yield


class Forwarder:
    """A thread that keeps one monitor up to date."""

    def __init__(self, run: RunDir, name: str, monitor: Monitor, interval: float = INTERVAL) -> None:
        self._name, self._monitor, self._interval = name, monitor, interval
        self._mark = run.root / "monitors" / f"{name}.offset"
        self._tail = Tail(run.metrics, int(self._mark.read_text()) if self._mark.exists() else 0)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=name, daemon=True)

    def __enter__(self) -> Forwarder:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        self._monitor.close()

    def _follow(self) -> None:
        try:
            while not self._closed.wait(self._interval):
                self._forward()
            self._forward()
        except Exception:  # a run is worth more than its monitor; a restart hands on what is missing
            log.exception("%s: no more metrics are handed on in this process", self._name)

    def _forward(self) -> None:
        if records := self._tail.read():
            self._monitor.send(records)
            write_atomically(self._mark, str(self._tail.offset).encode())


class Tensorboard:
    """Event files in RUN/tensorboard, written by tensorboard's own writer: torch is not needed."""

    def __init__(self, directory: Path) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise MonitorError(_missing("tensorboard")) from error
        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(directory))

    def send(self, records: list[Record]) -> None:
        for record in records:
            values = [self._summary.Value(tag=key, simple_value=value) for key, value in _numbers(record).items()]
            summary = self._summary(value=values)
            self._writer.add_event(self._event(wall_time=record["time"], step=record["step"], summary=summary))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """One Weights & Biases run for all processes, continued by every restart."""

    def __init__(self, run: RunDir, config: WandbConfig) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MonitorError(_missing("wandb")) from error
        try:
            self._run = wandb.init(
                project=config.project,
                name=config.name or run.root.resolve().name,
                entity=config.entity,
                mode=config.mode,
                id=_run_id(run.root / "monitors" / "wandb.id"),
                resume="allow" if config.mode == "online" else None,
                dir=str(run.root),
                config=read_toml(run.config) if run.config.exists() else {},
                settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
            )
        except (wandb.Error, OSError) as error:
            raise MonitorError(f'Weights & Biases: {error} (wandb.mode = "offline" needs no account)') from error
        # Records of several processes arrive out of order, which W&B's own step does not allow.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def send(self, records: list[Record]) -> None:
        for record in records:
            self._run.log({**_numbers(record), "step": record["step"], "time": record["time"]})

    def close(self) -> None:
        self._run.finish()


def _run_id(path: Path) -> str:
    """The id under which this run directory is known to W&B."""
    if not path.exists():
        write_atomically(path, uuid.uuid4().hex[:12].encode())
    return path.read_text()


def _numbers(record: Record) -> dict[str, float]:
    return {key: value for key, value in record.items() if key not in NOT_METRICS and _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _missing(extra: str) -> str:
    return (
        f"[{extra}] is configured but {extra} is not installed: pip install 'headrace[{extra}]', or remove the section"
    )
