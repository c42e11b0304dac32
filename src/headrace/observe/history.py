"""A run as its `metrics.jsonl` tells it: read as it grows, with what a resume made again counted once."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

log = logging.getLogger(__name__)

Record = dict[str, Any]
Curve = list[tuple[int, float]]

INCARNATIONS = ("progress/incarnation", "eval/incarnation")
"""In records of what was trained and of what was evaluated: the lineage of the weights. A trainer that goes back begins
another. No two processes write the same name: monitors do not tell them apart."""


class Tail:
    """Hands out the records that were appended since the last call."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.offset = offset

    def read(self) -> list[Record]:
        if not self.path.exists() or self.path.stat().st_size <= self.offset:
            return []
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self.offset += len(whole)
        return [record for line in whole.splitlines() if (record := self._decode(line)) is not None]

    def _decode(self, line: bytes) -> Record | None:
        try:
            return msgspec.json.decode(line, type=Record)
        except msgspec.DecodeError as error:  # a full disk cuts a line in two; the rest of the run is still good
            log.warning("%s: a damaged line is left out: %s", self.path, error)
            return None


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
        """The share of episodes that failed, for the same, and where all of them did so that there is no avg@k."""
        self.latest: Record = {}
        """The last value of every metric."""
        self.moves = 0
        """Records that show the run moving: steps and evaluations, not gauges on a time axis."""
        self.incarnation = 0
        """The newest lineage of weights that anything is known of."""
        self._began = 0
        """The first step of that lineage that was recorded."""
        self._first_time: float | None = None
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        step = int(record["step"])
        self.latest.update(record)
        if self._first_time is None:
            self._first_time = float(record["time"])
        incarnation = _incarnation(record, self.incarnation)
        if incarnation > self.incarnation:
            self.incarnation, self._began = incarnation, step
            self._lose_evals(step)
        if "progress/rollouts" in record:
            self._put(self.steps, step, record)
        if "loss" in record:
            self._put(self.trained, step, record)
        if incarnation == self.incarnation or step < self._began:  # else the trainer went back while it was under way
            self._add_evaluations(step, record)
        self.moves += any(key in ("progress/rollouts", "loss") or key.startswith("eval/") for key in record)

    def _add_evaluations(self, step: int, record: Record) -> None:
        for name, value in _evaluations(record):
            self.evals.setdefault(name, {})[step] = value
            self.eval_failures.setdefault(name, {})[step] = 0.0
        for key, value in record.items():
            name = key.removeprefix("eval/").removesuffix("/errors")
            if key == f"eval/{name}/errors" and not name.endswith("/metrics"):  # else the environment's own
                self.eval_failures.setdefault(name, {})[step] = float(value)

    def _put(self, series: dict[int, Record], step: int, record: Record) -> None:
        """Append. A step that comes again after a resume replaces itself and all that had followed it."""
        has_said_so = any(name in record for name in INCARNATIONS)
        if not has_said_so and series and next(reversed(series)) > step:
            self._lose_evals(step)
        while series and next(reversed(series)) > step:
            series.popitem()
        series[step] = {**series.get(step, {}), **record}

    def _lose_evals(self, step: int) -> None:
        """Weights from `step` on are made anew."""
        for versions in (*self.evals.values(), *self.eval_failures.values()):
            for lost in [version for version in versions if version >= step]:
                del versions[lost]

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return next(reversed(self.trained), 0)

    @property
    def step_seconds(self) -> list[float]:
        """How long each step took, waiting included, as far as that is recorded."""
        return [float(record["time/step"]) for record in self.trained.values() if "time/step" in record]

    @property
    def elapsed(self) -> float:
        """Seconds from the first record to the last."""
        return 0.0 if self._first_time is None else float(self.latest["time"]) - self._first_time

    def train_reward(self, env: str = "all") -> Curve:
        return _curve(self.steps, f"reward/{env}/mean")

    def loss(self) -> Curve:
        return _curve(self.trained, "loss")

    def held_out(self) -> Curve:
        """Mean over the eval environments by version; one that is evaluated less often keeps its last value."""
        environments = [versions for versions in self.evals.values() if versions]
        known: dict[int, float] = {}
        points = []
        for version in sorted({version for versions in environments for version in versions}):
            known.update({index: v[version] for index, v in enumerate(environments) if version in v})
            if len(known) == len(environments):
                points.append((version, sum(known.values()) / len(known)))
        return points


def _incarnation(record: Record, otherwise: int) -> int:
    return int(next((record[name] for name in INCARNATIONS if name in record), otherwise))


def _evaluations(record: Record) -> Iterator[tuple[str, float]]:
    """Environment and avg@k; not those of single agents, which stand beside the one of their environment."""
    for key, value in record.items():
        if key.startswith("eval/") and "/avg@" in key:
            name, _, k = key.removeprefix("eval/").rpartition("/avg@")
            if f"eval/{name.rpartition('/')[0]}/avg@{k}" not in record:
                yield name, float(value)


def _curve(series: dict[int, Record], key: str) -> Curve:
    return [(step, float(record[key])) for step, record in series.items() if record.get(key) is not None]
