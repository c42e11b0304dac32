"""Reading and installing of published weights: everything is checked before anything is changed.

A published directory is a whole model or a LoRA adapter. An adapter is merged with the weights that the engine was
started with, so that nothing of earlier versions is left: in float32, and only the result is rounded to the engine's
type. For an engine on a GPU these weights are read once and kept in pinned memory, and each version is merged on the
GPU while the engine samples. On a CPU they are read for each version, from the page cache; also for a GPU if host
memory is too small to keep them: one by one while the engine pauses, so that there is no second copy of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.inference.latents import read_gates
from headrace.inference.memory import keeps_base_in_memory
from headrace.inference.weights.buffers import copy_tensors, free_staging, stage
from headrace.inference.weights.file_layout import expert_slices
from headrace.inference.weights.link import Received
from headrace.inference.weights.reading import WeightsError, abbreviate, check_digest, read_checked_marker
from headrace.machine import free_memory
from headrace.rollout.version import Version
from headrace.transport.adapter import Adapter, AdapterError, Matrices, is_adapter, merged, read_adapter
from headrace.transport.files import require_regular
from headrace.transport.weights_link import is_linked

Receive = Callable[[Path, Version], Received]
Copy = Callable[[Sequence[tuple[Tensor, Tensor]]], torch.cuda.Event | None]
"""Copies pairs of target and source, and returns the end of the copies if they are only queued."""


class PublishedWeights(msgspec.Struct):
    """The tensors of a version, from disk or in the trainer's memory; to be released once they are installed."""

    version: Version
    checksum: str
    tensors: Mapping[str, Tensor]
    on_release: Callable[[], None] | None = None
    """Frees memory that the tensors borrow."""
    copied: torch.cuda.Event | None = None
    """The end of the copies that `install` has queued on a GPU."""

    @property
    def is_on_gpu(self) -> bool:
        return not isinstance(self.tensors, MergedTensors) and all(tensor.is_cuda for tensor in self.tensors.values())

    def install(self, parameters: Mapping[str, Tensor], copy: Copy = copy_tensors) -> None:
        """Copy the tensors into a model's parameters in place; raises `WeightsError` only before any is changed."""
        tensors = self.tensors
        addresses = {parameters[name].data_ptr() for name in tensors if name in parameters}
        tied = {
            name for name, parameter in parameters.items() if parameter.data_ptr() in addresses
        }  # need only one of each
        mismatch = find_mismatch(parameters, tensors, tied)
        if mismatch is not None:
            raise WeightsError(mismatch)
        if not isinstance(tensors, MergedTensors):
            self.copied = copy([(parameters[name], tensor) for name, tensor in tensors.items()])
            return
        try:
            # One by one, since there is no memory for all. In one stream, since the next takes the memory of this one.
            for name in tensors:
                self.copied = copy_tensors([(parameters[name], tensors[name])])
        except WeightsError as error:
            raise OSError(str(error)) from error

    def release(self) -> None:
        """Wait for the copies of the tensors, and drop these."""
        if self.copied is not None:
            self.copied.synchronize()
        if isinstance(self.tensors, dict):
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

    `parameters` are those of the model that the weights are for, as its files have them (`file_layout`), and `base` is
    what it was loaded from. Tensors that are still in the trainer's memory come through `receive`.
    """
    actual = check_digest(directory, read_checked_marker(directory, version).checksum)
    if is_linked(directory):
        received = receive(directory, version)
        return PublishedWeights(version, actual, received.tensors, received.release)
    if is_adapter(directory):
        if base is None:
            raise WeightsError(f"{directory} is an adapter, but the engine has no directory of its base model")
        try:
            adapter = read_adapter(directory)
        except AdapterError as error:
            raise WeightsError(str(error)) from error
        tensors = base.merge(adapter, parameters, directory)
        return PublishedWeights(version, actual, tensors, partial(free_staging, base.device))
    tensors = {**dict(read_tensors(sorted(directory.glob("*.safetensors")))), **read_gates(directory)}
    return PublishedWeights(version, actual, tensors)


class BaseWeights:
    """The weights in `directory`, for an engine whose parameters are on `device`."""

    def __init__(self, directory: Path, device: torch.device) -> None:
        self.directory = directory
        self.device = device
        self._pinned: dict[str, Tensor] = {}

    def merge(self, adapter: Adapter, parameters: Mapping[str, Tensor], source: Path) -> Mapping[str, Tensor]:
        """Return the tensors that the model has parameters for, with the adapter's differences added.

        They are on the GPU if they fit; if host memory is short, they are merged one by one as they are taken. Errors
        name the adapter's `source`.
        """
        lazy = MergedTensors(self, adapter, parameters, source)
        if self.device.type != "cuda":
            return dict(lazy.items())
        size = sum(parameters[name].nbytes for name in lazy)
        if not self._pinned:
            if not keeps_base_in_memory(size, free_memory()):
                return lazy
            for name, tensor in read_tensors(model_files(self.directory)):
                if name in parameters:
                    pinned = torch.empty_like(tensor, memory_format=torch.contiguous_format, pin_memory=True)
                    self._pinned[name] = pinned.copy_(tensor)
        with torch.cuda.stream(self._stream):
            tensors = stage(self.device, size, lambda device: {name: lazy.merged_on(name, device) for name in lazy})
            self._stream.synchronize()
        return tensors

    @cached_property
    def places(self) -> dict[str, tuple[Path, torch.Size]]:
        """File and shape of each tensor."""
        places = {}
        for path in model_files(self.directory):
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    places[name] = path, torch.Size(file.get_slice(name).get_shape())
        return places

    def tensor(self, name: str) -> Tensor:
        if name in self._pinned:
            return self._pinned[name]
        path, _ = self.places[name]
        with _opened(path) as file:
            return file.get_tensor(name)  # type: ignore[no-any-return]

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]


class MergedTensors(Mapping[str, Tensor]):
    """The tensors of a base model with an adapter's differences, each merged when it is taken."""

    def __init__(self, base: BaseWeights, adapter: Adapter, parameters: Mapping[str, Tensor], source: Path) -> None:
        self._base, self._adapter, self._parameters = base, adapter, parameters
        self.shapes = {name: shape for name, (_, shape) in base.places.items() if name in parameters}
        self._gates = read_gates(source)
        self._matrices = self._by_tensor(adapter)
        if unknown := sorted(name for name in self._matrices if name not in self.shapes):
            raise WeightsError(f"{source} changes tensors that {base.directory} does not have: {abbreviate(unknown)}")
        for name, (a, b) in self._matrices.items():
            shape = [*b.shape[:-1], a.shape[-1]]
            if list(self.shapes[name]) != shape:
                raise WeightsError(f"{source}: its {name} is {shape}, but {[*self.shapes[name]]} in {base.directory}")
        self.shapes |= {name: tensor.shape for name, tensor in self._gates.items()}

    def _by_tensor(self, adapter: Adapter) -> dict[str, Matrices]:
        """Return the matrices by the names of tensors in files, which may have experts one by one."""
        by_tensor = {f"{layer}.weight": matrices for layer, matrices in adapter.layers.items()}
        if targets := adapter.config.target_parameters:
            for name, part in expert_slices(self._base.directory, targets).items():
                if part.layer in adapter.layers:
                    by_tensor[name] = part.matrices(*adapter.layers[part.layer])
                    by_tensor.pop(f"{part.layer}.weight", None)
        return by_tensor

    def __getitem__(self, name: str) -> Tensor:
        return self.merged_on(name, self._base.device)

    def __contains__(self, name: object) -> bool:
        return name in self.shapes  # without merging it

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def merged_on(self, name: str, device: torch.device) -> Tensor:
        """Return a tensor with the adapter's difference added, on a device."""
        if name in self._gates:
            return self._gates[name].to(device)
        whole = self._base.tensor(name).to(device, non_blocking=True)
        if name in self._matrices:
            a, b = self._matrices[name]
            whole = merged(whole, Matrices(a.to(device), b.to(device)), self._adapter.config.scaling)
        return whole.to(self._parameters[name].dtype)


class _Index(msgspec.Struct):
    """The part of an index of tensor files that is read."""

    weight_map: dict[str, str]
    """The file of each tensor."""


def read_tensors(files: Iterable[Path]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of safetensors files one by one."""
    for path in files:
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                yield name, file.get_tensor(name)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file for the block, and raise its errors as `WeightsError`."""
    try:
        with safe_open(require_regular(path), framework="pt") as file:
            yield file
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
    shapes = tensors.shapes if isinstance(tensors, MergedTensors) else {name: t.shape for name, t in tensors.items()}
    reshaped = [
        f"{name} is {list(shape)}, not {list(parameters[name].shape)}"
        for name, shape in shapes.items()
        if name in parameters and shape != parameters[name].shape
    ]
    return f"tensors of another shape: {abbreviate(reshaped)}" if reshaped else None
