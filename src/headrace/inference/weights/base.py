"""The model that an engine was started with, as its files have it: what published adapters are merged with.

Merging happens in float32, and the result alone is rounded to the engine's type. For an engine on a GPU the tensors are
read once and kept in memory of the host that the GPU can fetch from by itself, and every version is merged there,
beside the sampling. On a CPU they are read each time: the system has the files in its memory anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from headrace.inference.weights.errors import WeightsError, some
from headrace.inference.weights.files import model_files, stored
from headrace.inference.weights.staging import staged
from headrace.transport.adapter import Adapter, Matrices, merged


class Base:
    """`device` is where the engine's weights are."""

    def __init__(self, directory: Path, device: torch.device) -> None:
        self.directory = directory
        self._device = device
        self._kept: dict[str, Tensor] = {}

    def adapted(self, adapter: Adapter, parameters: Mapping[str, Tensor], what: Path) -> dict[str, Tensor]:
        """The tensors that the model has parameters for, with the adapter's differences added.

        On a GPU they are there if it has room for them. `what` is what errors call the adapter.
        """
        if self._device.type != "cuda":
            return self._merged(adapter, parameters, what, self._device)
        if not self._kept:
            self._kept = {name: _in_pinned_memory(tensor) for name, tensor in self._wanted(parameters)}
        size = sum(parameters[name].nbytes for name in self._kept)
        with torch.cuda.stream(self._stream):
            tensors = staged(self._device, size, partial(self._merged, adapter, parameters, what))
            self._stream.synchronize()
        return tensors

    def _merged(
        self, adapter: Adapter, parameters: Mapping[str, Tensor], what: Path, where: torch.device
    ) -> dict[str, Tensor]:
        left = {f"{layer}.weight": matrices for layer, matrices in adapter.layers.items()}
        tensors: dict[str, Tensor] = {}
        for name, tensor in self._kept.items() or self._wanted(parameters):
            whole = tensor.to(where, non_blocking=True)
            if name in left:
                a, b = left.pop(name)
                if tensor.shape != (b.shape[0], a.shape[1]):
                    shape = [b.shape[0], a.shape[1]]
                    raise WeightsError(
                        f"{what}: it changes {name} by {shape}, which is {list(tensor.shape)} in {self.directory}"
                    )
                whole = merged(whole, Matrices(a.to(where), b.to(where)), adapter.config.scaling)
            tensors[name] = whole.to(parameters[name].dtype)
        if left:
            raise WeightsError(f"{what} changes tensors that {self.directory} does not have: {some(sorted(left))}")
        return tensors

    def _wanted(self, parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """What the model had no use for when it was loaded, it has no use for now."""
        return ((name, tensor) for name, tensor in stored(model_files(self.directory)) if name in parameters)

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]


def _in_pinned_memory(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format, pin_memory=True).copy_(tensor)
