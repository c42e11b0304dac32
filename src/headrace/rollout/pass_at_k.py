"""pass@k: the chance that at least one of k answers is right, without bias."""

from __future__ import annotations

import math
from collections.abc import Sequence


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the share of all ways to choose k of the samples that hold a right one: 1 - C(n - c, k) / C(n, k)."""
    if not (1 <= k <= samples and 0 <= correct <= samples):
        raise ValueError(f"pass@{k} of {samples} samples, {correct} of them right, does not exist")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def ks_of(samples: int) -> list[int]:
    """Return the k for which pass@k is reported: powers of two, and the number of samples itself."""
    return sorted({*(2**power for power in range(samples.bit_length())), samples})


def pass_rates(tasks: Sequence[Sequence[float]], samples: int, solved: float | None) -> dict[int, list[float]]:
    """Return by k the pass@k of each task that has at least k values, those of its episodes that did not fail.

    An episode is right from `solved` on. Unset: if its value is 1; nothing is returned where a value is neither 0 nor
    1, since right and wrong are not defined then.
    """
    if solved is None and not all(value in (0.0, 1.0) for values in tasks for value in values):
        return {}
    threshold = 1.0 if solved is None else solved
    right = [(len(values), sum(value >= threshold for value in values)) for values in tasks]
    rates = {k: [pass_at_k(count, correct, k) for count, correct in right if count >= k] for k in ks_of(samples)}
    return {k: known for k, known in rates.items() if known}
