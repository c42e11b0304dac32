"""Metrics that an algorithm collects until the next batch is logged: totals, means and maxima by name."""

from __future__ import annotations


class Tally:
    def __init__(self) -> None:
        self._totals: dict[str, float] = {}
        self._means: dict[str, tuple[float, float]] = {}
        self._largest: dict[str, float] = {}

    def count(self, name: str, amount: float = 1) -> None:
        """Add to a total."""
        self._totals[name] = self._totals.get(name, 0.0) + amount

    def mean(self, name: str, total: float, count: float) -> None:
        """Add a sum over `count` values to a mean."""
        before = self._means.get(name, (0.0, 0.0))
        self._means[name] = (before[0] + total, before[1] + count)

    def largest(self, name: str, value: float) -> None:
        """Update a maximum."""
        self._largest[name] = max(value, self._largest.get(name, value))

    def take(self) -> dict[str, float]:
        """Return all numbers and reset them."""
        means = {name: total / count for name, (total, count) in self._means.items() if count}
        taken = {**self._totals, **means, **self._largest}
        self._totals, self._means, self._largest = {}, {}, {}
        return taken
