"""vLLM on a GPU that the trainer of its run shares: paused, requests kept, while it is the trainer's turn.

Its memory stays its own, `gpu_memory_utilization` of the GPU: giving up its cache for a while would lose what it has
of requests in flight, which it has no way to compute again by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from headrace.inference.vllm.control import Control
from headrace.transport.turns import POLL, Turn


class VllmTurn:
    """Without a `turn` the device is vLLM's own, and it never stands still."""

    def __init__(self, turn: Turn | None) -> None:
        self.stands_still = False
        """Whether vLLM is paused for the trainer, or about to be."""
        self.hand_overs = 0
        self._turn = turn

    async def follow(self, control: Control, changing: asyncio.Lock, go_on: Callable[[], Awaitable[None]]) -> None:
        """Give way and come back, until cancelled; nothing else that changes vLLM has `changing` at the same time.

        What vLLM refuses is raised.
        """
        while self._turn is not None:
            if self._turn.is_ours and self._turn.is_wanted:
                async with changing:
                    self.stands_still = True
                    await control.pause(forget=False)
                self.hand_overs += 1
                self._turn.leave()
            elif not self._turn.is_ours and self._turn.try_take():
                async with changing:
                    self.stands_still = False
                    await go_on()
            await asyncio.sleep(POLL)

    def close(self) -> None:
        if self._turn is not None:
            self._turn.close()
