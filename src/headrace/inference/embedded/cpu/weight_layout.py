"""Memory layout of weights on a CPU, for fast products of tens of rows.

A decode step multiplies few rows, which is slow with row-major weights. Large matrices get a second copy in oneDNN's
packed format; small ones, where oneDNN's call costs more than it gains, are stored column-major. Linear layers with
the same input (query, key and value; gate and up) are copied as one matrix, and multiplied at once. Values and shapes
do not change.

Left out on purpose: one copy instead of two. A single row is fastest with row-major weights, and new weights, adapters
and files are row-major.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear
from torch.nn.functional import linear

MIN_PACKED_ENTRIES = 1 << 18
"""Smallest matrix that gains from packing."""
PACKED_BATCH_ROWS = 32
"""Batch size that weights are packed for; other sizes work as well."""

Reorder = Callable[[Tensor], Tensor]
Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def lay_out_for_small_batches(model: Any) -> None:
    """Change the layout of a model's linear layers for products of few rows."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    for layers in _group_by_input(model):
        entries = sum(layer.weight.numel() for layer in layers)
        if entries >= MIN_PACKED_ENTRIES and layers[0].weight.dtype == torch.float32 and _can_pack():
            _multiply_together(layers, _pack, _multiply_packed)
        elif len(layers) > 1 or id(layers[0].weight) in embeddings:  # embeddings are looked up by row
            _multiply_together(layers, _to_column_major, linear)
        else:
            layers[0].weight.data = _to_column_major(layers[0].weight)


@torch.inference_mode()
def _group_by_input(model: Any) -> list[list[Linear]]:
    """Return a model's linear layers, grouping consecutive ones that get the same input tensor."""
    groups: list[list[Linear]] = []
    last: Tensor | None = None

    def record(layer: Linear, inputs: tuple[Tensor, ...]) -> None:
        nonlocal last
        if last is not None and last is inputs[0] and (groups[-1][0].bias is None) == (layer.bias is None):
            groups[-1].append(layer)
        else:
            groups.append([layer])
        last = inputs[0]

    hooks = [module.register_forward_pre_hook(record) for module in model.modules() if isinstance(module, Linear)]
    model(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False)
    for hook in hooks:
        hook.remove()
    return groups


def _multiply_together(layers: Sequence[Linear], reorder: Reorder, multiply: Multiply) -> None:
    copy = _ReorderedCopy(layers, reorder, multiply)
    for number, layer in enumerate(layers):
        vars(layer)["forward"] = partial(copy.product, number)


class _ReorderedCopy:
    """The weights of some layers in another layout, renewed when they change.

    The first layer that gets an input multiplies it for all of them.
    """

    def __init__(self, layers: Sequence[Linear], reorder: Reorder, multiply: Multiply) -> None:
        self._layers = layers
        self._sizes = [layer.out_features for layer in layers]
        self._parameters = [parameter for layer in layers for parameter in layer.parameters()]
        self._reorder, self._multiply = reorder, multiply
        self._input: Tensor | None = None
        self._products: Sequence[Tensor] = ()
        self._renew()

    def product(self, number: int, hidden: Tensor) -> Tensor:
        """Return the output of layer `number`."""
        if hidden.numel() == hidden.shape[-1]:
            return linear(hidden, self._layers[number].weight, self._layers[number].bias)
        if hidden is not self._input:
            if self._copied_versions != self._versions():
                self._renew()
            product = self._multiply(hidden, self._weight, self._bias)
            if len(self._sizes) == 1:
                return product
            self._input = hidden
            self._products = torch.split_with_sizes(product, self._sizes, -1)
        product = self._products[number]
        if number == len(self._sizes) - 1:
            self._input, self._products = None, ()  # of the last layer: hold nothing until the next step
        return product

    def _renew(self) -> None:
        biases = [layer.bias.detach() for layer in self._layers if layer.bias is not None]
        self._weight = self._reorder(torch.cat([layer.weight.detach() for layer in self._layers]))
        self._bias = torch.cat(biases) if biases else None
        self._copied_versions = self._versions()

    def _versions(self) -> list[int]:
        """Return how often each parameter was changed in place, as new weights do."""
        return [parameter._version for parameter in self._parameters]


def _to_column_major(weight: Tensor) -> Tensor:
    return weight.detach().t().contiguous().t()


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_BATCH_ROWS)  # type: ignore[no-any-return]


def _multiply_packed(hidden: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(hidden, packed, bias, "none", [], "")  # type: ignore[no-any-return]


@cache
def _can_pack() -> bool:
    """Return whether this torch packs weights and multiplies with them: the operators are not a public interface."""
    weight, hidden = torch.eye(64)[:48].contiguous(), torch.arange(192.0).view(1, 3, 64)
    try:
        return torch.equal(_multiply_packed(hidden, _pack(weight), None), hidden[..., :48])
    except (RuntimeError, AttributeError):
        return False
