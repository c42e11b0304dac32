"""Reading and installing of published weights: everything is checked before anything is changed.

A published directory is a whole model or a LoRA adapter. An adapter is merged with the weights that the engine was
started with (see `base_weights`), so that nothing of earlier versions is left.

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

from headrace.inference.weights.base_weights import BaseWeights, read_tensors
from headrace.inference.weights.buffers import free_staging
from headrace.inference.weights.errors import WeightsError, abbreviate, read_checked_marker
from headrace.inference.weights.link import Received
from headrace.rollout.version import Version
from headrace.transport.adapter import AdapterError, is_adapter, read_adapter
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
