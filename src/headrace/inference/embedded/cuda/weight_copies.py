"""Copies of new weights within a GPU, beside the two steps that they come between.

A step uses its layers one after the other. So the first half of them is copied while the step in flight computes the
second half, and the second half while the next step computes the first one. Embeddings and the head, which a step uses
at both ends, are copied between the two steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import Module

from headrace.inference.weights.buffers import copy_tensors

MIN_BYTES = 2 << 30
"""Size of layers that are worth it: copying less takes a millisecond."""


class WeightCopies:
    """The order of a model's steps and the copies of its weights; a step uses `layers` one after the other."""

    def __init__(self, model: Module, layers: Sequence[Module], device: torch.device) -> None:
        half = len(layers) // 2
        self.middle = layers[half]
        """The first layer of the second half."""
        inside = {module for layer in layers for module in layer.modules()}
        outside = _storages(module for module in model.modules() if module not in inside)
        first, second = (
            _storages(module for layer in part for module in layer.modules()) for part in (layers[:half], layers[half:])
        )
        self._first, self._second = first - second - outside, second - first - outside
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._passed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        """When the queued steps no longer use the first half."""
        self._second_copied: torch.cuda.Event | None = None
        """What the next step has to wait for before it uses the second half."""

    def wait(self) -> None:
        """Let what is queued from here on wait for all copies."""
        if self._second_copied is not None:
            torch.cuda.current_stream().wait_event(self._second_copied)
            self._second_copied = None

    def pass_middle(self) -> None:
        """Mark the place between the halves of a step in the queue, or the end of one that is not divided; what follows
        waits for all copies."""
        self.wait()
        self._passed.record()

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> torch.cuda.Event:
        """Queue copies, pairs of target and source, and return their end."""
        first: list[tuple[Tensor, Tensor]] = []
        second: list[tuple[Tensor, Tensor]] = []
        others: list[tuple[Tensor, Tensor]] = []
        for target, source in pairs:
            storage = target.untyped_storage().data_ptr()
            part = first if storage in self._first else second if storage in self._second else others
            part.append((target, source))
        steps = torch.cuda.current_stream()
        self._stream.wait_event(self._passed)
        with torch.cuda.stream(self._stream):
            copy_tensors(first)
        first_copied = self._stream.record_event()
        copy_tensors(others)
        self._stream.wait_event(steps.record_event())
        with torch.cuda.stream(self._stream):
            copy_tensors(second)
        self._second_copied = self._stream.record_event(torch.cuda.Event(blocking=True))  # type: ignore[no-untyped-call]
        steps.wait_event(first_copied)
        return self._second_copied


def is_large(layers: Iterable[Module]) -> bool:
    sizes = {parameter: parameter.nbytes for layer in layers for parameter in layer.parameters()}
    return sum(sizes.values()) >= MIN_BYTES


def _storages(modules: Iterable[Module]) -> set[int]:
    """Return the memory of the modules' own parameters, without that of modules within them."""
    parameters = (parameter for module in modules for parameter in module.parameters(recurse=False))
    return {parameter.untyped_storage().data_ptr() for parameter in parameters}
