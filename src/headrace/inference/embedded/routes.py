"""The experts that each layer chose for each token, stored by slot beside the KV cache.

A token's experts are stored when its keys and values are, in the same slot. So chunked prefill, shared prefixes,
duplicate prompts and requests that are recomputed need nothing of their own: the routes of a request are those in its
blocks. They are written by an operator that reads the slots of the current step, so that layers can be compiled and
steps captured as CUDA graphs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.inference.embedded.block_manager import BLOCK_SIZE
from headrace.inference.experts import Router, chosen_experts

MAX_NARROW = 256
"""Experts whose numbers fit into one byte."""
_current = threading.local()


class RouteCache:
    """Routes of all layers and blocks."""

    def __init__(self, model: Any, routers: Sequence[Router], blocks: int) -> None:
        layers, top_k = model.config.get_text_config().num_hidden_layers, routers[0].module.top_k
        self._is_narrow = routers[0].module.num_experts <= MAX_NARROW
        dtype = torch.uint8 if self._is_narrow else torch.int16
        self._storage = torch.zeros(layers, blocks * BLOCK_SIZE, top_k, dtype=dtype, device=model.device)
        self._stream = torch.cuda.Stream(model.device) if model.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        for layer, module in routers:
            module.stored_routes = self._storage[layer].data  # not a view, which a compiler would guard
            torch._dynamo.mark_static(module.stored_routes)
            module.register_forward_hook(_store_routes)

    @contextmanager
    def recording(self, slots: Tensor) -> Iterator[None]:
        """Store the routes of the forward in the block: its tokens are in these slots."""
        _current.slots = slots
        try:
            yield
        finally:
            _current.slots = None

    def read(self, blocks: Sequence[int], start: int, end: int) -> np.ndarray:
        """Return the routes of the tokens [start, end) of a request: [tokens, layers * experts per token], sorted.

        They were computed by steps whose output has been read, so a GPU does not wait for later ones.
        """
        with torch.cuda.stream(self._stream):
            positions = np.arange(start, end)
            slots = np.array(blocks, np.int64)[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
            rows = self._storage.index_select(1, torch.from_numpy(slots).to(self._storage.device))
            stored = rows.transpose(0, 1).cpu().numpy()
        routes = np.sort(stored, axis=-1).reshape(len(positions), -1)
        return routes if self._is_narrow else routes.astype(np.uint16)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        blocks = self._storage.view(len(self._storage), -1, BLOCK_SIZE * self._storage.shape[2])
        blocks[:, list(targets)] = blocks[:, list(sources)]


def _store_routes(module: Any, _: Any, output: tuple[Tensor, ...]) -> None:
    _store(chosen_experts(output), module.stored_routes)


@torch.library.custom_op("headrace::store_routes", mutates_args=("storage",))
def _store(chosen: Tensor, storage: Tensor) -> None:
    slots = getattr(_current, "slots", None)
    if slots is not None:  # a forward of the engine, and not of its self-check
        # Slots below 0 are those of padding: the first block is never a request's. Those of CUDA graphs are int32.
        storage.index_copy_(0, slots.clamp(min=0).long(), chosen.to(storage.dtype))
