"""The trainer's side of a device that it shares with engines: to ask for it, with the memory that a step takes.

Only what computes is a turn; waiting for a batch is not. How much memory a step takes is not known before the first,
which gets all that the engines can give; after that it is what the steps so far have taken, and some more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch

from headrace.observe.status import Status, wait_until
from headrace.transport.turns import POLL, Turn

log = logging.getLogger(__name__)
T = TypeVar("T")

MARGIN, LEAST_MARGIN = 0.1, 512 << 20
"""Asked for beyond what was needed before: that share of what a step gives back, and so many bytes at least."""


class TrainerTurn:
    """`directory` is where turns are taken; without one the device is the trainer's own, and it is always its turn."""

    def __init__(self, directory: Path | None, device: torch.device, status: Status) -> None:
        self._turn = None if directory is None else Turn(directory, trainer=True)
        self._device, self._status = device, status
        self._on_gpu = device.type == "cuda"
        self._peak: int | None = None
        """Bytes that the steps so far have taken at most; None before the first."""
        self._has_all = False
        """Whether the engines gave all that they could for this turn."""

    @contextmanager
    def taken(self, stopped: Callable[[], bool]) -> Iterator[bool]:
        """Compute inside. False if `stopped` said so before the turn came."""
        if self._turn is None:
            yield True
            return
        try:
            yield self._take(self._turn, self._need(), stopped)
        finally:
            self._leave(self._turn)

    def compute(self, work: Callable[[], T | None], undo: Callable[[], None], stopped: Callable[[], bool]) -> T | None:
        """What the work comes to; where its memory did not suffice, once more with all that the engines can give.

        `undo` takes back what the first try left: gradients at most. Work that has begun to change the model must end
        with another error.
        """
        try:
            return work()
        except torch.OutOfMemoryError as error:
            if self._turn is None or self._has_all:
                raise
            log.warning("this step takes more memory than those before it; it gets the KV cache's, too: %s", error)
        undo()  # outside: the error holds on to what was computed
        self._leave(self._turn)
        return work() if self._take(self._turn, None, stopped) else None

    def _take(self, turn: Turn, memory: int | None, stopped: Callable[[], bool]) -> bool:
        turn.ask_for(memory)
        self._has_all = memory is None

        def is_taken() -> bool:
            if turn.try_take() and memory is None and turn.cache_is_kept:
                turn.leave()  # it came before the engine had seen what is asked for
            return turn.is_ours

        return wait_until(is_taken, "its turn on the GPU", "the engine", self._status, poll=POLL, stopped=stopped)

    def _leave(self, turn: Turn) -> None:
        if self._on_gpu and turn.is_ours:
            torch.cuda.synchronize(self._device)
            self._peak = torch.cuda.max_memory_reserved(self._device)
            if not turn.is_all_kept:  # an engine takes its memory back, or comes up and looks at what there is
                torch.cuda.empty_cache()
        turn.leave()

    def _need(self) -> int | None:
        """Bytes beyond what is held already."""
        if not self._on_gpu:
            return 0
        if self._peak is None:
            return None
        margin = max(LEAST_MARGIN, int(MARGIN * (self._peak - torch.cuda.memory_allocated(self._device))))
        return max(0, self._peak - torch.cuda.memory_reserved(self._device)) + margin
