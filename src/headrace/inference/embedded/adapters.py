"""LoRA adapters served beside the model: a hook on each linear layer adds the difference of each token's adapter.

Requests with different adapters, and without one, share a forward, and the base weights do not change. Published
versions of a policy are merged into the weights instead (`weights.published`), which costs nothing per step.
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
from headrace.inference.weights.reading import WeightsError
from headrace.transport.adapter import AdapterError, Matrices, read_adapter

_identities = itertools.count(1)


class LoadedAdapter:
    """The matrices of one adapter by layer, transposed for multiplication."""

    def __init__(self, name: str, layers: dict[str, Matrices]) -> None:
        self.name = name
        self.layers = layers
        """A is [in, r], and B is [r, out] with the scaling included."""
        self.identity = f"{name}#{next(_identities)}"
        """Differs from that of an earlier adapter with the same name, so that they share no KV cache."""


class Adapters:
    """The adapters of one model; only `read` and `names` may be used outside of the engine's thread."""

    def __init__(self, model: Any) -> None:
        head = model.get_output_embeddings()  # only gets the tokens whose logits are needed
        linear = (entry for entry in model.named_modules() if isinstance(entry[1], nn.Linear))
        self._linear = {name: module for name, module in linear if module is not head}
        self._loaded: dict[str, LoadedAdapter] = {}
        self._hooked: set[str] = set()
        self._tokens = 0
        self._rows: list[tuple[LoadedAdapter, Tensor]] = []
        """Each adapter's tokens in the current batch."""

    @property
    def names(self) -> list[str]:
        return [*self._loaded]

    def get(self, name: str) -> LoadedAdapter:
        """Return a loaded adapter. Raises `ModelNotFound`."""
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
            linear, change = self._linear.get(layer), f"{directory} changes {layer}"
            if linear is None:
                raise WeightsError(f"{change}, which is not a linear layer over all tokens of the model")
            shape = [b.shape[0], a.shape[1]]
            if shape != list(linear.weight.shape):
                raise WeightsError(f"{change} by {shape}, which is {list(linear.weight.shape)} in the model")
            scaled = b.float() * adapter.config.scaling
            layers[layer] = Matrices(*(matrix.t().contiguous().to(linear.weight) for matrix in (a, scaled)))
        return LoadedAdapter(name, layers)

    def add(self, adapter: LoadedAdapter) -> None:
        """Serve an adapter, replacing one with the same name."""
        for layer in adapter.layers.keys() - self._hooked:
            self._linear[layer].register_forward_hook(self._make_hook(layer))
            self._hooked.add(layer)
        self._loaded[adapter.name] = adapter

    def remove(self, name: str) -> None:
        """Refuse new requests for an adapter; running ones keep it."""
        self.get(name)
        del self._loaded[name]

    def prepare(self, chunks: Sequence[Chunk], ids: Tensor) -> None:
        """Set the chunks of the next forward; `ids` are their tokens."""
        rows: dict[LoadedAdapter, list[int]] = {}
        row = 0
        for request, start, end, _ in chunks:
            if request.adapter is not None:
                rows.setdefault(request.adapter, []).extend(range(row, row + end - start))
            row += end - start
        if rows and len(ids) > row:  # a doubled token
            rows = {adapter: [*own, row] for adapter, own in rows.items()}
        self._tokens = len(ids)
        self._rows = [(adapter, torch.tensor(own, device=ids.device)) for adapter, own in rows.items()]

    def _make_hook(self, layer: str) -> Any:
        """Return a forward hook that adds the differences of each token's adapter to a layer's output."""

        def add_differences(_: nn.Module, inputs: Sequence[Tensor], output: Tensor) -> None:
            for adapter, rows in self._rows:
                if layer in adapter.layers:
                    if inputs[0].shape[:2] != (1, self._tokens):
                        raise EngineError(f"adapter {adapter.name} changes {layer}, which is not applied to all tokens")
                    a, b = adapter.layers[layer]
                    # A single row is doubled: a CPU rounds its product differently from that of several rows.
                    own = rows if len(rows) > 1 else rows.repeat(2)
                    output[0].index_add_(0, rows, (inputs[0][0].index_select(0, own) @ a @ b)[: len(rows)])

        return add_differences
