"""An engine's side of a device that it shares with the trainer of its run: to give way, and to come back.

The turn is the engine's whenever the trainer does not want it, whether there are requests or not. So every hand-over
goes through here, and memory that the trainer is short of is given up before it begins.
"""

from __future__ import annotations

import logging
import time

import torch

from headrace.inference.backend import EngineError
from headrace.inference.embedded.device_memory import OutOfDeviceMemory
from headrace.inference.embedded.engine import Engine
from headrace.transport.turns import Turn

log = logging.getLogger(__name__)

FIRST_NOTICE = 2.0
"""Seconds without the memory that was lent after which it is said, then at growing intervals."""
PATIENCE = 60.0
"""Seconds after which it will not come back; an engine that is started anew makes do with what there is."""


class EngineTurn:
    """`engine`, with its cache there, and `turn`, taken. For the engine's thread alone, but its counts."""

    def __init__(self, engine: Engine, turn: Turn) -> None:
        self.may_compute = False
        """As of the last look."""
        self.hand_overs = 0
        self.releases = 0
        """Hand-overs for which the cache was given up."""
        self._engine, self._turn = engine, turn
        self._is_lent = False
        if engine.cache_bytes:
            turn.keep_cache()
        self._short_since: float | None = None
        """Since when in this turn of ours the memory that was lent is missed."""
        self._has_complained = False
        self._next_notice = FIRST_NOTICE

    @property
    def stands_still(self) -> bool:
        """For the trainer, which computes or is about to."""
        return not self._turn.is_ours

    def look(self) -> bool:
        """Between two steps: give way if the trainer waits, come back once it is done. Whether there may be a step."""
        if not self._turn.is_ours:
            self._turn.try_take()
        elif self._turn.is_wanted:
            self._give_way()
        self.may_compute = self._turn.is_ours and self._has_cache()
        return self.may_compute

    def close(self) -> None:
        self._turn.close()

    def _give_way(self) -> None:
        if self._is_short(self._turn.wanted_memory):
            self._lend()
        if self._engine.device.type == "cuda":
            torch.cuda.synchronize(self._engine.device)
        self.hand_overs += 1
        self._short_since = None
        self._turn.leave()

    def _is_short(self, wanted: int | None) -> bool:
        """Whether the trainer needs more than there is; of a device that is no GPU nothing is lent."""
        return self._engine.cache_bytes > 0 and (wanted is None or free_bytes(self._engine.device) < wanted)

    def _lend(self) -> None:
        given = self._engine.release_cache()
        self._turn.lend_cache()
        torch.cuda.empty_cache()  # what long prompts took
        if not given:  # it had been lent before, and nobody needed it since
            return
        if not self.releases:
            log.info("the trainer needs memory: it gets the KV cache's %.1f GiB for its step", given / 2**30)
        self.releases += 1
        self._is_lent = True

    def _has_cache(self) -> bool:
        """Whether the cache is there, which it need not be before there is something to do."""
        if not self._is_lent:
            return True
        if not self._engine.has_work:
            return False
        try:
            self._engine.restore_cache()
        except OutOfDeviceMemory as error:
            self._complain(error)
            return False
        if self._has_complained:
            log.info("the memory for the KV cache is back")
        self._is_lent, self._short_since, self._has_complained = False, None, False
        self._turn.keep_cache()
        return True

    def _complain(self, error: OutOfDeviceMemory) -> None:
        now = time.monotonic()
        if self._short_since is None:
            self._short_since, self._next_notice = now, FIRST_NOTICE
        waited = now - self._short_since
        if waited > PATIENCE:
            raise EngineError(
                f"the KV cache has not fitted beside the trainer for {waited:.0f} s ({error}): if that comes again, "
                "set inference.kv_cache_gb to less"
            ) from error
        if waited > self._next_notice:
            log.warning("the trainer's step is over, but its memory is not back: %s; trying on", error)
            self._next_notice, self._has_complained = 2 * waited, True


def free_bytes(device: torch.device) -> int:
    """Of a GPU, for whoever takes them."""
    return torch.cuda.mem_get_info(device)[0]
