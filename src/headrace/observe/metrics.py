"""Metrics: sums and counts until they are recorded, then one JSON line per step and process in `metrics.jsonl`."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec


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
    """Appends to the run's `metrics.jsonl`, which all processes of the run share."""

    def __init__(self, path: Path, process: str) -> None:
        self.path = path
        self.process = process
        path.parent.mkdir(parents=True, exist_ok=True)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append a record in a single write, so lines of several processes never mix."""
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


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a `metrics.jsonl`, without an incomplete last line."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield msgspec.json.decode(line)
