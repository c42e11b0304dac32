"""A model's `rollouts/eval-step-N.parquet`, in the form of evaluations during a run, written while episodes end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from headrace.rollout.types import Rollout
from headrace.transport.rollout_files import write_eval_rollouts
from headrace.transport.run_dir import RolloutKind

WRITE_INTERVAL_S = 60.0
"""Seconds between two writes: a kill loses what came after the last one."""


@asynccontextmanager
async def saving_rollouts(directory: Path, step: int) -> AsyncIterator[Callable[[Sequence[Rollout]], None]]:
    """Yield what takes the rollouts of an episode; all are in the file of `step` when the context ends.

    Rows of other episodes that the file has stay: an evaluation that goes on adds to it.
    """
    path = RolloutKind.EVAL.path(directory, step)
    waiting: list[Rollout] = []
    ended = asyncio.Event()

    async def write() -> None:
        if waiting:
            batch = waiting.copy()
            waiting.clear()
            await asyncio.to_thread(write_eval_rollouts, path, step, batch, add=True)

    async def write_often() -> None:
        while not ended.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), WRITE_INTERVAL_S)
            await write()

    writing = asyncio.create_task(write_often())
    try:
        yield waiting.extend
    finally:
        ended.set()
        await writing
