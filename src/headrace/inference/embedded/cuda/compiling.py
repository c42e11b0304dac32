"""Decoder layers as compiled programs, where the runner wants them: norms, rotation and activations become few kernels.

All layers are one program, for any number of tokens above one, and a second one where layers differ. The model itself
stays as it was: outside of `compiled` blocks it runs uncompiled, with its hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

MOST_PROGRAMS = 64
"""Of one kind of layer: past that the compiler would run what is new uncompiled."""


class CompiledLayers:
    """The layers of a model, each with a second `forward`."""

    def __init__(self, model: Any) -> None:
        self._is_on = False
        kinds = set(model._no_split_modules or ())
        for module in [module for module in model.modules() if type(module).__name__ in kinds]:
            plain = getattr(module.forward, "plain", module.forward)  # of a model that had an engine before
            module.forward = self._either(plain, torch.compile(plain, dynamic=True))

    @contextmanager
    def compiled(self) -> Iterator[None]:
        """In this block layers run compiled."""
        settings = torch._dynamo.config  # of this thread alone, from torch 2.12 on
        if settings.recompile_limit < MOST_PROGRAMS:
            settings.recompile_limit = MOST_PROGRAMS
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def _either(self, plain: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return (compiled if self._is_on else plain)(*args, **kwargs)

        vars(forward)["plain"] = plain
        return forward
