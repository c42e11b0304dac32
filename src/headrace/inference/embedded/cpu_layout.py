"""How the weights of a model lie in a CPU's memory, so that tens of rows are multiplied fast.

A decoding step multiplies few rows, which CPU libraries do worst of all with weights as models store them. Large
matrices get a second copy in the form that oneDNN multiplies best; small ones, where oneDNN's call costs more than it
gains, are stored by column. Layers that are given the same input (queries, keys and values; gate and up) are copied as
one matrix, and multiplied at once. Values and shapes stay.

Left out on purpose: one copy instead of two. A single row is fastest with the weights as they are, and new weights,
adapters and files are written and read by row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear
from torch.nn.functional import linear

PACKED = 1 << 18
"""Entries from which on a matrix gains from being packed."""
ROWS = 32
"""How many rows a packed matrix is meant for; others are multiplied just as well."""

LayOut = Callable[[Tensor], Tensor]
Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def lay_out_for_small_batches(model: Any) -> None:
    """Let the linear layers of a model multiply few rows fast."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    for layers in _given_the_same(model):
        if _gain_from_packing(layers):
            _multiply_together(layers, _packed, _multiply_packed)
        elif len(layers) > 1 or id(layers[0].weight) in embeddings:  # which are looked up by row
            _multiply_together(layers, _by_column, linear)
        else:
            layers[0].weight.data = _by_column(layers[0].weight)


@torch.inference_mode()
def _given_the_same(model: Any) -> list[list[Linear]]:
    """The linear layers of a model, those together that get the very same input one after the other."""
    groups: list[list[Linear]] = []
    last: Tensor | None = None

    def note(layer: Linear, given: tuple[Tensor, ...]) -> None:
        nonlocal last
        if last is not None and last is given[0] and (groups[-1][0].bias is None) == (layer.bias is None):
            groups[-1].append(layer)
        else:
            groups.append([layer])
        last = given[0]

    hooks = [module.register_forward_pre_hook(note) for module in model.modules() if isinstance(module, Linear)]
    model(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False)
    for hook in hooks:
        hook.remove()
    return groups


def _multiply_together(layers: Sequence[Linear], lay_out: LayOut, multiply: Multiply) -> None:
    copy = _Copy(layers, lay_out, multiply)
    for number, layer in enumerate(layers):
        vars(layer)["forward"] = partial(copy.product, number)


class _Copy:
    """The weights of some layers in another form, which follows the weights themselves.

    The first of the layers that is given something multiplies it for all of them.
    """

    def __init__(self, layers: Sequence[Linear], lay_out: LayOut, multiply: Multiply) -> None:
        self._layers = layers
        self._sizes = [layer.out_features for layer in layers]
        self._parameters = [parameter for layer in layers for parameter in layer.parameters()]
        self._lay_out, self._multiply = lay_out, multiply
        self._given: Tensor | None = None
        self._products: Sequence[Tensor] = ()
        self._take()

    def product(self, number: int, hidden: Tensor) -> Tensor:
        """What layer `number` makes of its input."""
        if hidden.numel() == hidden.shape[-1]:
            return linear(hidden, self._layers[number].weight, self._layers[number].bias)
        if hidden is not self._given:
            if self._made_of != self._versions():
                self._take()
            product = self._multiply(hidden, self._weight, self._bias)
            if len(self._sizes) == 1:
                return product
            self._given = hidden
            self._products = torch.split_with_sizes(product, self._sizes, -1)
        product = self._products[number]
        if number == len(self._sizes) - 1:
            self._given, self._products = None, ()  # the last one has come: nothing is held until the next step
        return product

    def _take(self) -> None:
        biases = [layer.bias.detach() for layer in self._layers if layer.bias is not None]
        self._weight = self._lay_out(torch.cat([layer.weight.detach() for layer in self._layers]))
        self._bias = torch.cat(biases) if biases else None
        self._made_of = self._versions()

    def _versions(self) -> list[int]:
        """How often each was changed in place: new weights are such a change."""
        return [parameter._version for parameter in self._parameters]


def _by_column(weight: Tensor) -> Tensor:
    return weight.detach().t().contiguous().t()


def _packed(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)  # type: ignore[no-any-return]


def _multiply_packed(hidden: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(hidden, packed, bias, "none", [], "")  # type: ignore[no-any-return]


def _gain_from_packing(layers: Sequence[Linear]) -> bool:
    entries = sum(layer.weight.numel() for layer in layers)
    return entries >= PACKED and layers[0].weight.dtype == torch.float32 and _can_pack()


@cache
def _can_pack() -> bool:
    """Whether this torch packs weights and multiplies with them, by trying: it is no part of its promised interface."""
    weight, hidden = torch.eye(64)[:48].contiguous(), torch.arange(192.0).view(1, 3, 64)
    try:
        return torch.equal(_multiply_packed(hidden, _packed(weight), None), hidden[..., :48])
    except (RuntimeError, AttributeError):
        return False
