"""The trainer's view of what became of its published versions: whether anybody samples from them yet.

The trainer does not stop for acknowledgements, since the orchestrator bounds how far batches run ahead of them. But
when they fail to come it says whom it waits for, and after a deadline it gives up.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from headrace.errors import Failure
from headrace.rollout.version import Version
from headrace.transport.weights import WeightStore

log = logging.getLogger(__name__)

FIRST_NOTICE = 60.0
"""Seconds without an acknowledgement after which it is said."""
LOOK = 1.0
"""Seconds between two looks at the directory."""


class NotAcknowledged(Failure):
    """Nobody took the published weights in time."""


class Acknowledgements:
    """Watches the versions of a run that wait for an acknowledgement. `patience` None waits for ever."""

    def __init__(
        self, weights: WeightStore, patience: float | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._weights = weights
        self._patience = patience
        self._clock = clock
        self._last: Version | None = None
        self._since: float | None = None
        self._looked = -LOOK
        self._next_notice = FIRST_NOTICE

    def check(self) -> None:
        """Call it while waiting for something else: warns, at growing intervals, and raises at the deadline."""
        now = self._clock()
        if now - self._looked < LOOK:
            return
        self._looked = now
        waiting = self._weights.unacknowledged()
        acknowledged = self._weights.acknowledged()
        if not waiting or self._since is None or acknowledged != self._last:
            self._since, self._last, self._next_notice = (now if waiting else None), acknowledged, FIRST_NOTICE
            return
        waited = now - self._since
        sentence = f"weights {waiting[0]} have waited {waited:.0f} s for an acknowledgement from the orchestrator"
        if self._patience is not None and waited > self._patience:
            raise NotAcknowledged(
                f"{sentence}: is it running, and does the inference server answer it? If an evaluation that is pinned "
                "to one version takes as long, raise trainer.weights.ack_timeout"
            )
        if waited > self._next_notice:
            log.warning("%s, which gets it from the inference server", sentence)
            self._next_notice = 2 * waited
