"""CUDA graphs of whole decoding steps, one for each of a few batch sizes, captured before the first request.

A graph reads its inputs from tensors that stay where they are, and all graphs share one pool of memory: what one leaves
is there until another one runs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")

WARM_UPS = 2
"""Runs before a capture: libraries and compiled kernels set themselves up at their first ones."""


def batch_sizes(most: int) -> list[int]:
    """2, 4, 8, ... and what lies in the middle between two from 32 on; the last is at least `most`."""
    sizes = [2]
    while sizes[-1] < most:
        last = sizes[-1]
        power = 1 << (last.bit_length() - 1)
        sizes.append(last + power // 2 if last >= 32 and last == power else 2 * power)
    return sizes


class Graphs(Generic[T]):
    """`compute(size)` as graphs; what it returns is overwritten by the next run of any size."""

    def __init__(self, compute: Callable[[int], T]) -> None:
        self._compute = compute
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, T]] = {}
        self._pool: Any = None

    def capture(self, sizes: Iterable[int]) -> None:
        """Make these ready: else the first steps of a run would wait at each size that they meet."""
        with uncollected():
            for size in sorted(sizes, reverse=True):  # small ones find room in what the large ones took
                self._capture(size)

    def run(self, size: int) -> T:
        graph, result = self._captured[size]
        graph.replay()
        return result

    def _capture(self, size: int) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self._compute(size)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate meanwhile: only what this one does must be fit for a graph.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = self._compute(size)
        self._pool = graph.pool()
        self._captured[size] = graph, result


@contextmanager
def uncollected() -> Iterator[None]:
    """Nothing is collected in this block but before it: what is freed may wait for the GPU, which ends a capture."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
