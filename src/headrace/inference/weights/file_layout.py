"""A loaded model under the names and shapes that its tensors have in files.

Transformers stacks the experts of a layer into one tensor when it loads a model, and renames some tensors; files have
one tensor per expert. The conversion is transformers' own; here its results stay views of the model's tensors, so that
what is copied into them is installed in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from headrace.inference.weights.reading import WeightsError, abbreviate
from headrace.transport.adapter import Matrices


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


class ExpertSlice(NamedTuple):
    """Where a tensor of a file lies in the stacked weights of a layer's experts."""

    layer: str
    """The layer of a LoRA adapter that changes the stack, with PEFT's name."""
    stack: torch.Size
    is_transposed: bool
    """Whether the stack is [experts, in, out], and not [experts, out, in]."""
    view: Tensor

    def matrices(self, a: Tensor, b: Tensor) -> Matrices:
        """Return the matrices of this tensor's part; `a` and `b` are those of all experts, as PEFT has them."""
        count = self.stack[0]
        stacked_a, stacked_b = a.view(count, -1, a.shape[1]), b.view(b.shape[0], -1, count).permute(2, 0, 1)
        left, right = (stacked_a.mT, stacked_b.mT) if self.is_transposed else (stacked_b, stacked_a)
        if self.view.ndim == 3:
            return Matrices(right, left)
        expert, begin = divmod(int(self.view.storage_offset()), self.stack[1:].numel())
        rows, columns = divmod(begin, self.stack[2])
        shape = self.view.shape if self.view.stride(1) == 1 else self.view.shape[::-1]
        if columns or shape[1] != self.stack[2]:
            raise WeightsError("an adapter of experts cannot be merged: their tensors in files are not whole rows")
        own = Matrices(right[expert], left[expert, rows : rows + shape[0]])
        return own if self.view.stride(1) == 1 else Matrices(own.b.mT, own.a.mT)


def expert_slices(directory: Path, targets: Collection[str]) -> dict[str, ExpertSlice]:
    """Return by name the tensors in files that are parts of stacked experts, of the model in `directory`.

    Only of the weights that an adapter's `targets` name (PEFT's `target_parameters`): PEFT wraps a module once for
    each of them.
    """
    suffixes = tuple(f".{target}" for target in targets)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    stacks = {}
    for name, module in model.named_modules():
        if hasattr(module, "is_transposed"):
            parameters = module.named_parameters(name, recurse=False)
            weights = [weight for key, weight in parameters if weight.ndim == 3 and f".{key}".endswith(suffixes)]
            for depth, weight in enumerate(reversed(weights)):
                stacks[_storage(weight)] = name + depth * ".base_layer", weight.shape, module.is_transposed
    views = as_in_files(model, dict(model.named_parameters()))
    return {name: ExpertSlice(*stacks[_storage(v)], v) for name, v in views.items() if _storage(v) in stacks}


class _WithoutCopies(TorchFunctionMode):
    """Leaves out the copies that make parts of a tensor contiguous."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int:
    """Identify the memory of a tensor; meta tensors have no address."""
    return int(tensor.untyped_storage()._cdata)
