"""LoRA adapters on disk, in PEFT's format, which vLLM reads too: `adapter_config.json`, `adapter_model.safetensors`.

An adapter stands for its base model with `scaling * B @ A` added to the weight of each linear layer it has tensors for.
Left out on purpose: whatever else PEFT can write (DoRA, biases, ranks per layer, whole modules, ...). It is refused by
name, also what a later PEFT may add, since leaving it out would give another model without a word. Tensors are torch's,
but torch is only imported where there are some.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from safetensors import SafetensorError, safe_open

from headrace.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"

_KEY = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<matrix>[AB])\.weight")
_PLAIN_STARTS = (True, False, "gaussian")
"""Values of `init_lora_weights` that leave the base model as it is; others subtract something from it."""
_WITHOUT_EFFECT = {
    *("task_type", "auto_mapping", "peft_version", "revision", "inference_mode"),
    *("lora_dropout", "megatron_core", "qalora_group_size", "runtime_config"),
    *("exclude_modules", "layers_to_transform", "layers_pattern"),  # which layers are adapted, the tensors' names say
}


class AdapterError(BadInput):
    """The directory is no adapter that can be used here. The message says why."""


class AdapterConfig(msgspec.Struct, frozen=True):
    """What of `adapter_config.json` decides what is computed, under PEFT's names."""

    r: int
    lora_alpha: float
    target_modules: list[str] | str
    use_rslora: bool = False
    base_model_name_or_path: str | None = None

    @property
    def scaling(self) -> float:
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


class Matrices(NamedTuple):
    """The two factors of a layer's difference: A is [r, in], B is [out, r]."""

    a: Tensor
    b: Tensor


class Adapter(NamedTuple):
    """An adapter as read: its matrices by the name of the layer in the base model."""

    config: AdapterConfig
    layers: dict[str, Matrices]


def merged(base: Tensor, matrices: Matrices, scaling: float) -> Tensor:
    """A layer's weight with its difference added, in float32. `base` must be the pristine one, never a merged one."""
    return base.float() + scaling * (matrices.b.float() @ matrices.a.float())


def is_adapter(directory: Path) -> bool:
    return (directory / CONFIG).is_file()


def write_adapter(directory: Path, adapter: Adapter) -> None:
    """Write both files. The tensors must be whole: gather them first where ranks have parts of them."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    write_config(directory, adapter.config)
    tensors = {
        f"base_model.model.{layer}.lora_{matrix}.weight": tensor.detach().contiguous().cpu()
        for layer, matrices in adapter.layers.items()
        for matrix, tensor in zip("AB", matrices, strict=True)
    }
    save_file(tensors, directory / TENSORS, metadata={"format": "pt"})
    (directory / TENSORS).chmod(0o644)  # an engine may run as another user


def write_config(directory: Path, config: AdapterConfig) -> None:
    """The configuration alone, for those who keep the tensors elsewhere."""
    content: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        **msgspec.to_builtins(config),
        "lora_dropout": 0.0,
        "bias": "none",
        "modules_to_save": None,
        "inference_mode": True,
    }
    (directory / CONFIG).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def read_adapter(directory: Path) -> Adapter:
    """Read an adapter, ours or PEFT's, refusing one that holds more than plain LoRA matrices."""
    config = read_config(directory / CONFIG)
    path = directory / TENSORS
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    except (OSError, SafetensorError) as error:
        raise AdapterError(str(error), file=path) from error
    return Adapter(config, _by_layer(tensors, config.r, path))


def read_config(path: Path) -> AdapterConfig:
    try:
        settings = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        config = msgspec.convert(settings, AdapterConfig)
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise AdapterError(str(error), file=path) from error
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise AdapterError("only LORA adapters can be used", file=path, key="peft_type", value=kind)
    if config.r < 1:
        raise AdapterError("a rank is at least 1", file=path, key="r", value=config.r)
    known = {*AdapterConfig.__struct_fields__, *_WITHOUT_EFFECT, "peft_type", "init_lora_weights"}
    foreign = [key for key, value in settings.items() if key not in known and value and value != "none"]
    if settings.get("init_lora_weights", True) not in _PLAIN_STARTS:
        foreign.append("init_lora_weights")
    if foreign:
        problems = [
            AdapterError("not computed here: only plain LoRA is", file=path, key=key, value=settings[key])
            for key in sorted(foreign)
        ]
        raise AdapterError.combine(problems)
    return config


def _by_layer(tensors: Mapping[str, Tensor], r: int, path: Path) -> dict[str, Matrices]:
    """Pair the matrices of each layer, checking that they fit each other."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _KEY.fullmatch(name)
        if match is None:
            raise AdapterError("not a matrix of a LoRA layer, and nothing else can be used", file=path, key=name)
        found.setdefault(match["layer"], {})[match["matrix"]] = tensor
    if not found:
        raise AdapterError("has no tensors", file=path)
    for layer, pair in found.items():
        if len(pair) < 2:
            raise AdapterError(f"has lora_{next(iter(pair))}, but not its other matrix", file=path, key=layer)
        a, b = pair["A"], pair["B"]
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != r or b.shape[1] != r:
            shapes = f"lora_A {list(a.shape)} and lora_B {list(b.shape)}"
            raise AdapterError(f"{shapes} do not fit rank {r}", file=path, key=layer)
    return {layer: Matrices(pair["A"], pair["B"]) for layer, pair in found.items()}
