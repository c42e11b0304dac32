"""Prometheus' text format: the head of a family, its samples, and histograms."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def head(name: str, kind: str, help_text: str) -> Iterator[str]:
    yield f"# HELP {name} {help_text}"
    yield f"# TYPE {name} {kind}"


def sample(name: str, value: float, labels: Mapping[str, str] | None = None) -> str:
    shown = ",".join(f'{label}="{text.translate(_ESCAPES)}"' for label, text in (labels or {}).items())
    return f"{name}{{{shown}}} {value}" if shown else f"{name} {value}"


class Histogram:
    """Counts of observations up to each bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self, name: str) -> Iterator[str]:
        below = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            below += count
            yield sample(f"{name}_bucket", below, {"le": bound})
        yield sample(f"{name}_sum", self.total)
        yield sample(f"{name}_count", below)
