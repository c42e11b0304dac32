"""Memory layout of weights on a CPU, for fast products of tens of rows.

A decode step multiplies few rows, which is slow with row-major weights. They get a second copy in the panels that the
kernel for products reads (see `products.c`); without kernels, or in other types than float32, they are column-major.
Linear layers with the same input (query, key and value; gate and up) are copied as one matrix, and multiplied at once.
Values and shapes do not change.

Left out on purpose: one copy instead of two. New weights, adapters and files are row-major.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear
from torch.nn.functional import linear, pad

from headrace.inference.embedded.cpu.kernels import load_kernels, rows
from headrace.inference.embedded.projections import group_by_input

Product = Callable[[Tensor], Tensor]
Layout = Callable[[Tensor, Tensor | None], Product]
"""Copies weights [output, input] and returns the function that multiplies with the copy and adds the bias."""


def lay_out_for_small_batches(model: Any) -> None:
    """Change the layout of a model's linear layers for products of few rows."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    for layers in group_by_input(model):
        has_kernel = layers[0].weight.dtype == torch.float32 and load_kernels() is not None
        if has_kernel or len(layers) > 1 or id(layers[0].weight) in embeddings:  # embeddings are looked up by row
            copy = _ReorderedCopy(layers, _in_panels if has_kernel else _in_columns)
            for number, layer in enumerate(layers):
                vars(layer)["forward"] = partial(copy.product, number)
        else:
            layers[0].weight.data = _to_column_major(layers[0].weight)


class _ReorderedCopy:
    """The weights of some layers in another layout, renewed when they change.

    The first layer that gets an input multiplies it for all of them.
    """

    def __init__(self, layers: Sequence[Linear], layout: Layout) -> None:
        self._layers = layers
        self._sizes = [layer.out_features for layer in layers]
        self._parameters = [parameter for layer in layers for parameter in layer.parameters()]
        self._layout = layout
        self._input: Tensor | None = None
        self._products: Sequence[Tensor] = ()
        self._renew()

    def product(self, number: int, hidden: Tensor) -> Tensor:
        """Return the output of layer `number`."""
        if self._layout is _in_columns and hidden.numel() == hidden.shape[-1]:  # a row is multiplied faster by rows
            return linear(hidden, self._layers[number].weight, self._layers[number].bias)
        if hidden is not self._input:
            if self._copied_versions != self._versions():
                self._renew()
            product = self._multiply(hidden)
            if len(self._sizes) == 1:
                return product
            self._input = hidden
            self._products = torch.split_with_sizes(product, self._sizes, -1)
        product = self._products[number]
        if number == len(self._sizes) - 1:
            self._input, self._products = None, ()  # of the last layer: hold nothing until the next step
        return product

    def _renew(self) -> None:
        """Copy the weights, which have changed since the last copy."""
        weights = [layer.weight.detach() for layer in self._layers]
        biases = [layer.bias.detach() for layer in self._layers if layer.bias is not None]
        self._multiply = self._layout(torch.cat(weights), torch.cat(biases) if biases else None)
        self._copied_versions = self._versions()

    def _versions(self) -> list[int]:
        """Return how often each parameter was changed in place, as new weights do."""
        return [parameter._version for parameter in self._parameters]


def _to_column_major(weight: Tensor) -> Tensor:
    return weight.detach().t().contiguous().t()


def _in_columns(weight: Tensor, bias: Tensor | None) -> Product:
    """Copy weights in column-major order, for torch's own product."""
    return partial(linear, weight=_to_column_major(weight), bias=bias)


def _in_panels(weight: Tensor, bias: Tensor | None) -> Product:
    """Copy weights in the panels of our kernel for products."""
    kernels = load_kernels()
    assert kernels is not None
    (width, depth), panel = weight.shape, kernels.panel_width()
    panels = pad(weight, (0, 0, 0, -width % panel)).view(-1, panel, depth).transpose(1, 2).contiguous()

    def multiply(hidden: Tensor) -> Tensor:
        flat = hidden.reshape(1, -1, depth)
        if flat.stride(-1) != 1:
            flat = flat.contiguous()
        product = torch.empty(*hidden.shape[:-1], width)
        addresses = panels.data_ptr(), None if bias is None else bias.data_ptr(), product.data_ptr()
        kernels.multiply(rows(flat), *addresses, flat.shape[1], depth, width, torch.get_num_threads())
        return product

    return multiply
