"""LoRA: a frozen model whose linear layers learn a difference of low rank, `scaling * B @ A`.

Layers are replaced in place by ones with the same parameters under the same names plus `lora_A` and `lora_B`, in
float32. So a model can still be written under its original names, and whatever shards, compiles or recomputes linear
layers works as before. The adapter goes to disk in PEFT's format (`transport/adapter.py`).

What is written comes from named tensors that the caller has made whole: nothing here talks to other ranks. Left out on
purpose: dropout (a policy must give the logprobs it was sampled with), adapters of embeddings, of the head, and of
experts that are stacked in one parameter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Parameter
from torch.nn.functional import linear

from headrace.errors import BadInput
from headrace.transport.adapter import AdapterConfig, Matrices, merged

ALL_LINEAR = "all-linear"
_A, _B = ".lora_A", ".lora_B"


class LoraLinear(Linear):
    """A linear layer's own, frozen parameters and the two matrices of its difference, which is nothing at first."""

    def __init__(self, base: Linear, r: int, scaling: float, generator: torch.Generator) -> None:
        super().__init__(base.in_features, base.out_features, bias=False, device="meta")
        self.weight, self.bias = base.weight, base.bias
        a, b = torch.empty(r, base.in_features), torch.zeros(base.out_features, r)
        torch.nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)  # on the CPU: the same on every device
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
    """Freeze a Hugging Face model and let its linear layers learn a difference; before it is sharded or compiled.

    The same seed gives the same matrices on every rank. `base` is the name under which others find the model.
    """
    chosen = _targets(model, target_modules)
    config = AdapterConfig(r, alpha, _short_names(model, chosen), use_rslora, base)
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, layer in chosen.items():
        model.set_submodule(name, LoraLinear(layer, r, config.scaling, generator))
    return config


def adapter_layers(parameters: Mapping[str, Tensor]) -> dict[str, Matrices]:
    """The matrices of each adapted layer, out of a model's parameters by name."""
    layers = [name.removesuffix(_A) for name in parameters if name.endswith(_A)]
    return {layer: Matrices(parameters[layer + _A], parameters[layer + _B]) for layer in layers}


def merged_parameters(parameters: Mapping[str, Tensor], scaling: float) -> dict[str, Tensor]:
    """The parameters of a model without adapter that computes the same, in float32 where they differ from the base."""
    result = {name: tensor for name, tensor in parameters.items() if not name.endswith((_A, _B))}
    for layer, matrices in adapter_layers(parameters).items():
        result[f"{layer}.weight"] = merged(result[f"{layer}.weight"], matrices, scaling)
    return result


def _targets(model: Any, wanted: str | Sequence[str]) -> dict[str, Linear]:
    """The linear layers to adapt: all but the head, or those whose name ends in one of those wanted."""
    head = model.get_output_embeddings()
    layers = {name: part for name, part in model.named_modules() if type(part) is Linear and part is not head}
    if not layers:
        raise BadInput(f"{type(model).__name__} has no linear layers that could be adapted", key="lora")
    if wanted == ALL_LINEAR:
        return layers
    suffixes = [wanted] if isinstance(wanted, str) else wanted
    unknown = [suffix for suffix in suffixes if not any(_ends_in(name, suffix) for name in layers)]
    if unknown:
        raise BadInput(
            f"{type(model).__name__} has no linear layers of this name",
            key="lora.target_modules",
            value=unknown,
            fix=f"Known: {', '.join(sorted({_last(name) for name in layers}))}, or {ALL_LINEAR}.",
        )
    return {name: part for name, part in layers.items() if any(_ends_in(name, suffix) for suffix in suffixes)}


def _short_names(model: torch.nn.Module, chosen: Mapping[str, Linear]) -> list[str]:
    """Names by which PEFT finds exactly the chosen layers: their last parts, or in full where others have the same."""
    others = {_last(name) for name, _ in model.named_modules() if name not in chosen}
    return sorted({name if _last(name) in others else _last(name) for name in chosen})


def _ends_in(name: str, suffix: str) -> bool:
    return f".{name}".endswith(f".{suffix}")


def _last(name: str) -> str:
    return name.rpartition(".")[2]
