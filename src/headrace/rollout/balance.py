"""Load balancing: the same number of items for every worker, with sums of costs as equal as is cheap to compute.

Karmarkar-Karp for equal cardinality: the sorted items are cut into rounds of one item per worker; the two partial
assignments with the largest differences are merged, heaviest share with lightest, until one is left. Then the heaviest
worker swaps items with others until its load is near the mean.

Workers that synchronize after every item take, per step, the sum over rounds of the costliest item. This is smallest
while no item leaves its round, so a swap that moves an item into a cheaper round is penalized.

Every worker computes the same assignment: ties are broken by position, and the order of every sum is fixed.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

TOLERANCE = 0.005
"""Relative distance of the heaviest worker above the mean at which swapping stops."""
MAX_ROUNDS_APART = 16
"""Rounds by which a swap may move an item: keeps the search linear in the rounds."""
MAX_SWAPS_PER_WORKER = 16


class _Partial(NamedTuple):
    """An assignment of some of the rounds; shares are sorted by their sum, heaviest first."""

    sums: np.ndarray
    """[workers]"""
    rounds: list[int]
    columns: np.ndarray
    """[rounds, workers]: the item of the round that each share has."""

    @property
    def difference(self) -> float:
        return float(self.sums[0] - self.sums[-1])


def spread(costs: Sequence[float], workers: int) -> list[list[int]]:
    """Return for each worker the indices of its items, costliest first; every worker gets the same number."""
    if len(costs) % workers:
        raise ValueError(f"{len(costs)} items cannot be spread evenly over {workers} workers")
    if not costs:
        return [[] for _ in range(workers)]
    values = np.asarray(costs, np.float64)
    order = np.argsort(-values, kind="stable").reshape(-1, workers)
    assigned = _karmarkar_karp(values[order])
    shares = np.take_along_axis(order, assigned.columns[np.argsort(assigned.rounds)], axis=1)
    target = (1 + TOLERANCE) * math.fsum(assigned.sums) / workers
    _swap_items(shares, values[shares], assigned.sums.copy(), target)
    return [sorted(share, key=lambda item: (-values[item], item)) for share in shares.T.tolist()]


def _karmarkar_karp(rounds: np.ndarray) -> _Partial:
    """Assign the costs `rounds` [rounds, workers], each row sorted costliest first."""
    one_each = np.arange(rounds.shape[1])[None]
    partials = [_Partial(sums, [number], one_each) for number, sums in enumerate(rounds)]
    heap = [(-partial.difference, number, partial) for number, partial in enumerate(partials)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, left = heapq.heappop(heap)
        _, _, right = heapq.heappop(heap)
        sums = left.sums + right.sums[::-1]  # the heaviest share of one with the lightest of the other
        columns = np.concatenate([left.columns, right.columns[:, ::-1]])
        by_weight = np.argsort(-sums, kind="stable")
        merged = _Partial(sums[by_weight], left.rounds + right.rounds, columns[:, by_weight])
        heapq.heappush(heap, (-merged.difference, number, merged))
    return heap[0][2]


def _swap_items(shares: np.ndarray, costs: np.ndarray, loads: np.ndarray, target: float) -> None:
    """Swap items in place between the heaviest worker and others until its load is at `target` or no swap helps.

    `shares` and `costs` [rounds, workers] are the items and their costs, `loads` [workers] the column sums of `costs`.
    """
    own = np.repeat(np.arange(len(costs)), 2 * MAX_ROUNDS_APART + 1)
    others = own + np.tile(np.arange(-MAX_ROUNDS_APART, MAX_ROUNDS_APART + 1), len(costs))
    inside = (others >= 0) & (others < len(costs))
    own, others = own[inside], others[inside]
    for _ in range(MAX_SWAPS_PER_WORKER * len(loads)):
        heaviest = int(np.argmax(loads))
        if loads[heaviest] <= target:
            return
        offered = costs[own, heaviest][:, None]
        moved = offered - costs[others]
        heavier_after = np.maximum(loads[heaviest] - moved, loads + moved)
        longer_round = np.maximum(0, offered - costs.max(axis=1)[others][:, None])
        price = np.where(heavier_after < loads[heaviest], np.maximum(heavier_after, target) + longer_round, np.inf)
        pair, other = np.unravel_index(np.argmin(price), price.shape)
        if price[pair, other] == np.inf:
            return
        loads[heaviest] -= moved[pair, other]
        loads[other] += moved[pair, other]
        mine, theirs = (own[pair], heaviest), (others[pair], other)
        for table in (shares, costs):
            table[mine], table[theirs] = table[theirs], table[mine]
