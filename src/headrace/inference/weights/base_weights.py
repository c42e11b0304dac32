"""The weights that an engine was started with, as its files have them: published adapters are merged with them.

Adapters are merged in float32, and only the result is rounded to the engine's type. For an engine on a GPU the tensors
are read once and kept in pinned memory, and each version is merged on the GPU while the engine samples. On a CPU they
are read for each version, from the page cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.inference.weights.buffers import stage
from headrace.inference.weights.errors import WeightsError, abbreviate
from headrace.transport.adapter import Adapter, Matrices, merged


class BaseWeights:
    """The weights in `directory`, for an engine whose parameters are on `device`."""

    def __init__(self, directory: Path, device: torch.device) -> None:
        self.directory = directory
        self._device = device
        self._pinned: dict[str, Tensor] = {}

    def merge(self, adapter: Adapter, parameters: Mapping[str, Tensor], source: Path) -> dict[str, Tensor]:
        """Return the tensors that the model has parameters for, with the adapter's differences added.

        They are on the GPU if they fit. Errors name the adapter's `source`.
        """
        if self._device.type != "cuda":
            return self._merge_on(adapter, parameters, source, self._device)
        if not self._pinned:
            for name, tensor in self._read(parameters):
                pinned = torch.empty_like(tensor, memory_format=torch.contiguous_format, pin_memory=True)
                self._pinned[name] = pinned.copy_(tensor)
        size = sum(parameters[name].nbytes for name in self._pinned)
        with torch.cuda.stream(self._stream):
            tensors = stage(self._device, size, partial(self._merge_on, adapter, parameters, source))
            self._stream.synchronize()
        return tensors

    def _merge_on(
        self, adapter: Adapter, parameters: Mapping[str, Tensor], source: Path, device: torch.device
    ) -> dict[str, Tensor]:
        unmerged = {f"{layer}.weight": matrices for layer, matrices in adapter.layers.items()}
        tensors: dict[str, Tensor] = {}
        for name, tensor in self._pinned.items() or self._read(parameters):
            whole = tensor.to(device, non_blocking=True)
            if name in unmerged:
                a, b = unmerged.pop(name)
                if tensor.shape != (b.shape[0], a.shape[1]):
                    shape = [b.shape[0], a.shape[1]]
                    raise WeightsError(f"{source}: its {name} is {shape}, but {list(tensor.shape)} in {self.directory}")
                whole = merged(whole, Matrices(a.to(device), b.to(device)), adapter.config.scaling)
            tensors[name] = whole.to(parameters[name].dtype)
        if unmerged:
            names = abbreviate(sorted(unmerged))
            raise WeightsError(f"{source} changes tensors that {self.directory} does not have: {names}")
        return tensors

    def _read(self, parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Read the tensors that the model has parameters for; its files may have others."""
        return ((name, tensor) for name, tensor in read_tensors(model_files(self.directory)) if name in parameters)

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]


class _Index(msgspec.Struct):
    """The part of an index of tensor files that is read."""

    weight_map: dict[str, str]
    """The file of each tensor."""


def read_tensors(files: Iterable[Path]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of safetensors files one by one."""
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    yield name, file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{path}: {error}") from error


def model_files(directory: Path) -> list[Path]:
    """Return the tensor files that transformers loads; the directory may have others, of another format."""
    path = directory / "model.safetensors"
    if path.is_file():
        return [path]
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        raise WeightsError(f"{directory} has no safetensors files")
    try:
        weight_map = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except (OSError, msgspec.DecodeError) as error:
        raise WeightsError(f"{index}: {error}") from error
    return [directory / name for name in sorted(set(weight_map.values()))]
