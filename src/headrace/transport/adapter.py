"""LoRA adapters on disk in PEFT's format, which vLLM also reads: `adapter_config.json`, `adapter_model.safetensors`.

An adapter adds `scaling * B @ A` to the weight of each linear layer of the base model that it has tensors for. Left out
on purpose: everything else that PEFT writes (DoRA, biases, ranks per layer, whole modules, ...). Such keys, and
unknown ones, are refused by name, since ignoring them would silently give another model. Torch is imported lazily.
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
from headrace.transport.files import require_regular

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"

_KEY = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<matrix>[AB])\.weight")
_PLAIN_INITS = (True, False, "gaussian")
"""Values of `init_lora_weights` that leave the base model unchanged; others subtract something from it."""
_WITHOUT_EFFECT = {
    *("task_type", "auto_mapping", "peft_version", "revision", "inference_mode"),
    *("lora_dropout", "megatron_core", "qalora_group_size", "runtime_config"),
    *("exclude_modules", "layers_to_transform", "layers_pattern"),  # the tensor names already select layers
}


class AdapterError(BadInput):
    """The directory does not contain an adapter that can be used here."""


class AdapterConfig(msgspec.Struct, frozen=True):
    """The keys of `adapter_config.json` that affect the computation, with PEFT's names."""

    r: int
    lora_alpha: float
    target_modules: list[str] | str
    use_rslora: bool = False
    base_model_name_or_path: str | None = None
    target_parameters: list[str] | None = None
    """Stacked weights of experts; their matrices are those of all experts, side by side."""

    @property
    def scaling(self) -> float:
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


class Matrices(NamedTuple):
    """The LoRA factors of a layer: A is [r, in], B is [out, r]."""

    a: Tensor
    b: Tensor


class Adapter(NamedTuple):
    """An adapter: its config, and its matrices by the name of the layer in the base model."""

    config: AdapterConfig
    layers: dict[str, Matrices]


def merged(base: Tensor, matrices: Matrices, scaling: float) -> Tensor:
    """Return base + scaling * B @ A in float32, also for stacked experts. `base` must be the original weight."""
    return base.float() + scaling * (matrices.b.float() @ matrices.a.float())


def is_adapter(directory: Path) -> bool:
    return (directory / CONFIG).is_file()


def write_adapter(directory: Path, adapter: Adapter) -> None:
    """Write config and tensors of an adapter. The tensors must be full tensors, not shards."""
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
    """Write `adapter_config.json` alone."""
    content: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        **msgspec.to_builtins(config),
        "lora_dropout": 0.0,
        "bias": "none",
        "modules_to_save": None,
        "inference_mode": True,
    }
    if not config.target_parameters:
        del content["target_parameters"]
    (directory / CONFIG).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def read_adapter(directory: Path) -> Adapter:
    """Read an adapter; raise `AdapterError` if it contains more than plain LoRA matrices."""
    config = read_config(directory / CONFIG)
    path = directory / TENSORS
    try:
        with safe_open(require_regular(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError) as error:
        raise AdapterError(str(error), file=path) from error
    return Adapter(config, _group_by_layer(tensors, config.r, path))


def read_config(path: Path) -> AdapterConfig:
    """Read the config of an adapter; raise `AdapterError` for keys that change more than plain LoRA does."""
    try:
        settings = msgspec.json.decode(require_regular(path).read_bytes(), type=dict[str, Any])
        config = msgspec.convert(settings, AdapterConfig)
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise AdapterError(str(error), file=path) from error
    peft_type = settings.get("peft_type")
    if peft_type != "LORA":
        raise AdapterError("only LORA adapters can be used", file=path, key="peft_type", value=peft_type)
    if config.r < 1:
        raise AdapterError("the rank must be at least 1", file=path, key="r", value=config.r)
    supported = {*AdapterConfig.__struct_fields__, *_WITHOUT_EFFECT, "peft_type", "init_lora_weights"}
    unsupported = [key for key, value in settings.items() if key not in supported and value and value != "none"]
    if settings.get("init_lora_weights", True) not in _PLAIN_INITS:
        unsupported.append("init_lora_weights")
    if unsupported:
        problems = [
            AdapterError("not supported: only plain LoRA is", file=path, key=key, value=settings[key])
            for key in sorted(unsupported)
        ]
        raise AdapterError.combine(problems)
    return config


def _group_by_layer(tensors: Mapping[str, Tensor], r: int, path: Path) -> dict[str, Matrices]:
    """Group the matrices by layer, checking that their shapes match."""
    by_layer: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _KEY.fullmatch(name)
        if match is None:
            raise AdapterError("not a LoRA matrix", file=path, key=name)
        by_layer.setdefault(match["layer"], {})[match["matrix"]] = tensor
    if not by_layer:
        raise AdapterError("has no tensors", file=path)
    for layer, pair in by_layer.items():
        if len(pair) < 2:
            raise AdapterError(f"has only lora_{next(iter(pair))}", file=path, key=layer)
        a, b = pair["A"], pair["B"]
        is_stacked = layer.removesuffix(".base_layer").endswith("experts")
        is_pair = a.ndim == b.ndim == 2 and a.shape[0] == b.shape[1]
        if not (is_pair and (a.shape[0] % r == 0 if is_stacked else a.shape[0] == r)):
            shapes = f"lora_A {list(a.shape)} and lora_B {list(b.shape)}"
            raise AdapterError(f"{shapes} do not match rank {r}", file=path, key=layer)
    return {layer: Matrices(pair["A"], pair["B"]) for layer, pair in by_layer.items()}
