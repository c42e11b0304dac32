"""Metrics of a run: one JSON line per step and process in `metrics.jsonl`, and the history that is read from it."""

from __future__ import annotations

import logging
import math
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from headrace.transport.announcements import list_names
from headrace.transport.files import write_atomically
from headrace.transport.journal_files import HOSTS_VAR

log = logging.getLogger(__name__)

Record = dict[str, Any]
Curve = list[tuple[int, float]]

INCARNATIONS = ("progress/incarnation", "eval/incarnation")
"""Incarnation of the weights in training and in evaluation records; a trainer that goes back begins a new one. Two
names, since monitors do not distinguish the processes that write records."""


OBSERVERS: list[Callable[[int, Mapping[str, Any]], None]] = []
"""Called with the step and the metrics of each record that this process writes."""


class Means:
    """Sums and counts by name; `values` divides them."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.counts: dict[str, float] = {}

    def add(self, name: str, total: float, count: float = 1.0) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + total
        self.counts[name] = self.counts.get(name, 0.0) + count

    def values(self) -> dict[str, float]:
        return {name: total / self.counts[name] for name, total in self.sums.items() if self.counts[name]}


def spread(name: str, values: Iterable[float]) -> dict[str, float]:
    """Return mean, max and min of the finite values as `NAME/mean` and so on; empty if there is none."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return {}
    return {f"{name}/mean": sum(finite) / len(finite), f"{name}/max": max(finite), f"{name}/min": min(finite)}


class MetricsLog:
    """Appends to the run's `metrics.jsonl`, which all processes of the run share on one host.

    Between hosts an append is not atomic: each process has a file of its own, which the launcher collects.
    """

    def __init__(self, path: Path, process: str, *, shared: bool = True) -> None:
        """`shared`: other processes write the same file."""
        if shared and int(os.environ.get(HOSTS_VAR, "1")) > 1:
            path = path.with_suffix("") / f"{process}.{uuid.uuid4().hex[:8]}.jsonl"
        self.path, self.process = path, process
        path.parent.mkdir(parents=True, exist_ok=True)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append a record in a single write, so lines of several processes never mix."""
        for observe in OBSERVERS:
            observe(step, metrics)
        record = {"step": step, "time": time.time(), "process": self.process, **metrics}
        line = msgspec.json.encode(record) + b"\n"
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            if size > 0 and os.pread(descriptor, 1, size - 1) != b"\n":  # a full disk cut the last record
                line = b"\n" + line
            while line:  # a short write raises at the second try
                line = line[os.write(descriptor, line) :]
        finally:
            os.close(descriptor)


class MetricsCollector:
    """Appends what the processes of several hosts have written to the run's `metrics.jsonl`; only the launcher does.

    If it is killed between an append and the record of its positions, the lines are appended again; readers take the
    last record of a step.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._directory = path, path.with_suffix("")
        self._mark = self._directory / "positions.json"
        self._positions: dict[str, int] | None = None

    def collect(self) -> None:
        """Append the whole lines that processes have written since the last call."""
        parts = [name for name in list_names(self._directory) if name.endswith(".jsonl")]
        if not parts:
            return
        if self._positions is None:
            has_mark = self._mark.name in list_names(self._directory)
            self._positions = msgspec.json.decode(self._mark.read_bytes(), type=dict[str, int]) if has_mark else {}
        collected = bytearray()
        for name in parts:
            with open(self._directory / name, "rb") as file:
                file.seek(self._positions.get(name, 0))
                content = file.read()
            whole = content[: content.rfind(b"\n") + 1]
            self._positions[name] = self._positions.get(name, 0) + len(whole)
            collected += whole
        if collected:
            with open(self._path, "ab") as file:
                file.write(collected)
            write_atomically(self._mark, msgspec.json.encode(self._positions))

    def close(self) -> None:
        """Collect the rest, after all processes have ended, and delete their files."""
        self.collect()
        shutil.rmtree(self._directory, ignore_errors=True)


_decode = msgspec.json.Decoder(dict[str, float | int | bool | str | None]).decode


def _read_record(line: bytes, texts: str) -> Record:
    """Decode a line and drop its texts, except the process's name and those whose name begins with `texts`.

    Raises `ValueError` unless it has a step and a time.
    """
    record: Record = {
        name: value
        for name, value in _decode(line).items()
        if not isinstance(value, str) or name == "process" or (texts and name.startswith(texts))
    }
    if type(record.get("step")) is not int or record["step"] < 0 or type(record.get("time")) not in (int, float):
        raise ValueError("it has no step, or no time")
    return record


class Tail:
    """Reads the records appended since the last call. Damaged lines are left out and reported."""

    def __init__(self, path: Path, offset: int = 0, *, texts: str = "") -> None:
        """`texts`: prefix of the names of texts that are kept; empty keeps none."""
        self.path, self.offset, self._texts = path, offset, texts

    def read(self) -> list[Record]:
        if self.path.name not in list_names(self.path.parent) or self.path.stat().st_size <= self.offset:
            return []
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self.offset += len(whole)
        records, damage, lines = [], [], whole.split(b"\n")[:-1]
        for line in lines:
            try:
                records.append(_read_record(line, self._texts))
            except ValueError as error:  # a full disk cuts a line in two; the other lines are fine
                damage.append(error)
        if damage:
            counts = f"{len(damage):,} of {len(lines):,} lines"
            log.warning("%s: %s were skipped, the first because: %s", self.path, counts, damage[0])
        return records


def read_metrics(path: Path) -> list[Record]:
    """Return all records of a `metrics.jsonl`."""
    return Tail(path).read()


class History:
    """The step records, evaluations and last values of a run."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.steps: dict[int, Record] = {}
        """The orchestrator's records, by step."""
        self.trained: dict[int, Record] = {}
        """The trainer's records, by step."""
        self.evals: dict[str, dict[int, float]] = {}
        """avg@k by environment and policy version."""
        self.eval_failures: dict[str, dict[int, float]] = {}
        """Share of failed episodes by environment and version, also if all failed and there is no avg@k."""
        self.latest: Record = {}
        """The last finite value of every metric."""
        self.moves = 0
        """Number of records of steps and evaluations; gauges do not count."""
        self.incarnation = 0
        """Newest incarnation of the weights."""
        self._began = 0
        """First recorded step of that incarnation."""
        self._first_time: float | None = None
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        step = int(record["step"])
        self.latest.update({name: value for name, value in record.items() if value is not None})  # JSON has no NaN
        if self._first_time is None:
            self._first_time = float(record["time"])
        incarnation = int(
            next((record[name] for name in INCARNATIONS if record.get(name) is not None), self.incarnation)
        )
        if incarnation > self.incarnation:
            self.incarnation, self._began = incarnation, step
            self._drop_evals(step)
        if "progress/rollouts" in record:
            self._put(self.steps, step, record)
        if "loss" in record:
            self._put(self.trained, step, record)
        if incarnation == self.incarnation or step < self._began:  # else the trainer went back during the evaluation
            self._add_evaluations(step, record)
        self.moves += any(key in ("progress/rollouts", "loss") or key.startswith("eval/") for key in record)

    def _add_evaluations(self, step: int, record: Record) -> None:
        """Add the scores, and the shares of failed episodes, of the policy version `step`."""
        for key, value in record.items():
            if key.startswith("eval/") and "/avg@" in key and value is not None:
                name, _, k = key.removeprefix("eval/").rpartition("/avg@")
                if f"eval/{name.rpartition('/')[0]}/avg@{k}" not in record:  # else of a single agent
                    self.evals.setdefault(name, {})[step] = float(value)
                    self.eval_failures.setdefault(name, {})[step] = 0.0
        for key, value in record.items():
            name = key.removeprefix("eval/").removesuffix("/errors")
            if key == f"eval/{name}/errors" and not name.endswith("/metrics"):  # else a metric of the environment
                self.eval_failures.setdefault(name, {})[step] = float(value or 0.0)

    def _put(self, series: dict[int, Record], step: int, record: Record) -> None:
        """Append a record. A step that is repeated after a resume replaces itself and all later ones."""
        has_incarnation = any(name in record for name in INCARNATIONS)
        if not has_incarnation and series and next(reversed(series)) > step:
            self._drop_evals(step)
        while series and next(reversed(series)) > step:
            series.popitem()
        series[step] = {**series.get(step, {}), **record}

    def _drop_evals(self, step: int) -> None:
        """Remove the evaluations of versions from `step` on, which are trained again."""
        for versions in (*self.evals.values(), *self.eval_failures.values()):
            for version in [version for version in versions if version >= step]:
                del versions[version]

    @property
    def step(self) -> int:
        """Return the number of optimizer steps done."""
        return next(reversed(self.trained), 0)

    @property
    def step_seconds(self) -> list[float]:
        """Return the duration of each step, waiting included, as far as it is recorded."""
        return [seconds for _, seconds in _curve(self.trained, "time/step")]

    @property
    def elapsed(self) -> float:
        """Return the seconds from the first record to the last."""
        return 0.0 if self._first_time is None else float(self.latest["time"]) - self._first_time

    def train_reward(self, env: str = "all") -> Curve:
        return _curve(self.steps, f"reward/{env}/mean")

    def slots_used(self) -> Curve:
        """Return the share of the engines' slots that had an episode in flight."""
        return _curve(self.steps, "perf/slots_used")

    def loss(self) -> Curve:
        return _curve(self.trained, "loss")

    def held_out(self) -> Curve:
        """Return the mean over eval environments by version; rarely evaluated ones keep their last value."""
        environments = [versions for versions in self.evals.values() if versions]
        latest: dict[int, float] = {}
        points = []
        for version in sorted({version for versions in environments for version in versions}):
            latest.update({index: v[version] for index, v in enumerate(environments) if version in v})
            if len(latest) == len(environments):
                points.append((version, sum(latest.values()) / len(latest)))
        return points


def _curve(series: dict[int, Record], key: str) -> Curve:
    return [(step, float(record[key])) for step, record in series.items() if record.get(key) is not None]
