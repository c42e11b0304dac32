"""LoRA adapters beside the model: every linear layer adds what the adapter of each token says.

Requests with different adapters, and with none, share a forward. The base weights stay as they are, so that loading an
adapter takes nothing from anybody; published versions of a policy are merged instead (`weights.published`), which costs
a step nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headrace.inference.backend import EngineError, ModelNotFound
from headrace.inference.embedded.scheduler import Chunk
from headrace.inference.weights.errors import WeightsError
from headrace.transport.adapter import AdapterError, Matrices, read_adapter

_numbers = itertools.count(1)


class LoadedAdapter:
    """The matrices of one adapter, by layer, ready to multiply with."""

    def __init__(self, name: str, layers: dict[str, Matrices]) -> None:
        self.name = name
        self.layers = layers
        """A is [in, r] and B is [r, out], with the scaling in it."""
        self.identity = f"{name}#{next(_numbers)}"
        """Another one under the same name has another: what one computed is of no use to the other."""


class Adapters:
    """Those of one model. Only the engine's thread loads, unloads and computes; names may be read from any."""

    def __init__(self, model: Any) -> None:
        head = model.get_output_embeddings()  # sees only the tokens whose logits are needed
        self._linear = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and module is not head
        }
        self._loaded: dict[str, LoadedAdapter] = {}
        self._hooked: set[str] = set()
        self._tokens = 0
        self._rows: list[tuple[LoadedAdapter, Tensor]] = []
        """The tokens of the batch in hand that each adapter is for."""

    @property
    def names(self) -> list[str]:
        return [*self._loaded]

    def get(self, name: str) -> LoadedAdapter:
        adapter = self._loaded.get(name)
        if adapter is None:
            raise ModelNotFound(f"model: no adapter {name!r} is loaded")
        return adapter

    def read(self, name: str, directory: Path) -> LoadedAdapter:
        """Read an adapter for this model; from any thread."""
        try:
            adapter = read_adapter(directory)
        except AdapterError as error:
            raise WeightsError(str(error)) from error
        layers = {}
        for layer, (a, b) in adapter.layers.items():
            linear = self._linear.get(layer)
            if linear is None:
                raise WeightsError(f"{directory} changes {layer}, which is no linear layer that sees every token")
            if (b.shape[0], a.shape[1]) != linear.weight.shape:
                shape = [b.shape[0], a.shape[1]]
                raise WeightsError(
                    f"{directory} changes {layer} by {shape}, which is {list(linear.weight.shape)} in the model"
                )
            scaled = b.float() * adapter.config.scaling
            layers[layer] = Matrices(*(matrix.t().contiguous().to(linear.weight) for matrix in (a, scaled)))
        return LoadedAdapter(name, layers)

    def add(self, adapter: LoadedAdapter) -> None:
        """Serve it, in place of one with the same name."""
        for layer in adapter.layers.keys() - self._hooked:
            self._linear[layer].register_forward_hook(self._hook(layer))
            self._hooked.add(layer)
        self._loaded[adapter.name] = adapter

    def remove(self, name: str) -> None:
        """Nobody can ask for it from here on. Requests that did have it in hand."""
        self.get(name)
        del self._loaded[name]

    def prepare(self, chunks: Sequence[Chunk], ids: Tensor) -> None:
        """The next forward is for these chunks; `ids` are their tokens."""
        rows: dict[LoadedAdapter, list[int]] = {}
        row = 0
        for request, start, end, _ in chunks:
            if request.adapter is not None:
                rows.setdefault(request.adapter, []).extend(range(row, row + end - start))
            row += end - start
        if rows and len(ids) > row:  # a token that is there twice
            rows = {adapter: [*own, row] for adapter, own in rows.items()}
        self._tokens = len(ids)
        self._rows = [(adapter, torch.tensor(own, device=ids.device)) for adapter, own in rows.items()]

    def _hook(self, layer: str) -> Any:
        def add_differences(_: nn.Module, inputs: Sequence[Tensor], output: Tensor) -> None:
            for adapter, rows in self._rows:
                if layer in adapter.layers:
                    if inputs[0].shape[:2] != (1, self._tokens):
                        raise EngineError(f"adapter {adapter.name} changes {layer}, which does not see every token")
                    a, b = adapter.layers[layer]
                    # One row twice: a CPU multiplies a single one in another order, and company shall change no bit.
                    own = rows if len(rows) > 1 else rows.repeat(2)
                    output[0].index_add_(0, rows, (inputs[0][0].index_select(0, own) @ a @ b)[: len(rows)])

        return add_differences
