"""Published weights into a live model: everything is checked before anything is changed.

A published directory is a whole model, or a LoRA adapter. An adapter stands for the model that the engine was started
with, as its files have it, plus a difference: it is read as that whole model, so nothing of what was installed before
is left (see `base`).

Left out on purpose: checkpoints whose tensors transformers renames while loading (fused experts); the trainer
refuses them before its first step (`Publisher.check_embedded`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from headrace.inference.weights.base import Base
from headrace.inference.weights.errors import WeightsError as WeightsError
from headrace.inference.weights.errors import some
from headrace.inference.weights.files import model_files as model_files
from headrace.inference.weights.files import stored
from headrace.inference.weights.link import Received
from headrace.inference.weights.marker import marker_of
from headrace.inference.weights.staging import leave_staging
from headrace.rollout.version import Version
from headrace.transport.adapter import AdapterError, is_adapter, read_adapter
from headrace.transport.weights import checksum
from headrace.transport.weights_link import is_linked

Receive = Callable[[Path, Version], Received]


def _nothing() -> None:
    pass


class PublishedWeights(msgspec.Struct):
    """A version as read from disk, or as the trainer has it in its memory. To be released once it is installed."""

    version: Version
    checksum: str
    tensors: dict[str, Tensor]
    give_back: Callable[[], None] = _nothing
    """What is to be done where the tensors are only lent."""

    def release(self) -> None:
        """Nobody uses the tensors any more; what was copied out of them is all there."""
        self.tensors.clear()
        self.give_back()


def read_published(
    directory: Path,
    version: Version,
    *,
    parameters: Mapping[str, Tensor],
    receive: Receive,
    base: Base | None = None,
) -> PublishedWeights:
    """Read a published directory, refusing one that is incomplete, damaged or of another version.

    `parameters` are those of the model it is for, and `base` is what that was loaded from. Tensors that stayed in the
    trainer's memory come through `receive`.
    """
    marker = marker_of(directory, version)
    try:
        found = checksum(directory)
    except OSError as error:  # retired meanwhile, say
        raise WeightsError(str(error)) from error
    if found != marker.checksum:
        raise WeightsError(f"{directory} is damaged: its files have checksum {found}, not {marker.checksum}")
    if is_linked(directory):
        received = receive(directory, version)
        return PublishedWeights(version, found, received.tensors, received.release)
    if is_adapter(directory):
        tensors = _adapted(base, directory, parameters)
        where = next(iter(tensors.values())).device
        return PublishedWeights(version, found, tensors, partial(leave_staging, where))
    return PublishedWeights(version, found, dict(stored(sorted(directory.glob("*.safetensors")))))


def _adapted(base: Base | None, directory: Path, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The base's tensors, as far as the model has them, with the adapter's differences added."""
    try:
        adapter = read_adapter(directory)
    except AdapterError as error:
        raise WeightsError(str(error)) from error
    if base is None:
        raise WeightsError(f"{directory} is an adapter, but the engine was not told where its base model is")
    return base.adapted(adapter, parameters, directory)


def install(parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy the tensors into a model's own in place, or refuse them all. When it returns they have been read."""
    given = {parameters[name].data_ptr() for name in tensors if name in parameters}
    tied = {name for name, parameter in parameters.items() if parameter.data_ptr() in given}  # of those one is enough
    problem = misfit(parameters, tensors, tied)
    if problem is not None:
        raise WeightsError(problem)
    targets = [parameters[name] for name in tensors]
    with torch.no_grad():
        torch._foreach_copy_(targets, [*tensors.values()])
    for device in {target.device for target in targets if target.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def misfit(
    parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor], optional: Collection[str] = ()
) -> str | None:
    """Why the tensors are not this model's, or None. Those that are optional may be there or not."""
    unknown = [name for name in tensors if name not in parameters and name not in optional]
    if unknown:
        return f"tensors that the model does not have: {some(unknown)}"
    missing = [name for name in parameters if name not in tensors and name not in optional]
    if missing:
        return f"tensors are missing: {some(missing)}"
    reshaped = [
        f"{name} is {list(tensor.shape)}, not {list(parameters[name].shape)}"
        for name, tensor in tensors.items()
        if name in parameters and tensor.shape != parameters[name].shape
    ]
    return f"tensors of another shape: {some(reshaped)}" if reshaped else None
