"""The trainer's side of the device lock that it shares with engines: acquired with the memory that a step needs.

The lock is held while the trainer computes, not while it waits for a batch. The memory of a step is unknown before the
first one, for which the engines release all they can; later steps request the peak so far plus a margin.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch

from headrace.observe.status import THE_GPU, Status, wait_until
from headrace.transport.lock import POLL_S, DeviceLock

log = logging.getLogger(__name__)
T = TypeVar("T")

MARGIN_SHARE, MIN_MARGIN_BYTES = 0.1, 512 << 20
"""Margin on top of the peak so far: a share of what a step allocates temporarily, and at least so many bytes."""


class TrainerDeviceLock:
    """Holds the device lock in `directory` during a step; without a directory the trainer has the device to itself."""

    def __init__(self, directory: Path | None, device: torch.device, status: Status) -> None:
        self._lock = None if directory is None else DeviceLock(directory, trainer=True)
        self._device, self._status = device, status
        self._on_gpu = device.type == "cuda"
        self._peak: int | None = None
        """Most bytes reserved by a step so far; None before the first."""
        self._requested_all = False
        """Whether the engines released all they could for this step."""

    @contextmanager
    def hold(self, stopped: Callable[[], bool]) -> Iterator[bool]:
        """Hold the lock in the block; yields False if `stopped` returned true before it was acquired."""
        if self._lock is None:
            yield True
            return
        try:
            yield self._acquire(self._lock, self._required_bytes(), stopped)
        finally:
            self._release(self._lock)

    def run_with_oom_retry(
        self, work: Callable[[], T | None], undo: Callable[[], None], stopped: Callable[[], bool]
    ) -> T | None:
        """Return the result of `work`; if it runs out of memory, retry once with all that the engines can release.

        `undo` discards what the first attempt left, gradients at most: once `work` changes the model, it must not
        raise `OutOfMemoryError`. None if stopped before the lock was acquired again.
        """
        try:
            return work()
        except torch.OutOfMemoryError as error:
            if self._lock is None or self._requested_all:
                raise
            log.warning("out of memory in this step: retrying with the memory of the KV cache: %s", error)
        undo()  # outside of `except`: the error keeps the computed tensors alive
        self._release(self._lock)
        return work() if self._acquire(self._lock, None, stopped) else None

    def _acquire(self, lock: DeviceLock, num_bytes: int | None, stopped: Callable[[], bool]) -> bool:
        lock.request_memory(num_bytes)
        self._requested_all = num_bytes is None

        def is_acquired() -> bool:
            if lock.try_acquire() and num_bytes is None and lock.any_cache_is_resident:
                lock.release()  # acquired before an engine had read the request
            return lock.is_held

        return wait_until(is_acquired, THE_GPU, "the engine", self._status, poll=POLL_S, stopped=stopped)

    def _release(self, lock: DeviceLock) -> None:
        if self._on_gpu and lock.is_held:
            torch.cuda.synchronize(self._device)
            self._peak = torch.cuda.max_memory_reserved(self._device)
            if not lock.all_caches_are_resident:  # an engine restores its cache, or starts and sizes it by what is free
                torch.cuda.empty_cache()
        lock.release()

    def _required_bytes(self) -> int | None:
        """Return the bytes required beyond those reserved now; None for all."""
        if not self._on_gpu:
            return 0
        if self._peak is None:
            return None
        margin = max(MIN_MARGIN_BYTES, int(MARGIN_SHARE * (self._peak - torch.cuda.memory_allocated(self._device))))
        return max(0, self._peak - torch.cuda.memory_reserved(self._device)) + margin
