"""The embedded engine's side of the device lock that it shares with the trainer of its run.

The engine holds the lock whenever the trainer does not request it, even without requests to compute. So every hand-over
happens here, and the KV cache is released before the trainer's step begins if the trainer is short of memory.
"""

from __future__ import annotations

import logging
import time

import torch

from headrace.inference.backend import EngineError
from headrace.inference.embedded.cuda.kv_storage import OutOfDeviceMemory
from headrace.inference.embedded.engine import Engine
from headrace.transport.lock import DeviceLock

log = logging.getLogger(__name__)

FIRST_NOTICE_S = 2.0
"""Time without memory for the KV cache after which a warning is logged; then at doubling intervals."""
RESTORE_TIMEOUT_S = 60.0
"""Time after which the engine fails; when it is restarted, it sizes its cache by what is free."""


class EngineDeviceLock:
    """Hands the device of `engine` to the trainer and back; `lock` is held and the KV cache allocated at the start.

    Only the engine's thread may call methods; other threads may read the counters.
    """

    def __init__(self, engine: Engine, lock: DeviceLock) -> None:
        self.may_compute = False
        """The result of the last `poll`."""
        self.hand_overs = 0
        self.cache_releases = 0
        """Hand-overs for which the KV cache was released."""
        self._engine, self._lock = engine, lock
        self._is_cache_released = False
        if engine.cache_bytes:
            lock.mark_cache_resident()
        self._short_since: float | None = None
        """When restoring the cache first failed since the lock was acquired."""
        self._has_warned = False
        self._next_notice = FIRST_NOTICE_S

    @property
    def is_held_by_trainer(self) -> bool:
        """Whether the trainer computes or is about to."""
        return not self._lock.is_held

    def poll(self) -> bool:
        """Between two steps: release or re-acquire the lock as needed, and return whether a step may be computed."""
        if not self._lock.is_held:
            self._lock.try_acquire()
        elif self._lock.is_requested_by_trainer:
            self._hand_over()
        self.may_compute = self._lock.is_held and self._ensure_cache()
        return self.may_compute

    def close(self) -> None:
        self._lock.close()

    def _hand_over(self) -> None:
        self._engine.finish_step()
        requested = self._lock.requested_memory
        # `cache_bytes` is 0 on a device other than a GPU.
        if self._engine.cache_bytes > 0 and (requested is None or free_bytes(self._engine.device) < requested):
            self._release_cache()
        if self._engine.device.type == "cuda":
            torch.cuda.synchronize(self._engine.device)
        self.hand_overs += 1
        self._short_since = None
        self._lock.release()

    def _release_cache(self) -> None:
        released = self._engine.release_cache()
        self._lock.mark_cache_released()
        torch.cuda.empty_cache()  # activations of long prefills
        if not released:  # still released from an earlier hand-over
            return
        if not self.cache_releases:
            log.info(
                "releasing the KV cache (%.1f GiB) during training steps: the trainer is short of memory",
                released / 2**30,
            )
        self.cache_releases += 1
        self._is_cache_released = True

    def _ensure_cache(self) -> bool:
        """Restore a released cache once there is work, and return whether the cache is usable."""
        if not self._is_cache_released:
            return True
        if not self._engine.has_work:
            return False
        try:
            self._engine.restore_cache()
        except OutOfDeviceMemory as error:
            self._check_timeout(error)
            return False
        if self._has_warned:
            log.info("the KV cache is restored")
        self._is_cache_released, self._short_since, self._has_warned = False, None, False
        self._lock.mark_cache_resident()
        return True

    def _check_timeout(self, error: OutOfDeviceMemory) -> None:
        now = time.monotonic()
        if self._short_since is None:
            self._short_since, self._next_notice = now, FIRST_NOTICE_S
        waited = now - self._short_since
        if waited > RESTORE_TIMEOUT_S:
            raise EngineError(
                f"the KV cache could not be restored beside the trainer for {waited:.0f} s ({error}). "
                "Set inference.kv_cache_gb to less if this happens again."
            ) from error
        if waited > self._next_notice:
            log.warning("the KV cache cannot be restored after the trainer's step: %s; retrying", error)
            self._next_notice, self._has_warned = 2 * waited, True


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU."""
    return torch.cuda.mem_get_info(device)[0]
