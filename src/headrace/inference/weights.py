"""Published weights into a live model: everything is checked before anything is changed.

Left out on purpose: checkpoints whose tensors transformers renames while loading (fused experts); they are refused by
name like any other that does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from headrace.errors import Failure
from headrace.rollout.batch import SchemaError
from headrace.rollout.version import Version
from headrace.transport.weights import checksum, read_marker

NAMED = 3
"""How many tensors an error message names."""


class WeightsError(Failure):
    """The directory cannot become the engine's weights. The model is as it was."""


class PublishedWeights(msgspec.Struct):
    """A version as read from disk."""

    version: Version
    checksum: str
    tensors: dict[str, Tensor]


def read_published(directory: Path, version: Version) -> PublishedWeights:
    """Read a published directory, refusing one that is incomplete, damaged or of another version."""
    try:
        marker = read_marker(directory)
    except (OSError, SchemaError, msgspec.DecodeError) as error:
        raise WeightsError(str(error)) from error
    if marker.version != version:
        raise WeightsError(f"{directory} holds version {marker.version}, but {version} was asked for")
    found = checksum(directory)
    if found != marker.checksum:
        raise WeightsError(f"{directory} is damaged: its tensors have checksum {found}, not {marker.checksum}")
    tensors: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        try:
            tensors.update(load_file(file))
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{file}: {error}") from error
    return PublishedWeights(version, found, tensors)


def install(model: torch.nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy the tensors into the model in place, or refuse them all."""
    parameters = model.state_dict()
    problem = misfit(parameters, tensors)
    if problem is not None:
        raise WeightsError(problem)
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)


def misfit(parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> str | None:
    """Why the tensors are not this model's, or None. Of tied parameters one is enough."""
    unknown = [name for name in tensors if name not in parameters]
    if unknown:
        return f"tensors that the model does not have: {_some(unknown)}"
    given = {parameters[name].data_ptr() for name in tensors}
    missing = [name for name, parameter in parameters.items() if parameter.data_ptr() not in given]
    if missing:
        return f"tensors are missing: {_some(missing)}"
    reshaped = [
        f"{name} is {list(tensor.shape)}, not {list(parameters[name].shape)}"
        for name, tensor in tensors.items()
        if tensor.shape != parameters[name].shape
    ]
    return f"tensors of another shape: {_some(reshaped)}" if reshaped else None


def _some(names: list[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")
