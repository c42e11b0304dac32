"""Published weights into a live model: everything is checked before anything is changed.

A published directory is a whole model, or a LoRA adapter. An adapter stands for the model that the engine was started
with, as its files have it, plus a difference: it is read as that whole model, so nothing of what was installed before
is left. Merging happens in float32, and the result alone is rounded to the engine's type.

Left out on purpose: checkpoints whose tensors transformers renames while loading (fused experts); they are refused by
name like any other that does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.inference.weights.errors import WeightsError as WeightsError
from headrace.inference.weights.marker import marker_of
from headrace.rollout.version import Version
from headrace.transport.adapter import AdapterError, is_adapter, merged, read_adapter
from headrace.transport.weights import checksum
from headrace.transport.weights_link import is_linked

Receive = Callable[[Path, Version], dict[str, Tensor]]

NAMED = 3
"""How many tensors an error message names."""


class _Index(msgspec.Struct):
    """Of an index of tensor files, what is read: the file of each tensor."""

    weight_map: dict[str, str]


class PublishedWeights(msgspec.Struct):
    """A version as read from disk."""

    version: Version
    checksum: str
    tensors: dict[str, Tensor]


def read_published(
    directory: Path,
    version: Version,
    *,
    parameters: Mapping[str, Tensor],
    receive: Receive,
    base: Path | None = None,
) -> PublishedWeights:
    """Read a published directory, refusing one that is incomplete, damaged or of another version.

    `parameters` are those of the model it is for, and `base` the directory which that was loaded from. Tensors that
    stayed in the trainer's memory come through `receive`.
    """
    marker = marker_of(directory, version)
    try:
        found = checksum(directory)
    except OSError as error:  # retired meanwhile, say
        raise WeightsError(str(error)) from error
    if found != marker.checksum:
        raise WeightsError(f"{directory} is damaged: its files have checksum {found}, not {marker.checksum}")
    if is_linked(directory):
        return PublishedWeights(version, found, receive(directory, version))
    if is_adapter(directory):
        return PublishedWeights(version, found, _adapted(base, directory, parameters))
    return PublishedWeights(version, found, dict(_stored(sorted(directory.glob("*.safetensors")))))


def _adapted(base: Path | None, directory: Path, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The base's tensors, as far as the model has them, with the adapter's differences added."""
    try:
        adapter = read_adapter(directory)
    except AdapterError as error:
        raise WeightsError(str(error)) from error
    if base is None:
        raise WeightsError(f"{directory} is an adapter, but the engine was not told where its base model is")
    left = {f"{layer}.weight": matrices for layer, matrices in adapter.layers.items()}
    tensors: dict[str, Tensor] = {}
    for name, tensor in _stored(model_files(base)):
        if name not in parameters:
            continue  # what the model had no use for when it was loaded, it has no use for now
        tensors[name] = tensor
        if name in left:
            a, b = matrices = left.pop(name)
            if tensor.shape != (b.shape[0], a.shape[1]):
                shape = [b.shape[0], a.shape[1]]
                raise WeightsError(
                    f"{directory}: it changes {name} by {shape}, which is {list(tensor.shape)} in {base}"
                )
            tensors[name] = merged(tensor, matrices, adapter.config.scaling).to(parameters[name].dtype)
    if left:
        raise WeightsError(f"{directory} changes tensors that {base} does not have: {_some(sorted(left))}")
    return tensors


def _stored(files: Iterable[Path]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of some files, one after the other."""
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (it is no mapping)
                    yield name, file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{path}: {error}") from error


def model_files(directory: Path) -> list[Path]:
    """Where transformers finds a model's tensors: beside them may be others, of another format."""
    path = directory / "model.safetensors"
    if path.is_file():
        return [path]
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        raise WeightsError(f"{directory} has no safetensors files")
    try:
        places = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except (OSError, msgspec.DecodeError) as error:
        raise WeightsError(f"{index}: {error}") from error
    return [directory / name for name in sorted(set(places.values()))]


def install(model: torch.nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy the tensors into the model in place, or refuse them all."""
    parameters = model.state_dict()
    given = {parameters[name].data_ptr() for name in tensors if name in parameters}
    tied = {name for name, parameter in parameters.items() if parameter.data_ptr() in given}  # of those one is enough
    problem = misfit(parameters, tensors, tied)
    if problem is not None:
        raise WeightsError(problem)
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)


def misfit(
    parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor], optional: Collection[str] = ()
) -> str | None:
    """Why the tensors are not this model's, or None. Those that are optional may be there or not."""
    unknown = [name for name in tensors if name not in parameters and name not in optional]
    if unknown:
        return f"tensors that the model does not have: {_some(unknown)}"
    missing = [name for name in parameters if name not in tensors and name not in optional]
    if missing:
        return f"tensors are missing: {_some(missing)}"
    reshaped = [
        f"{name} is {list(tensor.shape)}, not {list(parameters[name].shape)}"
        for name, tensor in tensors.items()
        if name in parameters and tensor.shape != parameters[name].shape
    ]
    return f"tensors of another shape: {_some(reshaped)}" if reshaped else None


def _some(names: list[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")
