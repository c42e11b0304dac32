"""LoRA adapters in vLLM: those that requests name, and the policy's, one per version.

vLLM's caches depend on an adapter's name, so every load gets a new name, and requests in flight keep the adapter and
the version that they started with. A replaced adapter is unloaded once no request uses it. The files are copied
first: vLLM may read them again later, after the trainer has removed them.
"""

from __future__ import annotations

import itertools
import logging
import shutil
from collections import Counter
from pathlib import Path

from headrace.inference.backend import EngineError, ModelNotFound
from headrace.inference.vllm.control import CallRefused, Control
from headrace.inference.weights.errors import WeightsError
from headrace.inference.weights.reading import DirectoryReader
from headrace.rollout.version import Version
from headrace.transport.adapter import CONFIG, TENSORS, AdapterError, read_config
from headrace.transport.files import require_regular
from headrace.transport.weights import checksum

log = logging.getLogger(__name__)

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of vLLM's --max-lora-rank."""


def rank_for(rank: int) -> int | None:
    """Return the smallest value of --max-lora-rank for adapters of this rank."""
    return next((allowed for allowed in RANKS if allowed >= rank), None)


class Adapters:
    """The loaded adapters. `directory` is for copies of their files; with a `max_rank` of 0 none can be loaded."""

    def __init__(self, control: Control, directory: Path, max_rank: int, reader: DirectoryReader) -> None:
        self.max_rank = max_rank
        self._control = control
        self._directory = directory
        self._reader = reader
        self._numbers = itertools.count()
        self._uses: Counter[str] = Counter()
        self._replaced: set[str] = set()
        self.names: dict[str, str] = {}
        """vLLM's names by the names in requests."""
        self.policy: str | None = None
        """vLLM's name of the newest version of the policy, if that is an adapter."""

    def vllm_name(self, name: str) -> str:
        """Return vLLM's name of a loaded adapter. Raises `ModelNotFound`."""
        if name not in self.names:
            raise ModelNotFound(f"no adapter {name!r} is loaded")
        return self.names[name]

    def hold(self, vllm_name: str) -> None:
        """Count a request in flight that uses it."""
        self._uses[vllm_name] += 1

    def release(self, vllm_name: str) -> None:
        self._uses[vllm_name] -= 1
        if not self._uses[vllm_name]:
            del self._uses[vllm_name]

    async def load(self, name: str, directory: Path) -> None:
        """Load an adapter, replacing one of that name. Raises `WeightsError`, and the old one stays."""
        if not self.max_rank:
            raise WeightsError("vLLM was started without adapters. Set inference.vllm.max_lora_rank")
        loaded = await self._load(f"{name}@{next(self._numbers)}", directory)
        if name in self.names:
            self._replaced.add(self.names[name])
        self.names[name] = loaded
        await self.unload_unused()

    async def unload(self, name: str) -> None:
        self.vllm_name(name)
        self._replaced.add(self.names.pop(name))
        await self.unload_unused()

    async def load_policy(self, directory: Path, version: Version, expected: str) -> str:
        """Load a published adapter and return vLLM's name; `set_policy` puts it into use."""
        try:
            actual = await self._reader.read_async(directory, lambda: checksum(directory))
        except OSError as error:
            raise WeightsError(str(error)) from error
        if actual != expected:
            raise WeightsError(f"{directory} is damaged: its files have checksum {actual}, not {expected}")
        return await self._load(f"policy@{version}#{next(self._numbers)}", directory)

    def set_policy(self, vllm_name: str | None) -> None:
        """Use this adapter for requests that name none. The previous one is unloaded when it is unused."""
        if self.policy is not None:
            self._replaced.add(self.policy)
        self.policy = vllm_name

    async def unload_unused(self) -> None:
        """Unload replaced adapters that no request uses."""
        free = [name for name in self._replaced if not self._uses[name]]
        self._replaced.difference_update(free)  # before the await: another call may be in progress
        for name in free:
            try:
                await self._control.unload_adapter(name)
            except EngineError as error:  # harmless but for its memory
                log.warning("vLLM did not unload the unused adapter %s: %s", name, error)
            shutil.rmtree(self._directory / name.replace("/", "_"), ignore_errors=True)

    async def _load(self, vllm_name: str, directory: Path) -> str:
        try:
            config = await self._reader.read_async(directory, lambda: read_config(directory / CONFIG))
        except AdapterError as error:
            raise WeightsError(str(error)) from error
        if config.r > self.max_rank:
            raise WeightsError(f"{directory} has rank {config.r}. Set inference.vllm.max_lora_rank to at least that")
        copy = self._directory / vllm_name.replace("/", "_")

        def copy_files() -> None:
            copy.mkdir(parents=True)
            for name in (CONFIG, TENSORS):
                shutil.copyfile(require_regular(directory / name), copy / name)

        try:
            await self._reader.read_async(directory, copy_files)
            await self._control.load_adapter(vllm_name, copy)
        except (OSError, CallRefused) as error:
            shutil.rmtree(copy, ignore_errors=True)
            raise WeightsError(f"{directory} cannot be loaded as an adapter: {error}") from error
        return vllm_name
