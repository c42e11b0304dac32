"""Forwarding of a run's metrics, and a few of its rollouts, to Weights & Biases, TensorBoard and trackio.

One thread per monitor follows `metrics.jsonl`, which all processes of the run write, so one monitor run shows them all
and no process waits for a monitor. Tables of rollouts come from the rollout files of steps and evaluations. The
position of each monitor is saved in the run directory, and a restart continues from there; a kill between sending and
saving repeats the last records at the same step. Repeated evaluations are not sent again.

Left out on purpose: system statistics.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from headrace.config.files import read_toml
from headrace.config.monitors import SamplesConfig, TensorboardConfig, TrackioConfig, WandbConfig
from headrace.errors import BadInput
from headrace.observe.histograms import BOUNDS, PREFIX, decode
from headrace.observe.metrics import Record, Tail, read_metrics
from headrace.transport.files import write_atomically
from headrace.transport.run_dir import RolloutKind, RunDir

if TYPE_CHECKING:
    import pyarrow as pa  # dry runs import this module without it

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 2.0
MODE_VARIABLE = "WANDB_MODE"
MODES = {"online": "online", "offline": "offline", "disabled": "disabled", "run": "online", "dryrun": "offline"}
"""Modes by the values of the variable, older names of W&B included."""
SAMPLE_OPTIONS = {"samples", "samples_interval", "eval_samples"}
NOT_METRICS = frozenset({"step", "time", "process"})
SAMPLE_COLUMNS = ("env", "reward", "advantage_mean", "drop_reason", "stop_reason", "messages")
GAUGES = ("dispatcher/", "event_loop_lag/")
"""Prefixes of metrics that are recorded every few seconds, independent of steps."""
ELAPSED = "time/elapsed"
"""X axis of the gauges: seconds since the run's first record."""


class MonitorError(BadInput):
    """A monitor cannot be used."""


class Monitor(Protocol):
    """Destination of records. The send methods return once the data survives the end of this process."""

    def send(self, records: list[Record]) -> None: ...

    def send_samples(self, name: str, step: int, samples: list[Record]) -> None: ...

    def close(self) -> None: ...


@contextmanager
def forwarding(
    run: RunDir, wandb: WandbConfig | None, tensorboard: TensorboardConfig | None, trackio: TrackioConfig | None = None
) -> Iterator[None]:
    """Forward metrics and samples to the configured monitors while inside."""
    with ExitStack() as stack:

        def forward(name: str, monitor: Monitor, config: SamplesConfig) -> None:
            stack.enter_context(Forwarder(run, name, monitor, **config.model_dump(include=SAMPLE_OPTIONS)))

        if tensorboard is not None and tensorboard.enabled:
            forward("tensorboard", Tensorboard(run.root / "tensorboard"), tensorboard)
        if wandb is not None and wandb_mode(wandb) != "disabled":
            forward("wandb", Wandb(run, wandb), wandb)
        if trackio is not None and trackio.enabled:
            forward("trackio", Trackio(run, trackio), trackio)
        yield


def wandb_mode(config: WandbConfig) -> str:
    """Return the mode: that of the environment variable `WANDB_MODE`, or else of the run file."""
    mode = os.environ.get(MODE_VARIABLE) or config.mode
    if mode not in MODES:
        raise MonitorError("no such mode", key=MODE_VARIABLE, value=mode, fix=f"Use one of {', '.join(MODES)}.")
    return MODES[mode]


class Forwarder:
    """A thread that keeps one monitor up to date.

    It sends up to `samples` rollouts of every `samples_interval`-th step, and up to `eval_samples` of every evaluated
    version and environment.
    """

    def __init__(
        self,
        run: RunDir,
        name: str,
        monitor: Monitor,
        interval: float = POLL_INTERVAL_S,
        *,
        samples: int = 0,
        samples_interval: int = 1,
        eval_samples: int = 0,
    ) -> None:
        self._name, self._monitor, self._interval, self._rollouts = name, monitor, interval, run.rollouts
        self._samples, self._samples_interval, self._eval_samples = samples, samples_interval, eval_samples
        kinds = ("offset", "samples", "eval-samples")
        self._mark, self._samples_mark, self._eval_mark = (run.root / "monitors" / f"{name}.{kind}" for kind in kinds)
        self._tail = Tail(run.metrics, _read_mark(self._mark), texts=PREFIX)
        self._step = _read_mark(self._samples_mark)
        shown = msgspec.json.decode(self._eval_mark.read_bytes()) if self._eval_mark.exists() else []
        self._shown = {(step, env) for step, env in shown}
        """Evaluated versions and environments that were sent."""
        self._eval_times: dict[Path, int] = {}
        """Modification times of the evaluation files that were read."""
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
        except Exception:  # does not end the run; a restart sends what is missing
            log.exception("%s: no more metrics are sent by this process", self._name)

    def _forward(self) -> None:
        """Send the records, and some rollouts of the steps and evaluations, that are new."""
        if records := self._tail.read():
            self._monitor.send(records)
            write_atomically(self._mark, str(self._tail.offset).encode())
        for kind, send in ((RolloutKind.TRAIN, self._send_step), (RolloutKind.EVAL, self._send_evaluation)):
            for step, path in kind.files(self._rollouts).items():
                try:
                    send(step, path)
                except FileNotFoundError:
                    log.info("%s: not sent, deleted by keep_rollouts before", path)

    def _send_step(self, step: int, path: Path) -> None:
        """Send some rollouts of a new step."""
        if step <= self._step:
            return
        self._step = step
        count = 0 if step % self._samples_interval else self._samples
        samples = _select_samples(_read_table(path), count, seed=step) if count else []
        if samples:
            self._monitor.send_samples("samples", step, samples)
        write_atomically(self._samples_mark, str(step).encode())

    def _send_evaluation(self, step: int, path: Path) -> None:
        """Send rollouts of environments that were not sent yet. The file is rewritten as their evaluations end."""
        if not self._eval_samples or self._eval_times.get(path) == (written := path.stat().st_mtime_ns):
            return
        table = _read_table(path)
        self._eval_times[path] = written
        envs = np.array(table.column("env").to_pylist(), object)
        for env in dict.fromkeys(envs):
            if (step, env) not in self._shown:
                samples = _select_samples(table.take(np.flatnonzero(envs == env)), self._eval_samples, seed=step)
                self._monitor.send_samples(f"eval/{env}/samples", step, samples)
                self._shown.add((step, env))
                write_atomically(self._eval_mark, msgspec.json.encode(sorted(self._shown)))


def _read_table(path: Path) -> pa.Table:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        return file.read(columns=list(SAMPLE_COLUMNS))


def _select_samples(table: pa.Table, count: int, seed: int) -> list[Record]:
    """Return up to `count` rollouts that did not fail, lowest reward first, with their messages as text."""
    import pyarrow as pa

    rewards = np.array(table.column("reward").to_pylist(), np.float64)
    samples = table.take(pa.array(spread_over(rewards, count, seed), pa.int64())).to_pylist()
    return [{**sample, "messages": format_messages(msgspec.json.decode(sample["messages"]))} for sample in samples]


def spread_over(rewards: np.ndarray, count: int, seed: int) -> list[int]:
    """Return indices of rewards spread evenly between the lowest and the highest; ties are broken at random."""
    left = np.random.default_rng(seed).permutation(np.flatnonzero(np.isfinite(rewards)))
    if not len(left):
        return []
    chosen: list[int] = []
    for wanted in np.linspace(rewards[left].min(), rewards[left].max(), min(count, len(left))):
        nearest = int(np.argmin(np.abs(rewards[left] - wanted)))
        chosen.append(int(left[nearest]))
        left = np.delete(left, nearest)
    return sorted(chosen, key=lambda index: float(rewards[index]))


def format_messages(messages: list[dict[str, Any]]) -> str:
    """Return messages as text. Everything but plain text, such as a tool call, is JSON."""
    paragraphs = []
    for message in messages:
        rest = {key: value for key, value in message.items() if key != "role" and value is not None}
        text = rest.pop("content") if isinstance(rest.get("content"), str) else ""
        content = f"{text} {msgspec.json.encode(rest).decode()}".strip() if rest else text
        paragraphs.append(f"{message.get('role', 'unknown')}: {content}")
    return "\n\n".join(paragraphs)


class Tensorboard:
    """Event files in RUN/tensorboard, written with tensorboard's own writer, without torch."""

    def __init__(self, directory: Path) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.plugins.histogram.metadata import create_summary_metadata
            from tensorboard.plugins.text.summary_v2 import text_pb
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
            from tensorboard.util.tensor_util import make_tensor_proto
        except ImportError as error:
            raise _missing("tensorboard") from error
        self._event, self._summary, self._text = Event, Summary, text_pb
        self._histogram, self._tensor = create_summary_metadata(None, None), make_tensor_proto
        self._writer = EventFileWriter(str(directory))

    def send(self, records: list[Record]) -> None:
        for record in records:
            values = [self._summary.Value(tag=key, simple_value=value) for key, value in _numbers(record).items()]
            for name, (counts, edges) in histograms_in(record).items():
                buckets = self._tensor(np.stack([edges[:-1], edges[1:], counts], axis=1).astype(np.float64))
                values.append(self._summary.Value(tag=name, metadata=self._histogram, tensor=buckets))
            summary = self._summary(value=values)
            self._writer.add_event(self._event(wall_time=record["time"], step=record["step"], summary=summary))
        self._writer.flush()

    def send_samples(self, name: str, step: int, samples: list[Record]) -> None:
        cells = [["" if (cell := sample[key]) is None else str(cell) for key in SAMPLE_COLUMNS] for sample in samples]
        table = self._text(name, np.array([SAMPLE_COLUMNS, *cells], object))  # shown as rows and columns
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=table))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """One Weights & Biases run for all processes, continued by restarts."""

    def __init__(self, run: RunDir, config: WandbConfig) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _missing("wandb") from error
        mode = wandb_mode(config)
        id_file = run.root / "monitors" / "wandb.id"
        if not id_file.exists():
            write_atomically(id_file, uuid.uuid4().hex[:12].encode())
        if config.dir is not None:
            config.dir.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=config.project,
                name=config.name or run.root.resolve().name,
                entity=config.entity,
                mode=mode,  # type: ignore[arg-type]
                id=id_file.read_text(),
                resume="allow" if mode == "online" else None,
                dir=str(config.dir or run.root),
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
        # Records of several processes are not in order, which W&B's own step requires.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric(ELAPSED)
        self._gauges: set[str] = set()
        self._metrics = run.metrics
        self._started: float | None = None
        self._table, self._histogram = wandb.Table, wandb.Histogram

    def send(self, records: list[Record]) -> None:
        if self._started is None:
            self._started = float(read_metrics(self._metrics)[0]["time"])
        for record in records:
            numbers = _numbers(record)
            gauges = {name for name in numbers if name.startswith(GAUGES)}
            for name in gauges - self._gauges:  # by full name: of two patterns that match, W&B uses either
                self._run.define_metric(name, step_metric=ELAPSED)
            self._gauges |= gauges
            histograms = {name: self._histogram(np_histogram=each) for name, each in histograms_in(record).items()}
            times = {"step": record["step"], ELAPSED: record["time"] - self._started}
            self._run.log({**numbers, **histograms, **times})

    def send_samples(self, name: str, step: int, samples: list[Record]) -> None:
        rows = [[step, *(sample[key] for key in SAMPLE_COLUMNS)] for sample in samples]
        self._run.log({name: self._table(columns=["step", *SAMPLE_COLUMNS], data=rows), "step": step})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """One trackio run for all processes, continued by restarts, in a database on disk.

    trackio writes in the background: a kill loses the last second of what was sent.
    """

    def __init__(self, run: RunDir, config: TrackioConfig) -> None:
        # trackio reads it when it is imported.
        os.environ["TRACKIO_DIR"] = str((config.dir or run.root / "trackio").absolute())
        try:
            import trackio
        except ImportError as error:
            raise _missing("trackio") from error
        self._table, self._histogram = trackio.Table, trackio.Histogram
        self._run = trackio.init(
            project=config.project,
            name=config.name or run.root.resolve().name,
            config=read_toml(run.config) if run.config.exists() else {},
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def send(self, records: list[Record]) -> None:
        for record in records:
            histograms = {name: self._histogram(np_histogram=each) for name, each in histograms_in(record).items()}
            self._run.log({**_numbers(record), **histograms}, step=record["step"])

    def send_samples(self, name: str, step: int, samples: list[Record]) -> None:
        rows = [[sample[key] for key in SAMPLE_COLUMNS] for sample in samples]
        self._run.log({name: self._table(columns=list(SAMPLE_COLUMNS), data=rows)}, step=step)

    def close(self) -> None:
        self._run.finish()


def _read_mark(path: Path) -> int:
    return int(path.read_text()) if path.exists() else 0


def _numbers(record: Record) -> dict[str, float]:
    return {key: value for key, value in record.items() if key not in NOT_METRICS and isinstance(value, int | float)}


def histograms_in(record: Record) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the histograms of a record by name: the counts of their bins, and the edges of these."""
    names = [key.removeprefix(PREFIX) for key in record if key.startswith(PREFIX)]
    return {name: decode(name, record[PREFIX + name]).buckets(name) for name in names if name in BOUNDS}


def _missing(package: str) -> MonitorError:
    fix = f"pip install 'headrace[{package}]', or remove the section."
    return MonitorError(f"the package {package} is not installed", key=f"[{package}]", fix=fix)
