"""Grouped products of experts: in the compute type, one per projection, whatever the number of experts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.trainer.model import PackedModel
from tests.models.families import write_model
from tests.models.test_families import score, sequences


class Products(TorchDispatchMode):
    """Records the types of grouped products."""

    def __init__(self) -> None:
        super().__init__()
        self.types: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default:
            self.types.append(args[1].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("family", "lora"), [("qwen3_moe", None), ("gpt_oss", {"r": 2, "alpha": 4})])
def test_experts_are_two_products_per_layer_in_the_compute_type(
    family: str, lora: dict[str, int] | None, tmp_path: Path
) -> None:
    model = PackedModel(write_model(tmp_path, family), dtype=torch.bfloat16, lora=lora)
    with Products() as products:
        score(model, sequences(), 1.0)
    assert products.types == [torch.bfloat16] * 2 * 2  # layers, and both directions
