"""A function that waits (for a model, say) in a thread of its own, so that hundreds can at once.

The loop's own threads are few, and others need them. A thread cannot be ended: one whose episode is over is left to
find out when it asks the model again.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


async def in_thread(function: Callable[[], Any]) -> Any:
    """What the function returns, or what it raises."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    outcome: list[Callable[[], Any]] = []
    context = contextvars.copy_context()

    def work() -> None:
        try:
            result = context.run(function)
            outcome.append(lambda: result)
        except BaseException as error:  # sys.exit() would end the thread without a word
            outcome.append(_raising(error))
        with suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=work, name="agent", daemon=True).start()
    await done.wait()
    return outcome[0]()


def _raising(error: BaseException) -> Callable[[], Any]:
    def raise_it() -> Any:
        raise error

    return raise_it
