"""The weights of a reference policy beside those in training: where the run started, or where it was some steps ago.

Only trained parameters are kept: of an adapter that is the adapter, so the reference of its start is the base model. To
score, they are swapped with the parameters in place: FSDP2's shards and compiled layers are used as they are, and there
is one copy, sharded like the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from headrace.trainer.model import PackedModel
from headrace.trainer.ranks import local_part


class ReferenceWeights:
    """A copy of the trained parameters of a model; with `every`, renewed after each step that it divides."""

    def __init__(self, model: PackedModel, every: int | None = None) -> None:
        self.every = every
        self._parameters = model.named_parameters()
        self.tensors = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Run the model with these weights inside the context."""
        swapped: list[str] = []
        try:
            for name in self.tensors:
                self._swap(name)
                swapped.append(name)
            yield
        finally:
            for name in swapped:
                self._swap(name)

    def after_step(self, step: int) -> None:
        """Copy the current parameters if `every` divides the step."""
        if self.every is not None and step % self.every == 0:
            self.copy_parameters()

    def copy_parameters(self) -> None:
        for name, parameter in self._parameters.items():
            local_part(self.tensors[name]).copy_(local_part(parameter.detach()))

    def _swap(self, name: str) -> None:
        own, other = local_part(self._parameters[name].detach()), local_part(self.tensors[name])
        before = own.clone()  # first, as it may run out of memory
        own.copy_(other)
        other.copy_(before)
