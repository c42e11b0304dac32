"""Reading and installing of published weights: everything is checked before anything is changed.

A published directory is a whole model or a LoRA adapter. An adapter is merged with the weights that the engine was
started with, so that nothing of earlier versions is left: in float32, and only the result is rounded to the engine's
type. For an engine on a GPU these weights are read once and kept in pinned memory, and each version is merged on the
GPU while the engine samples. On a CPU they are read for each version, from the page cache.

Left out on purpose: checkpoints whose tensors transformers renames while loading (fused experts); the trainer
refuses them before its first step (`Publisher.check_embedded`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.inference.weights.buffers import free_staging, stage
from headrace.inference.weights.errors import WeightsError, abbreviate, read_checked_marker
from headrace.inference.weights.link import Received
from headrace.rollout.version import Version
from headrace.transport.adapter import Adapter, AdapterError, Matrices, is_adapter, merged, read_adapter
from headrace.transport.weights import checksum
from headrace.transport.weights_link import is_linked

Receive = Callable[[Path, Version], Received]


class PublishedWeights(msgspec.Struct):
    """The tensors of a version, from disk or in the trainer's memory; to be released once they are installed."""

    version: Version
    checksum: str
    tensors: dict[str, Tensor]
    on_release: Callable[[], None] | None = None
    """Frees memory that the tensors borrow."""

    def release(self) -> None:
        """Drop the tensors, after all copies of them are complete."""
        self.tensors.clear()
        if self.on_release is not None:
            self.on_release()


def read_published(
    directory: Path,
    version: Version,
    *,
    parameters: Mapping[str, Tensor],
    receive: Receive,
    base: BaseWeights | None = None,
) -> PublishedWeights:
    """Read a published directory; raises `WeightsError` if it is incomplete, damaged or of another version.

    `parameters` are those of the model that the weights are for, and `base` is what it was loaded from. Tensors that
    are still in the trainer's memory come through `receive`.
    """
    marker = read_checked_marker(directory, version)
    try:
        actual = checksum(directory)
    except OSError as error:  # e.g. the version was retired meanwhile
        raise WeightsError(str(error)) from error
    if actual != marker.checksum:
        raise WeightsError(f"{directory} is damaged: its files have checksum {actual}, not {marker.checksum}")
    if is_linked(directory):
        received = receive(directory, version)
        return PublishedWeights(version, actual, received.tensors, received.release)
    if is_adapter(directory):
        tensors = _merge_adapter(base, directory, parameters)
        device = next(iter(tensors.values())).device
        return PublishedWeights(version, actual, tensors, partial(free_staging, device))
    return PublishedWeights(version, actual, dict(read_tensors(sorted(directory.glob("*.safetensors")))))


def _merge_adapter(base: BaseWeights | None, directory: Path, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    try:
        adapter = read_adapter(directory)
    except AdapterError as error:
        raise WeightsError(str(error)) from error
    if base is None:
        raise WeightsError(f"{directory} is an adapter, but the engine has no directory of its base model")
    return base.merge(adapter, parameters, directory)


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


def install(parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy the tensors into a model's parameters in place, or raise before any is changed; waits for the copies."""
    addresses = {parameters[name].data_ptr() for name in tensors if name in parameters}
    tied = {
        name for name, parameter in parameters.items() if parameter.data_ptr() in addresses
    }  # need only one of each
    mismatch = find_mismatch(parameters, tensors, tied)
    if mismatch is not None:
        raise WeightsError(mismatch)
    targets = [parameters[name] for name in tensors]
    with torch.no_grad():
        torch._foreach_copy_(targets, [*tensors.values()])
    for device in {target.device for target in targets if target.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def find_mismatch(
    parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor], optional: Collection[str] = ()
) -> str | None:
    """Describe why the tensors do not fit the parameters, of which `optional` ones may be missing; None if they do."""
    unknown = [name for name in tensors if name not in parameters and name not in optional]
    if unknown:
        return f"tensors that the model does not have: {abbreviate(unknown)}"
    missing = [name for name in parameters if name not in tensors and name not in optional]
    if missing:
        return f"tensors are missing: {abbreviate(missing)}"
    reshaped = [
        f"{name} is {list(tensor.shape)}, not {list(parameters[name].shape)}"
        for name, tensor in tensors.items()
        if name in parameters and tensor.shape != parameters[name].shape
    ]
    return f"tensors of another shape: {abbreviate(reshaped)}" if reshaped else None
