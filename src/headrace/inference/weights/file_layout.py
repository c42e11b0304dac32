"""A loaded model under the names and shapes that its tensors have in files.

Transformers stacks the experts of a layer into one tensor when it loads a model, and renames some tensors; files have
one tensor per expert. The conversion is transformers' own; here its results stay views of the model's tensors, so that
what is copied into them is installed in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.core_model_loading import revert_weight_conversion

from headrace.inference.weights.errors import WeightsError, abbreviate


def as_in_files(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return views of a model's tensors, as its files have them.

    Raises `WeightsError` if the conversion copies tensors, so that there is no view of them.
    """
    with torch.no_grad(), _WithoutCopies():
        views: dict[str, Tensor] = revert_weight_conversion(
            model, {n: tensor.detach() for n, tensor in tensors.items()}
        )
    storages = {_storage(tensor) for tensor in tensors.values()}
    if copied := [name for name, view in views.items() if _storage(view) not in storages]:
        raise WeightsError(f"transformers stores {abbreviate(copied)} in another form than {type(model).__name__} has")
    return views


class _WithoutCopies(TorchFunctionMode):
    """Leaves out the copies that make parts of a tensor contiguous."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int:
    """Identify the memory of a tensor; meta tensors have no address."""
    return int(tensor.untyped_storage()._cdata)
