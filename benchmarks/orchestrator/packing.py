"""How evenly bins spread over workers, and how long that takes, beside two simpler ways to deal out the same bins.

    python benchmarks/orchestrator/packing.py [--repeats 5]

Lengths are drawn, truncated to 16384 tokens, and packed for Qwen3-0.6B. `max/mean` is the heaviest worker's load over
the mean; `lockstep` is the time of a step over the mean load where workers wait for each other after each bin. Every
way gives all workers the same number of bins, and runs them in order of cost. `balance` deals out bins that exist;
`pack` is everything for all workers, from samples to filled bins; `own` is the same for one worker, who fills only its
own bins. Times are the best of the repeats.
"""

from __future__ import annotations

import argparse
import heapq
import time
from collections.abc import Callable

import numpy as np

from headrace.rollout.packing import cost_of_model, cut_into_bins, pack_for_worker, spread
from headrace.rollout.types import Sample

SEQ_LEN = 16384
PAD_TO_MULTIPLE_OF = 64
COST = cost_of_model(
    hidden_size=1024,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=3072,
    vocab_size=151936,
)

Draw = Callable[[np.random.Generator, int], np.ndarray]
LENGTHS: dict[str, Draw] = {
    "lognormal, median 500": lambda rng, n: rng.lognormal(np.log(500), 1, n),
    "lognormal, median 2000": lambda rng, n: rng.lognormal(np.log(2000), 1, n),
    "lognormal, median 6000": lambda rng, n: rng.lognormal(np.log(6000), 1, n),
    "uniform": lambda rng, n: rng.uniform(1, SEQ_LEN, n),
    "Pareto 1.1": lambda rng, n: 200 * (rng.pareto(1.1, n) + 1),
    "1 in 20 full, rest 400": lambda rng, n: np.where(
        rng.random(n) < 0.05, SEQ_LEN, rng.lognormal(np.log(400), 0.5, n)
    ),
}
CASES = [
    *((name, 512, 32) for name in LENGTHS),
    ("lognormal, median 2000", 64, 8),
    ("lognormal, median 2000", 64, 32),
    ("lognormal, median 2000", 2048, 256),
]


def draw_lengths(draw: Draw, bins: int) -> list[int]:
    """So many that they fill nearly as many bins: splits make up for the rest."""
    rng = np.random.default_rng(0)
    drawn = draw(rng, 64 * bins).clip(1, SEQ_LEN).astype(int)
    return [int(length) for length in drawn[np.cumsum(drawn) < 0.97 * bins * SEQ_LEN]]


def samples_of(lengths: list[int]) -> list[Sample]:
    """All of them slices of the same arrays: only their lengths matter here."""
    ones, zeros = np.ones(SEQ_LEN, np.float32), np.zeros(SEQ_LEN, np.int32)
    return [
        Sample(zeros[:n], ones[:n] > 0, -ones[:n], zeros[:n], n // 4, streams={"advantages": ones[:n]}) for n in lengths
    ]


def round_robin(costs: list[int], workers: int) -> list[list[int]]:
    return [list(range(worker, len(costs), workers)) for worker in range(workers)]


def greedy(costs: list[int], workers: int) -> list[list[int]]:
    """The costliest first, each to the lightest worker that still has a place."""
    shares: list[list[int]] = [[] for _ in range(workers)]
    heap = [(0, worker) for worker in range(workers)]
    for item in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, worker = heapq.heappop(heap)
        shares[worker].append(item)
        if len(shares[worker]) < len(costs) // workers:
            heapq.heappush(heap, (load + costs[item], worker))
    return shares


def measure(repeats: int, work: Callable[..., object], *arguments: object) -> float:
    """Milliseconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work(*arguments)
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def evenness(costs: list[int], shares: list[list[int]]) -> tuple[float, float]:
    """The heaviest load and the lockstep time, over the mean load."""
    table = np.sort([[float(costs[item]) for item in share] for share in shares], axis=1)
    mean = table.sum() / len(shares)
    return table.sum(axis=1).max() / mean, table.max(axis=0).sum() / mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    print(
        f"{'lengths':<24}{'samples':>8}{'bins':>6}{'workers':>9}  {'':<16}{'max/mean':>9}{'lockstep':>10}"
        f"{'balance ms':>12}{'pack ms':>8}"
    )
    for name, wanted, workers in CASES:
        lengths = draw_lengths(LENGTHS[name], wanted)
        bins = cut_into_bins(lengths, SEQ_LEN, workers, COST)
        costs = [COST.of(lengths[i] for i in bin_) for bin_ in bins]
        case = f"{name:<24}{len(lengths):>8}{len(bins):>6}{workers:>9}"
        for kind, deal in (("round robin", round_robin), ("greedy", greedy), ("Karmarkar-Karp", spread)):
            heaviest, lockstep = evenness(costs, deal(costs, workers))
            balance = measure(repeats, deal, costs, workers)
            line = f"{case}  {kind:<16}{heaviest:>9.4f}{lockstep:>10.4f}{balance:>12.2f}"
            if deal is spread:
                arguments = (samples_of(lengths), SEQ_LEN, workers, COST, PAD_TO_MULTIPLE_OF)
                line += f"{measure(repeats, pack_for_worker, 0, *arguments):>8.0f}"
            print(line)


if __name__ == "__main__":
    main()
