"""Have all workers of a vLLM fetch a published version beside the sampling, before anything stands still for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from headrace.inference.vllm.control import Control, Refusal
from headrace.inference.weights.errors import WeightsError, WeightsUnreachable
from headrace.rollout.version import Version

LOOK = 0.02
"""Seconds until the first look at whether the workers have a version; then each time longer, up to the next."""
LONGEST_LOOK = 0.5
LONGEST_FETCH = 600.0
"""Seconds after which a version that has not come is given up."""


async def fetch_everywhere(control: Control, directory: Path, version: Version, copies: int) -> None:
    """Returns once every worker of every copy of the model has it. Raises `WeightsError`, and nothing has changed."""
    arguments = (str(directory), str(version))
    await control.on_workers("fetch_published", *arguments)
    try:
        async with asyncio.timeout(LONGEST_FETCH):
            await _fetched(control, arguments)
    except TimeoutError as error:
        raise WeightsUnreachable(
            f"weights {version} did not reach vLLM's workers within {LONGEST_FETCH:g} s"
        ) from error
    if copies == 1:
        return
    try:
        await control.on_workers("await_published", *arguments)
    except Refusal as error:  # the first copy has it, so it can be had
        raise WeightsUnreachable(f"not every copy of the model could fetch weights {version}: {error}") from error


async def _fetched(control: Control, arguments: tuple[str, str]) -> None:
    """Until the workers of the first copy have it: of the others nothing is heard."""
    look = LOOK
    while True:
        found = await control.on_workers("has_published", *arguments)
        if problem := next((worker for worker in found if worker["problem"]), None):
            kind = WeightsUnreachable if problem["unreachable"] else WeightsError
            raise kind(problem["problem"])
        if all(worker["done"] for worker in found):
            return
        await asyncio.sleep(look)
        look = min(2 * look, LONGEST_LOOK)
