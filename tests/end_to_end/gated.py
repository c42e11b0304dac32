"""An environment whose demonstrations and episodes wait for what the run reports, to see what goes on beside what."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from headrace.environments.base import Context
from headrace.environments.shipped.reverse_text import ReverseText
from headrace.observe.metrics import read_metrics
from headrace.rollout.types import Message, Rollout, Task
from headrace.transport.run_dir import RunDir

BATCH = 4
PATIENCE = 240


class Gated(ReverseText):
    """Step 3 waits until the orchestrator is there, step 5 until a version has been evaluated that training has made.

    Every episode waits for step 4: the first evaluation is under way while steps 3 and 4 are trained.
    """

    def __init__(self, run: str, split: str = "train") -> None:
        super().__init__(split, num_tasks=4)
        self.of_run = RunDir(Path(run))

    def demonstrations(self, seed: int) -> Iterator[list[Message]]:
        gates: dict[int, Callable[[], bool]] = {
            2 * BATCH: lambda: self.of_run.weights.acknowledged() is not None,
            4 * BATCH: lambda: any(evaluated(record) > 0 for record in read_metrics(self.of_run.metrics)),
        }
        for number, messages in enumerate(super().demonstrations(seed)):
            deadline = time.monotonic() + PATIENCE
            while number in gates and not gates[number]():
                assert time.monotonic() < deadline, f"example {number} waited too long"
                time.sleep(0.05)
            yield messages

    async def run(self, task: Task, context: Context) -> list[Rollout]:
        async with asyncio.timeout(PATIENCE):
            while not any("loss" in record and record["step"] == 4 for record in read_metrics(self.of_run.metrics)):
                await asyncio.sleep(0.05)
        return await super().run(task, context)


def evaluated(record: dict[str, float]) -> float:
    """The version whose evaluation a record is of; -1 for others."""
    return record["step"] if any(key.startswith("eval/") for key in record) else -1
