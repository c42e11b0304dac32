"""A model as a Hugging Face directory, written by all ranks: each writes one file of full tensors.

Sharded parameters are gathered one decoder layer at a time, which involves every rank; one rank writes the result, and
no copy of the whole model is made. With a single rank the directory has one file and no index.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from headrace.inference.latents import is_gate
from headrace.trainer.host_copies import STREAM_BUCKETS
from headrace.trainer.ranks import Ranks, whole
from headrace.trainer.tensor_files import TensorFileWriter

Tensors = dict[str, Tensor]

_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.py")
_NOT_COPIED = ("COMPLETE.json", "*.index.json", "adapter_config.json")
_LAYER = re.compile(r"^(.*?\.\d+)\.")


class ModelFiles:
    """The files other than tensors: config, tokenizer, chat template, code; kept in memory, as they may be deleted."""

    def __init__(self, directory: Path) -> None:
        skipped = {path.name for pattern in _NOT_COPIED for path in directory.glob(pattern)}
        paths = [path for pattern in _COPIED for path in directory.glob(pattern)]
        self._content = {path.name: path.read_bytes() for path in paths if path.name not in skipped}

    def write(self, directory: Path, dtype: torch.dtype | None = None) -> None:
        """Write the files unchanged; with `dtype`, set it in config.json."""
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
    transform: Callable[[Tensors], Tensors] = lambda tensors: tensors,
) -> None:
    """Write the tensors of `module`; called on every rank, returns when all files are complete.

    `transform` is applied to the full tensors of a layer.
    """
    share: dict[str, Any] = {"receiver": ranks.index, "receivers": ranks.size, "transform": transform}
    described = gather_layers(module, meta_tensors(tensors), dtype, **share)
    content = {name: tensor for layer in described for name, tensor in layer.items()}
    name = f"model-{ranks.index + 1:05d}-of-{ranks.size:05d}.safetensors" if ranks.size > 1 else "model.safetensors"
    writer = None
    if content:
        options: dict[str, Any] = {"device": next(iter(tensors.values())).device, "blocks": STREAM_BUCKETS}
        writer = TensorFileWriter(directory / name, content, durable=False, **options)
    for layer in gather_layers(module, tensors, dtype, **share):  # on every rank: it takes part in gathering
        for tensor in layer.values():
            assert writer is not None
            writer.append(tensor)
    if writer is not None:
        writer.finish()
        writer.path.chmod(0o644)  # an engine may run as another user
    if ranks.size > 1:
        ranks.barrier()
        if ranks.is_first:
            _write_index(directory)
        ranks.barrier()


def meta_tensors(tensors: Tensors) -> Tensors:
    """Return meta tensors of the same full shapes and types."""
    return {n: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for n, tensor in tensors.items()}


def gather_layers(
    module: Any,
    tensors: Tensors,
    dtype: torch.dtype,
    *,
    receiver: int | None,
    receivers: int = 1,
    transform: Callable[[Tensors], Tensors] = lambda tensors: tensors,
) -> Iterator[Tensors]:
    """Gather full tensors in the format of files, and yield them one layer at a time; called on every rank.

    Layers are divided among `receivers`; `receiver` is the number of this one, None to only take part in gathering.
    Gates of latents stay float32.
    """
    for names, owner in _assign_layers(tensors, receivers):
        layer = {name: whole(tensors[name]) for name in names}
        if owner == receiver:
            full = transform(layer).items()
            converted = {
                n: tensor.to(dtype) if tensor.is_floating_point() and not is_gate(n) else tensor for n, tensor in full
            }
            # Sorted: transformers sorts the tensors of a model that it loaded, and not of one from a checkpoint.
            yield dict(sorted(revert_weight_conversion(module, converted).items()))


def _assign_layers(tensors: Tensors, ranks: int) -> list[tuple[list[str], int]]:
    """Return the tensor names of each layer, and the rank that writes them: the one with the fewest numbers so far.

    By layer, because transformers may store several tensors of a layer as one.
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


def _write_index(directory: Path) -> None:
    weight_map, size = {}, 0
    for path in sorted(directory.glob("model-*.safetensors")):
        with safe_open(path, framework="np") as file:
            weight_map.update(dict.fromkeys(file.keys(), path.name))
        size += path.stat().st_size
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
