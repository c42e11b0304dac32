"""LoRA: a frozen model whose linear layers train a low-rank difference, `scaling * B @ A`.

Layers are replaced in place by ones with the same parameter names plus `lora_A` and `lora_B`, in float32. So a model is
saved under its original names, and sharding, compiling and recomputing work as before. The adapter is saved in PEFT's
format (`transport/adapter.py`). Experts that are stacked in one parameter are adapted if `target_modules` has
"experts": PEFT's `target_parameters`.

Functions here take full tensors and do not communicate with other ranks. Left out on purpose: dropout (a policy must
reproduce the logprobs it sampled with), and adapters of embeddings and of the head.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Parameter
from torch.nn.functional import linear

from headrace.errors import BadInput
from headrace.inference.model_shape import ALL_LINEAR, EXPERTS
from headrace.inference.weights.file_layout import as_in_files
from headrace.trainer.experts import STACKED, TRANSPOSED, ExpertsLora, adapter_name, expert_parameters
from headrace.transport.adapter import AdapterConfig, Matrices, merged

log = logging.getLogger(__name__)

_A, _B = ".lora_A", ".lora_B"
_EXPERT = re.compile(r"\.experts\.\d+\.(\w+)\.weight$")


class LoraLinear(Linear):
    """A linear layer with frozen parameters and two trained matrices, whose product is 0 at first."""

    def __init__(self, base: Linear, r: int, scaling: float, generator: torch.Generator) -> None:
        super().__init__(base.in_features, base.out_features, bias=False, device="meta")
        self.weight, self.bias = base.weight, base.bias
        a, b = torch.empty(r, base.in_features), torch.zeros(base.out_features, r)
        torch.nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)  # on the CPU: independent of the device
        self.lora_A = Parameter(a.to(base.weight.device))
        self.lora_B = Parameter(b.to(base.weight.device))
        self.scaling = scaling

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias) + linear(linear(x, self.lora_A) * self.scaling, self.lora_B)


def add_lora(
    model: Any,
    *,
    r: int,
    alpha: float,
    target_modules: str | Sequence[str] = ALL_LINEAR,
    use_rslora: bool = False,
    seed: int = 0,
    base: str | None = None,
) -> AdapterConfig:
    """Freeze a Hugging Face model and add LoRA matrices to its linear layers, before it is sharded or compiled.

    The same seed gives the same matrices on every rank. `base` is the name of the base model in the adapter's config.
    """
    wanted = [target_modules] if isinstance(target_modules, str) else target_modules
    experts = _find_expert_targets(model, wanted)
    chosen = _find_targets(model, [each for each in wanted if each != EXPERTS])
    # PEFT matches layers by suffix: the last part of a name, or the full name if other layers have the same suffix.
    others = {_last_part(name) for name, _ in model.named_modules() if name not in chosen}
    names = sorted({name if _last_part(name) in others else _last_part(name) for name in chosen})
    stacked = sorted({f"{_last_part(name)}.{weight}" for name, (_, weights) in experts.items() for weight in weights})
    config = AdapterConfig(r, alpha, names, use_rslora, base, stacked or None)
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, layer in chosen.items():
        model.set_submodule(name, LoraLinear(layer, r, config.scaling, generator))
    for module, weights in experts.values():
        for weight in weights:
            adapter = ExpertsLora(module, weight, r, config.scaling, generator)
            module.add_module(adapter_name(module, weight), adapter)
    return config


def adapter_layers(parameters: Mapping[str, Tensor]) -> dict[str, Matrices]:
    """Return the LoRA matrices by layer as PEFT has them, from a model's parameters by name.

    PEFT wraps a module of experts once for each weight, and names the wrappers from the outside.
    """
    by_layer = _lora_matrices(parameters)
    experts = [layer for layer in by_layer if layer.endswith((STACKED, TRANSPOSED))]
    layers = {layer: matrices for layer, matrices in by_layer.items() if layer not in experts}
    modules: dict[str, list[str]] = {}
    for layer in experts:
        modules.setdefault(layer.rpartition(".")[0], []).append(layer)
    for module, weights in modules.items():
        for depth, layer in enumerate(reversed(weights)):
            a, b = by_layer[layer]
            layers[module + depth * ".base_layer"] = Matrices(a.flatten(0, 1), b.permute(1, 2, 0).flatten(1))
    return layers


def merged_parameters(parameters: Mapping[str, Tensor], scaling: float) -> dict[str, Tensor]:
    """Return parameters with the adapter merged; merged ones are float32."""
    result = {name: tensor for name, tensor in parameters.items() if not name.endswith((_A, _B))}
    for layer, matrices in _lora_matrices(parameters).items():
        if layer.endswith(TRANSPOSED):
            name, matrices = layer.removesuffix(TRANSPOSED), Matrices(matrices.b.mT, matrices.a.mT)
        else:
            name = layer.removesuffix(STACKED) if layer.endswith(STACKED) else f"{layer}.weight"
        result[name] = merged(result[name], matrices, scaling)
    return result


def _lora_matrices(parameters: Mapping[str, Tensor]) -> dict[str, Matrices]:
    layers = [name.removesuffix(_A) for name in parameters if name.endswith(_A)]
    return {layer: Matrices(parameters[layer + _A], parameters[layer + _B]) for layer in layers}


def _find_expert_targets(model: Any, wanted: Sequence[str]) -> dict[str, tuple[Any, list[str]]]:
    """Return the modules of experts to adapt, with the names of their weights."""
    experts = expert_parameters(model)
    if EXPERTS in wanted:
        if not experts:
            fact = f"{type(model).__name__} has no experts that are stacked in one parameter"
            raise BadInput(fact, key="lora.target_modules", value=EXPERTS, fix="Leave it out.")
        return experts
    if experts:
        log.warning('lora.target_modules = %s: experts are not adapted. Add "experts" to adapt them, too.', [*wanted])
    return {}


def _find_targets(model: Any, suffixes: Sequence[str]) -> dict[str, Linear]:
    """Return the linear layers to adapt: all but the head, or those whose names end in a wanted suffix."""
    head = model.get_output_embeddings()
    layers = {name: part for name, part in model.named_modules() if type(part) is Linear and part is not head}
    if not layers:
        raise BadInput(f"{type(model).__name__} has no linear layers to adapt", key="lora")
    if ALL_LINEAR in suffixes:
        # PEFT takes every layer with the name of an expert's layer in files for a part of the experts, also that of a
        # shared expert or a dense layer, if the model has stacked them.
        files = as_in_files(model, {name: tensor.to("meta") for name, tensor in model.named_parameters()})
        parts = {match[1] for name in files if (match := _EXPERT.search(name))}
        return {name: part for name, part in layers.items() if _last_part(name) not in parts}
    unknown = [suffix for suffix in suffixes if not any(_ends_in(name, suffix) for name in layers)]
    if unknown:
        fact = f"{type(model).__name__} has no linear layers of this name"
        fix = f"Known: {', '.join(sorted({_last_part(name) for name in layers}))}, or {ALL_LINEAR}."
        raise BadInput(fact, key="lora.target_modules", value=unknown, fix=fix)
    return {name: part for name, part in layers.items() if any(_ends_in(name, suffix) for suffix in suffixes)}


def _ends_in(name: str, suffix: str) -> bool:
    return f".{name}".endswith(f".{suffix}")


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]
