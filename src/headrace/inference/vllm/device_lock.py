"""vLLM's side of the device lock that it shares with the trainer of its run: paused during the trainer's step.

vLLM keeps its memory, `gpu_memory_utilization` of the GPU, and its requests: releasing the KV cache would lose the
state of requests in flight, which vLLM cannot recompute by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from headrace.inference.vllm.control import Control
from headrace.transport.device_lock import POLL_S, DeviceLock


class VllmDeviceLock:
    """Pauses vLLM while the trainer holds `lock`; without a `lock` vLLM has the device to itself."""

    def __init__(self, lock: DeviceLock | None) -> None:
        self.is_held_by_trainer = False
        """Whether vLLM is paused for the trainer, or about to be."""
        self.hand_overs = 0
        self._lock = lock

    async def follow(self, control: Control, changing: asyncio.Lock, resume: Callable[[], Awaitable[None]]) -> None:
        """Pause and resume vLLM as the trainer acquires and releases the lock, until cancelled.

        `changing` is held during each change. Errors of vLLM are raised.
        """
        while self._lock is not None:
            if self._lock.is_held and self._lock.is_requested_by_trainer:
                async with changing:
                    self.is_held_by_trainer = True
                    await control.pause(clear_cache=False)
                self.hand_overs += 1
                self._lock.release()
            elif not self._lock.is_held and self._lock.try_acquire():
                async with changing:
                    self.is_held_by_trainer = False
                    await resume()
            await asyncio.sleep(POLL_S)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
