"""pass@k: the chance that at least one of k answers is right, without bias."""

from __future__ import annotations

import math


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the share of all ways to choose k of the samples that hold a right one: 1 - C(n - c, k) / C(n, k)."""
    if not (1 <= k <= samples and 0 <= correct <= samples):
        raise ValueError(f"pass@{k} of {samples} samples, {correct} of them right, does not exist")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def ks_of(samples: int) -> list[int]:
    """Return the k for which pass@k is reported: powers of two, and the number of samples itself."""
    return sorted({*(2**power for power in range(samples.bit_length())), samples})
