"""Metrics: (sum, count) until they are shown, then one JSON line per step and process in `metrics.jsonl`."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec


class Means:
    """Sums and counts by name; a mean exists only when someone asks for it."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.counts: dict[str, float] = {}

    def add(self, name: str, total: float, count: float = 1.0) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + total
        self.counts[name] = self.counts.get(name, 0.0) + count

    def values(self) -> dict[str, float]:
        return {name: total / self.counts[name] for name, total in self.sums.items() if self.counts[name]}


def spread(name: str, values: Iterable[float]) -> dict[str, float]:
    """Mean, max and min of a quantity, as `name/mean` and so on; nothing for nothing."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return {}
    return {f"{name}/mean": sum(known) / len(known), f"{name}/max": max(known), f"{name}/min": min(known)}


class MetricsLog:
    """Appends to the run's `metrics.jsonl`. Every process of a run appends to the same file, a line at a time."""

    def __init__(self, path: Path, process: str) -> None:
        self.path = path
        self.process = process
        path.parent.mkdir(parents=True, exist_ok=True)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One record. Its bytes go out in a single append, so lines of several processes never mix."""
        record = {"step": step, "time": time.time(), "process": self.process, **metrics}
        line = msgspec.json.encode(record) + b"\n"
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            if _is_cut(descriptor):  # a full disk took half of the last record: this one must not go with it
                line = b"\n" + line
            while line:  # what did not fit raises at the second try
                line = line[os.write(descriptor, line) :]
        finally:
            os.close(descriptor)


def _is_cut(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a `metrics.jsonl`. A last line that a kill cut short is left out."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield msgspec.json.decode(line)
