"""Tensors in safetensors files, as transformers lays a model's out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.inference.weights.errors import WeightsError


class _Index(msgspec.Struct):
    """Of an index of tensor files, what is read: the file of each tensor."""

    weight_map: dict[str, str]


def stored(files: Iterable[Path]) -> Iterator[tuple[str, Tensor]]:
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
