"""Linear layers with the same input, such as query, key and value projections: found in a model, and joined for GPUs.

A step of a few hundred tokens runs matrix products that are too small for a GPU, so that their number counts more than
their size. Joined layers are one product: their weights are parts of one matrix, each still under its own name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Parameter
from torch.nn.functional import linear

MAX_FREED_BYTES = 256 << 20
"""Memory of old weights after which it is given back, so that the next ones do not come on top of it."""


@torch.inference_mode()
def group_by_input(model: Any) -> list[list[Linear]]:
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
    model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=False)
    for hook in hooks:
        hook.remove()
    return groups


class _Product:
    """The product of the layers of a group, from the first layer's call to the last one's."""

    value: Tensor | None = None


class JoinedLinear(Linear):
    """A layer whose weight is the rows [start, end) of a joined one; the first of a group multiplies for all."""

    joined: tuple[Tensor, Tensor | None] | None
    """The weight and bias of the group, of its first layer only."""
    product: _Product
    start: int
    end: int
    is_last: bool

    def forward(self, input: Tensor) -> Tensor:
        shared = self.product
        if self.joined is not None:
            shared.value = linear(input, *self.joined)
        product = shared.value
        assert product is not None, "layers with one input are called in another order than when they were joined"
        if self.is_last:
            shared.value = None
        return product[..., self.start : self.end]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        raise TypeError(f"{self} is part of a joined product, which stays as it is. Move or convert models before.")

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError(f"{self} is part of a joined product, which cannot be copied. Copy models before.")


@torch.inference_mode(False)
@torch.no_grad()
def join_projections(model: Any) -> None:
    """Join the linear layers of a model that get the same input.

    Their parameters keep names and values, and new values that are copied into them count at once.
    """
    uses = Counter(id(parameter) for module in model.modules() for parameter in vars(module)["_parameters"].values())
    freed = 0
    for layers in group_by_input(model):
        is_plain = all(_is_plain(layer) and uses[id(layer.weight)] == 1 for layer in layers)
        if len(layers) == 1 or not is_plain or len({layer.weight.dtype for layer in layers}) > 1:
            continue
        _join(layers)
        freed += sum(layer.weight.nbytes for layer in layers)
        if freed > MAX_FREED_BYTES and layers[0].weight.is_cuda:
            torch.cuda.empty_cache()
            freed = 0


def _is_plain(layer: Linear) -> bool:
    """Return whether nothing has replaced the layer's computation or the kind of its weight, as quantization does."""
    return type(layer) is Linear and type(layer.weight) is Parameter and "forward" not in vars(layer)


def _join(layers: Sequence[Linear]) -> None:
    weights: list[Tensor] = [layer.weight for layer in layers]
    # Parameters, since the compiler takes the sizes of other tensors for variables.
    weight = Parameter(torch.cat(weights), requires_grad=False)
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    bias = Parameter(torch.cat(biases), requires_grad=False) if biases else None
    product, start = _Product(), 0
    for layer in layers:
        end = start + layer.out_features
        layer.weight = Parameter(weight[start:end], requires_grad=False)
        if bias is not None:
            layer.bias = Parameter(bias[start:end], requires_grad=False)
        joined = (weight, bias) if layer is layers[0] else None
        vars(layer).update(joined=joined, product=product, start=start, end=end, is_last=layer is layers[-1])
        start = end
    _set_class(layers, JoinedLinear)


@contextmanager
def separate_projections(model: Any) -> Iterator[None]:
    """Compute joined layers one by one in the block."""
    joined = [module for module in model.modules() if type(module) is JoinedLinear]
    _set_class(joined, Linear)
    try:
        yield
    finally:
        _set_class(joined, JoinedLinear)


def _set_class(layers: Iterable[Any], kind: type[Linear]) -> None:
    for layer in layers:
        layer.__class__ = kind
