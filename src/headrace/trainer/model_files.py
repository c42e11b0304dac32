"""A model as a Hugging Face directory, written by all ranks together: each one file of whole tensors.

Parameters that are spread over ranks are made whole one decoder layer at a time, on every rank, since that takes all of
them; one rank keeps the result. With a single rank the directory has one file and no index.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from headrace.trainer.ranks import Ranks

Tensors = dict[str, Tensor]

_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.py")
_NOT_COPIED = ("COMPLETE.json", "*.index.json", "adapter_config.json")
_LAYER = re.compile(r"^(.*?\.\d+)\.")


class ModelFiles:
    """What is not tensors: configuration, tokenizer, chat template, code. In memory: the directory may go."""

    def __init__(self, directory: Path) -> None:
        skipped = {path.name for pattern in _NOT_COPIED for path in directory.glob(pattern)}
        found = [path for pattern in _COPIED for path in directory.glob(pattern)]
        self._content = {path.name: path.read_bytes() for path in found if path.name not in skipped}

    def write(self, directory: Path, dtype: torch.dtype | None = None) -> None:
        """Every file as the model came with it; where there are tensors the configuration says of which type."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in self._content.items():
            (directory / name).write_bytes(content)
        if dtype is None:
            return
        settings = json.loads(self._content["config.json"])
        settings.pop("torch_dtype", None)
        settings["dtype"] = str(dtype).removeprefix("torch.")
        (directory / "config.json").write_text(json.dumps(settings, indent=2) + "\n")


def write_tensors(
    directory: Path,
    module: Any,
    tensors: Tensors,
    dtype: torch.dtype,
    ranks: Ranks,
    finished: Callable[[Tensors], Tensors] = lambda tensors: tensors,
) -> None:
    """Called on every rank with the tensors of `module` by name; returns when all files are there.

    `finished` makes what is written out of the whole tensors of a layer.
    """
    mine: Tensors = {}
    for layer in whole_layers(module, tensors, dtype, keeper=ranks.index, keepers=ranks.size, finished=finished):
        mine |= {name: tensor.contiguous().cpu() for name, tensor in layer.items()}
    if ranks.size == 1:
        _write(directory / "model.safetensors", mine)
        return
    if mine:
        _write(directory / f"model-{ranks.index + 1:05d}-of-{ranks.size:05d}.safetensors", mine)
    ranks.wait_for_all()
    if ranks.first:
        _write_index(directory)
    ranks.wait_for_all()


def whole_layers(
    module: Any,
    tensors: Tensors,
    dtype: torch.dtype,
    *,
    keeper: int | None,
    keepers: int = 1,
    finished: Callable[[Tensors], Tensors] = lambda tensors: tensors,
) -> Iterator[Tensors]:
    """Called on every rank: the tensors as a file would have them, layer by layer, one of which is whole at a time.

    Those that fall to number `keeper` of so many `keepers`; None keeps nothing, and only takes part.
    """
    for names, owner in _shares(tensors, keepers):
        layer = {name: whole(tensors[name]) for name in names}
        if owner == keeper:
            ready = {name: _in_type(tensor, dtype) for name, tensor in finished(layer).items()}
            yield revert_weight_conversion(module, ready)


def whole(tensor: Tensor) -> Tensor:
    """A tensor with the parts that other ranks have, who must ask for it at the same time."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _shares(tensors: Tensors, ranks: int) -> list[tuple[list[str], int]]:
    """The tensors by layer, each with the rank that writes it: always the one with the least to write so far.

    By layer, because transformers may store some of a layer's tensors as one.
    """
    layers: dict[str, list[str]] = {}
    for name in tensors:
        match = _LAYER.match(name)
        layers.setdefault(match[1] if match else "", []).append(name)
    loads = [0] * ranks
    shares = []
    for names in layers.values():
        owner = loads.index(min(loads))
        loads[owner] += sum(tensors[name].numel() for name in names)
        shares.append((names, owner))
    return shares


def _in_type(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _write(path: Path, tensors: Tensors) -> None:
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # an engine may run as another user


def _write_index(directory: Path) -> None:
    weight_map, size = {}, 0
    for path in sorted(directory.glob("model-*.safetensors")):
        with safe_open(path, framework="np") as file:
            weight_map.update(dict.fromkeys(file.keys(), path.name))
        size += path.stat().st_size
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
