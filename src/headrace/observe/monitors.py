"""Hands the run's metrics, and a few of its rollouts, on to Weights & Biases and TensorBoard.

One thread follows `metrics.jsonl`, into which every process of the run writes, so that one monitor run shows them all
and no process waits for a monitor. Tables of rollouts come from the Parquet files of the steps and of the evaluations;
so does the histogram of a step's advantages, of which `metrics.jsonl` has quantiles. How far each monitor has come is
kept in the run directory: a restart goes on from there. Only a kill between handing something on and noting it makes
the last of it appear twice, at the same step. An evaluation that is made again is not shown again.

Left out on purpose: system statistics.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.config.files import read_toml
from headrace.config.monitors import TensorboardConfig, WandbConfig
from headrace.errors import BadInput
from headrace.observe.history import Record, Tail
from headrace.observe.metrics import read_metrics
from headrace.transport.files import write_atomically
from headrace.transport.run_dir import RolloutKind, RunDir

log = logging.getLogger(__name__)

INTERVAL = 2.0
"""Seconds between two looks for news."""
MODE_VARIABLE = "WANDB_MODE"
MODES = {"online": "online", "offline": "offline", "disabled": "disabled", "run": "online", "dryrun": "offline"}
"""What the variable may hold, older names of W&B included, and what it means."""
NOT_METRICS = frozenset({"step", "time", "process"})
SAMPLE_COLUMNS = ("env", "reward", "advantage_mean", "drop_reason", "stop_reason", "messages")
GAUGES = ("dispatcher/", "event_loop_lag/")
"""What is measured every few seconds, however long a step takes."""
ELAPSED = "time/elapsed"
"""The axis of the gauges: seconds since the run's first record."""


class MonitorError(BadInput):
    """A monitor cannot be used. The message says what to do about it."""


class Monitor(Protocol):
    """Where records go. Both ways of sending return once what was sent will survive the end of this process."""

    def send(self, records: list[Record]) -> None: ...

    def send_samples(self, name: str, step: int, samples: list[Record]) -> None: ...

    def send_histogram(self, name: str, step: int, values: np.ndarray) -> None: ...

    def close(self) -> None: ...


@contextmanager
def forwarding(run: RunDir, wandb: WandbConfig | None, tensorboard: TensorboardConfig | None) -> Iterator[None]:
    """While inside, metrics and samples are handed on to the monitors that are configured."""
    with ExitStack() as stack:
        if tensorboard is not None and tensorboard.enabled:
            stack.enter_context(_forwarder(run, "tensorboard", Tensorboard(run.root / "tensorboard"), tensorboard))
        if wandb is not None and wandb_mode(wandb) != "disabled":
            stack.enter_context(_forwarder(run, "wandb", Wandb(run, wandb), wandb))
        yield


def wandb_mode(config: WandbConfig) -> str:
    """Return the mode: an exported `WANDB_MODE`, or else that of the run file."""
    mode = os.environ.get(MODE_VARIABLE) or config.mode
    if mode not in MODES:
        raise MonitorError("no such mode", key=MODE_VARIABLE, value=mode, fix=f"Use one of {', '.join(MODES)}.")
    return MODES[mode]


def _forwarder(run: RunDir, name: str, monitor: Monitor, config: WandbConfig | TensorboardConfig) -> Forwarder:
    options = config.model_dump(include={"samples", "samples_interval", "eval_samples"})
    return Forwarder(run, name, monitor, **options)


class Forwarder:
    """A thread that keeps one monitor up to date."""

    def __init__(
        self,
        run: RunDir,
        name: str,
        monitor: Monitor,
        interval: float = INTERVAL,
        *,
        samples: int = 0,
        samples_interval: int = 1,
        eval_samples: int = 0,
    ) -> None:
        self._name, self._monitor, self._interval = name, monitor, interval
        kinds = ("offset", "samples", "eval-samples")
        self._mark, self._samples_mark, self._eval_mark = (run.root / "monitors" / f"{name}.{kind}" for kind in kinds)
        self._tail = Tail(run.metrics, _read_mark(self._mark))
        self._samples = SampleReader(run.rollouts, samples, samples_interval, _read_mark(self._samples_mark))
        shown = msgspec.json.decode(self._eval_mark.read_bytes()) if self._eval_mark.exists() else []
        self._eval_samples = EvalSampleReader(run.rollouts, eval_samples, {(step, env) for step, env in shown})
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
        for step, samples, advantages in self._samples.read():
            if samples:
                self._monitor.send_samples("samples", step, samples)
            if len(advantages):
                self._monitor.send_histogram("advantages", step, advantages)
            write_atomically(self._samples_mark, str(step).encode())
        for step, env, samples in self._eval_samples.read():
            self._monitor.send_samples(f"eval/{env}/samples", step, samples)
            write_atomically(self._eval_mark, msgspec.json.encode(sorted(self._eval_samples.shown)))


class SampleReader:
    """Hands out the steps whose files have appeared since the last call.

    Of each the mean advantages of its rollouts, and of every `interval`-th one up to `count` rollouts.
    """

    def __init__(self, directory: Path, count: int, interval: int, step: int = 0) -> None:
        self._directory, self._count, self._interval = directory, count, interval
        self._step = step

    def read(self) -> Iterator[tuple[int, list[Record], np.ndarray]]:
        for step, path in RolloutKind.TRAIN.files(self._directory).items():
            if step <= self._step:
                continue
            self._step = step
            count = 0 if step % self._interval else self._count
            try:
                samples = read_samples(path, count, seed=step) if count else []
                advantages = read_advantages(path)
            except FileNotFoundError:
                log.info("%s: not shown, keep_rollouts had it deleted first", path)
                continue
            yield step, samples, advantages


class EvalSampleReader:
    """Hands out rollouts of every evaluated version and environment that is not in `shown`, and adds it there.

    A version's file grows as its environments end their evaluations, in any order.
    """

    def __init__(self, directory: Path, count: int, shown: set[tuple[int, str]]) -> None:
        self._directory, self._count = directory, count
        self.shown = shown
        self._times: dict[Path, int] = {}
        """When each file that has been read was last written."""

    def read(self) -> Iterator[tuple[int, str, list[Record]]]:
        for step, path in RolloutKind.EVAL.files(self._directory).items() if self._count else ():
            try:
                written = path.stat().st_mtime_ns
                if self._times.get(path) == written:
                    continue
                table = _read_table(path)
            except FileNotFoundError:
                log.info("%s: not shown, keep_rollouts had it deleted first", path)
                continue
            self._times[path] = written
            envs = np.array(table.column("env").to_pylist(), object)
            for env in dict.fromkeys(envs):
                if (step, env) not in self.shown:
                    self.shown.add((step, env))
                    yield step, env, _samples_in(table.take(np.flatnonzero(envs == env)), self._count, seed=step)


def read_samples(path: Path, count: int, seed: int) -> list[Record]:
    """Some rollouts of a step, worst reward first, messages as text. Those that failed have no reward and stay out."""
    return _samples_in(_read_table(path), count, seed)


def read_advantages(path: Path) -> np.ndarray:
    """Return the mean advantage of every rollout of a step that was credited."""
    known = _read_table(path, ["advantage_mean"]).column("advantage_mean").to_pylist()
    return np.array([value for value in known if value is not None], np.float64)


def _read_table(path: Path, columns: Sequence[str] = SAMPLE_COLUMNS) -> pa.Table:
    with pq.ParquetFile(path) as file:
        return file.read(columns=list(columns))


def _samples_in(table: pa.Table, count: int, seed: int) -> list[Record]:
    rewards = np.array(table.column("reward").to_pylist(), np.float64)
    samples = [table.slice(row, 1).to_pylist()[0] for row in spread_over(rewards, count, seed)]
    return [{**sample, "messages": as_text(msgspec.json.decode(sample["messages"]))} for sample in samples]


def spread_over(rewards: np.ndarray, count: int, seed: int) -> list[int]:
    """Indices of rewards that lie evenly between the lowest and the highest; which of several equal ones is chance."""
    left = np.random.default_rng(seed).permutation(np.flatnonzero(np.isfinite(rewards)))
    if not len(left):
        return []
    chosen: list[int] = []
    for wanted in np.linspace(rewards[left].min(), rewards[left].max(), min(count, len(left))):
        nearest = int(np.argmin(np.abs(rewards[left] - wanted)))
        chosen.append(int(left[nearest]))
        left = np.delete(left, nearest)
    return sorted(chosen, key=lambda index: float(rewards[index]))


def as_text(messages: list[dict[str, Any]]) -> str:
    """Messages as one reads them. What is not plain text, such as a tool call, stays JSON."""
    return "\n\n".join(f"{message.get('role', 'unknown')}: {_content(message)}" for message in messages)


def _content(message: dict[str, Any]) -> str:
    rest = {key: value for key, value in message.items() if key != "role" and value is not None}
    text = rest.pop("content") if isinstance(rest.get("content"), str) else ""
    return f"{text} {msgspec.json.encode(rest).decode()}".strip() if rest else text


class Tensorboard:
    """Event files in RUN/tensorboard, written by tensorboard's own writer: torch is not needed."""

    def __init__(self, directory: Path) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.plugins.histogram.summary_v2 import histogram_pb
            from tensorboard.plugins.text.summary_v2 import text_pb
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise _missing("tensorboard") from error
        self._event, self._summary, self._text, self._histogram = Event, Summary, text_pb, histogram_pb
        self._writer = EventFileWriter(str(directory))

    def send(self, records: list[Record]) -> None:
        for record in records:
            values = [self._summary.Value(tag=key, simple_value=value) for key, value in _numbers(record).items()]
            summary = self._summary(value=values)
            self._writer.add_event(self._event(wall_time=record["time"], step=record["step"], summary=summary))
        self._writer.flush()

    def send_samples(self, name: str, step: int, samples: list[Record]) -> None:
        cells = [["" if (cell := sample[key]) is None else str(cell) for key in SAMPLE_COLUMNS] for sample in samples]
        table = self._text(name, np.array([SAMPLE_COLUMNS, *cells], object))  # shown as rows and columns
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=table))
        self._writer.flush()

    def send_histogram(self, name: str, step: int, values: np.ndarray) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._histogram(name, values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """One Weights & Biases run for all processes, continued by every restart."""

    def __init__(self, run: RunDir, config: WandbConfig) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _missing("wandb") from error
        mode = wandb_mode(config)
        try:
            self._run = wandb.init(
                project=config.project,
                name=config.name or run.root.resolve().name,
                entity=config.entity,
                mode=mode,  # type: ignore[arg-type]
                id=_run_id(run.root / "monitors" / "wandb.id"),
                resume="allow" if mode == "online" else None,
                dir=str(_made(config.dir) if config.dir is not None else run.root),
                config=read_toml(run.config) if run.config.exists() else {},
                settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
            )
        except (wandb.Error, OSError) as error:
            raise MonitorError(
                str(error),
                key="wandb.mode",
                value=mode,
                fix="Log in with `wandb login`, or use mode offline or disabled.",
            ) from error
        # Records of several processes arrive out of order, which W&B's own step does not allow.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric(ELAPSED)
        self._gauges: set[str] = set()
        self._metrics = run.metrics
        self._started: float | None = None
        self._table, self._histogram = wandb.Table, wandb.Histogram

    def send(self, records: list[Record]) -> None:
        if self._started is None:
            self._started = float(next(read_metrics(self._metrics))["time"])
        for record in records:
            numbers = _numbers(record)
            self._put_on_time_axis({name for name in numbers if name.startswith(GAUGES)})
            self._run.log({**numbers, "step": record["step"], ELAPSED: record["time"] - self._started})

    def send_samples(self, name: str, step: int, samples: list[Record]) -> None:
        rows = [[step, *(sample[key] for key in SAMPLE_COLUMNS)] for sample in samples]
        self._run.log({name: self._table(columns=["step", *SAMPLE_COLUMNS], data=rows), "step": step})

    def send_histogram(self, name: str, step: int, values: np.ndarray) -> None:
        self._run.log({name: self._histogram(values), "step": step})

    def _put_on_time_axis(self, gauges: set[str]) -> None:
        """By full name: of two patterns that match, such as `dispatcher/*` and `*`, W&B takes either."""
        for name in gauges - self._gauges:
            self._run.define_metric(name, step_metric=ELAPSED)
        self._gauges |= gauges

    def close(self) -> None:
        self._run.finish()


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _read_mark(path: Path) -> int:
    """How far a monitor has come."""
    return int(path.read_text()) if path.exists() else 0


def _run_id(path: Path) -> str:
    """The id under which this run directory is known to W&B."""
    if not path.exists():
        write_atomically(path, uuid.uuid4().hex[:12].encode())
    return path.read_text()


def _numbers(record: Record) -> dict[str, float]:
    return {key: value for key, value in record.items() if key not in NOT_METRICS and _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _missing(package: str) -> MonitorError:
    fix = f"pip install 'headrace[{package}]', or remove the section."
    return MonitorError(f"the package {package} is not installed", key=f"[{package}]", fix=fix)
