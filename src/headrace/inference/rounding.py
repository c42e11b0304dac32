"""Measured rounding: how far a model's own code is from the same computation in a wider type.

How much rounding moves logits depends on the weights, so no fixed bound separates it from a fault. Another
implementation of the same model may be a few times as far from the wider result as the model's own code is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

MAX_ROUNDING_RATIO = 3.0
"""How many times as far from the wider result as the model's own code another implementation may be.

Measured with `benchmarks/inference/self_check.py`: 1.3 and less in right engines, 1.8 with experts.
"""
WIDER_TYPES = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
MAX_WIDENED_ENTRIES = 1 << 25
"""Entries of a weight that are converted to the wider type at a time."""


def typical_difference(first: Tensor, second: Tensor) -> float:
    """Return the mean absolute difference in the sense of square roots, where few large differences count less."""
    return float((first - second).abs().sqrt().mean().square())


class WiderType(TorchFunctionMode):
    """Computes in a wider type than the model's in the block; weights are converted where they are used, in parts."""

    def __init__(self, narrow: torch.dtype) -> None:
        super().__init__()
        self._narrow, self._wide = narrow, WIDER_TYPES[narrow]

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.embedding, Tensor.__getitem__) or func.__name__ == "__get__":
            result = func(*args, **kwargs)  # rows of a weight, or an attribute: the weight itself is not needed
            return self._wide if result is self._narrow else result
        if func is F.linear and args[1].numel() > MAX_WIDENED_ENTRIES:
            hidden, weight, bias = (*args, kwargs.get("bias"))[:3]
            hidden, parts = self._widen(hidden), weight.split(max(1, MAX_WIDENED_ENTRIES // weight.shape[1]))
            product = torch.cat([F.linear(hidden, self._widen(part)) for part in parts], -1)
            return product if bias is None else product + self._widen(bias)
        return func(*map(self._widen, args), **{name: self._widen(value) for name, value in kwargs.items()})

    def _widen(self, value: Any) -> Any:
        if value is self._narrow:
            return self._wide
        if isinstance(value, Tensor):
            return value.to(self._wide) if value.dtype is self._narrow else value
        return type(value)(map(self._widen, value)) if type(value) in (list, tuple) else value
