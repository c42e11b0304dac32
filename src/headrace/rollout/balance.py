"""Numbers spread over workers: as many to each, with sums as equal as can be had cheaply.

Karmarkar-Karp for equal cardinality: the items, sorted, are cut into rounds of one item per worker; the two partial
spreads that differ most are joined, the heaviest share of one with the lightest of the other, until one is left. Then
the heaviest worker exchanges items with others until it is near the mean.

Where workers wait for each other after every item, a step takes the sum over rounds of the costliest item. This is
smallest while no item leaves its round, so an exchange that puts an item into a cheaper round has its price.

Every worker computes the spread for itself and all must agree: ties go by position, and no sum depends on the order in
which a machine likes to add.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

TOLERANCE = 0.005
"""How far the heaviest worker may be above the mean: exchanges stop there, since more would cost more than it gains."""
REACH = 16
"""Rounds by which an item may move: a bound keeps the search linear in the rounds."""
SWAPS_PER_WORKER = 16
"""A bound on the exchanges; they usually run out long before."""


class _Partial(NamedTuple):
    """Some rounds, dealt out. Shares are in order of their sum, the heaviest first."""

    sums: np.ndarray
    """[workers]"""
    rounds: list[int]
    columns: np.ndarray
    """[rounds, workers]: which item of the round each share has."""

    @property
    def difference(self) -> float:
        return float(self.sums[0] - self.sums[-1])


def spread(costs: Sequence[float], workers: int) -> list[list[int]]:
    """For each worker the indices of its items, the costliest first; every worker gets the same number."""
    if len(costs) % workers:
        raise ValueError(f"{len(costs)} items cannot be spread evenly over {workers} workers")
    if not costs:
        return [[] for _ in range(workers)]
    values = np.asarray(costs, np.float64)
    order = np.argsort(-values, kind="stable").reshape(-1, workers)
    dealt = _karmarkar_karp(values[order])
    shares = np.take_along_axis(order, dealt.columns[np.argsort(dealt.rounds)], axis=1)
    _exchange(shares, values[shares], dealt.sums.copy(), goal=(1 + TOLERANCE) * math.fsum(dealt.sums) / workers)
    return [sorted(share, key=lambda item: (-values[item], item)) for share in shares.T.tolist()]


def _karmarkar_karp(rounds: np.ndarray) -> _Partial:
    """Deal out `rounds` [rounds, workers], each sorted, the costliest first."""
    one_each = np.arange(rounds.shape[1])[None]
    partials = [_Partial(sums, [number], one_each) for number, sums in enumerate(rounds)]
    heap = [(-partial.difference, number, partial) for number, partial in enumerate(partials)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, left = heapq.heappop(heap)
        _, _, right = heapq.heappop(heap)
        joined = _join(left, right)
        heapq.heappush(heap, (-joined.difference, number, joined))
    return heap[0][2]


def _join(left: _Partial, right: _Partial) -> _Partial:
    """The heaviest share of one with the lightest of the other."""
    sums = left.sums + right.sums[::-1]
    columns = np.concatenate([left.columns, right.columns[:, ::-1]])
    heaviest_first = np.argsort(-sums, kind="stable")
    return _Partial(sums[heaviest_first], left.rounds + right.rounds, columns[:, heaviest_first])


def _exchange(shares: np.ndarray, costs: np.ndarray, loads: np.ndarray, goal: float) -> None:
    """Swap items, in place, between the heaviest worker and another, until its load is at the goal or nothing helps.

    `shares` and `costs` [rounds, workers] are the items and what they cost, `loads` the sums of `costs`.
    """
    own, others = _rounds_within(REACH, len(costs))
    for _ in range(SWAPS_PER_WORKER * len(loads)):
        heaviest = int(np.argmax(loads))
        if loads[heaviest] <= goal:
            return
        offered = costs[own, heaviest][:, None]
        given = offered - costs[others]
        heavier_after = np.maximum(loads[heaviest] - given, loads + given)
        longer_round = np.maximum(0, offered - costs.max(axis=1)[others][:, None])
        price = np.where(heavier_after < loads[heaviest], np.maximum(heavier_after, goal) + longer_round, np.inf)
        pair, other = np.unravel_index(np.argmin(price), price.shape)
        if price[pair, other] == np.inf:
            return
        loads[heaviest] -= given[pair, other]
        loads[other] += given[pair, other]
        mine, theirs = (own[pair], heaviest), (others[pair], other)
        for table in (shares, costs):
            table[mine], table[theirs] = table[theirs], table[mine]


def _rounds_within(reach: int, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """All pairs of rounds that are at most `reach` apart."""
    own = np.repeat(np.arange(rounds), 2 * reach + 1)
    others = own + np.tile(np.arange(-reach, reach + 1), rounds)
    inside = (others >= 0) & (others < rounds)
    return own[inside], others[inside]
