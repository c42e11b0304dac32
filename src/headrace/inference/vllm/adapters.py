"""LoRA adapters in vLLM: those that requests name, and the policy's own, one per version.

vLLM keeps caches by an adapter's name, so every load gets a new one; requests in flight keep the adapter that they
began with, and with it their version. So do those that have not reached vLLM yet: an adapter that is no longer wanted
is unloaded once nobody needs it. An adapter's files are copied first, since vLLM may read them again later, when the
trainer has long removed them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import shutil
from collections import Counter
from pathlib import Path

from headrace.inference.backend import EngineError
from headrace.inference.vllm.control import Control, Refusal
from headrace.inference.weights.errors import WeightsError
from headrace.rollout.version import Version
from headrace.transport.adapter import CONFIG, TENSORS, AdapterError, read_config
from headrace.transport.weights import checksum

log = logging.getLogger(__name__)

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM can be started for."""


def rank_for(rank: int) -> int | None:
    """The smallest that has room for this one."""
    return next((allowed for allowed in RANKS if allowed >= rank), None)


class Adapters:
    """What is loaded. `directory` is where the copies go."""

    def __init__(self, directory: Path, max_rank: int) -> None:
        self._directory = directory
        self._max_rank = max_rank
        self._numbers = itertools.count()
        self._held: Counter[str] = Counter()
        self._unwanted: set[str] = set()
        self.names: dict[str, str] = {}
        """What requests call an adapter, and what vLLM calls it."""
        self.policy: str | None = None
        """What vLLM calls the newest version of the policy, if that is an adapter."""

    def hold(self, vllm_name: str) -> None:
        """One more request is in flight that needs it."""
        self._held[vllm_name] += 1

    def release(self, vllm_name: str) -> None:
        self._held[vllm_name] -= 1
        if not self._held[vllm_name]:
            del self._held[vllm_name]

    async def load(self, control: Control, name: str, directory: Path) -> None:
        """Raises `WeightsError`, and what was loaded under that name before stays."""
        loaded = await self._load(control, f"{name}@{next(self._numbers)}", directory)
        before, self.names[name] = self.names.get(name), loaded
        await self._drop(control, before)

    async def unload(self, control: Control, name: str) -> None:
        await self._drop(control, self.names.pop(name))

    async def load_policy(self, control: Control, directory: Path, version: Version, expected: str) -> str:
        """Load a published adapter for requests that name none; `use_policy` has them get it. Returns vLLM's name."""
        found = await asyncio.to_thread(checksum, directory)
        if found != expected:
            raise WeightsError(f"{directory} is damaged: its files have checksum {found}, not {expected}")
        return await self._load(control, f"policy@{version}#{next(self._numbers)}", directory)

    def use_policy(self, vllm_name: str | None) -> None:
        """From here on. The one before goes with the next `sweep` that finds nobody who needs it."""
        if self.policy is not None:
            self._unwanted.add(self.policy)
        self.policy = vllm_name

    async def sweep(self, control: Control) -> None:
        """Unload what nobody wants, or needs any more."""
        free = [name for name in self._unwanted if not self._held[name]]
        self._unwanted.difference_update(free)  # at once: another sweep may be under way
        for name in free:
            try:
                await control.unload_adapter(name)
            except EngineError as error:  # nobody asks for it again: it takes room, and does no other harm
                log.warning("vLLM keeps the adapter %s, which is no longer needed: %s", name, error)
            shutil.rmtree(self._directory / name.replace("/", "_"), ignore_errors=True)

    async def _load(self, control: Control, vllm_name: str, directory: Path) -> str:
        try:
            rank = read_config(directory / CONFIG).r
        except AdapterError as error:
            raise WeightsError(str(error)) from error
        if rank > self._max_rank:
            raise WeightsError(f"{directory} has rank {rank}: set inference.vllm.max_lora_rank to at least that")
        copy = self._directory / vllm_name.replace("/", "_")
        try:
            await asyncio.to_thread(_copy, directory, copy)
            await control.load_adapter(vllm_name, copy)
        except (OSError, Refusal) as error:
            shutil.rmtree(copy, ignore_errors=True)
            raise WeightsError(f"{directory} cannot be loaded as an adapter: {error}") from error
        return vllm_name

    async def _drop(self, control: Control, vllm_name: str | None) -> None:
        if vllm_name is not None:
            self._unwanted.add(vllm_name)
        await self.sweep(control)


def _copy(directory: Path, target: Path) -> None:
    target.mkdir(parents=True)
    for name in (CONFIG, TENSORS):
        shutil.copyfile(directory / name, target / name)
