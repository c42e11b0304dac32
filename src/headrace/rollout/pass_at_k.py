"""pass@k: the unbiased estimate of the probability that at least one of k samples is correct."""

from __future__ import annotations

import math
from collections.abc import Sequence


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return 1 - C(n - c, k) / C(n, k) for n samples of which c are correct."""
    if not (1 <= k <= samples and 0 <= correct <= samples):
        raise ValueError(f"pass@{k} is not defined for {samples} samples with {correct} correct")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def pass_rates(tasks: Sequence[Sequence[float]], samples: int, solved: float | None) -> dict[int, list[float]]:
    """Return pass@k per task for each k: powers of two, and `samples` itself; tasks with fewer than k values left out.

    `tasks` are the values of the episodes that did not fail, per task. An episode is correct if its value is at least
    `solved`. None: if it is 1; the result is empty if a value is neither 0 nor 1.
    """
    if solved is None and not all(value in (0.0, 1.0) for values in tasks for value in values):
        return {}
    threshold = 1.0 if solved is None else solved
    counts = [(len(values), sum(value >= threshold for value in values)) for values in tasks]
    ks = sorted({*(2**power for power in range(samples.bit_length())), samples})
    rates = {k: [pass_at_k(count, correct, k) for count, correct in counts if count >= k] for k in ks}
    return {k: per_task for k, per_task in rates.items() if per_task}
