"""Experts in training: grouped products in the compute type, and the cost of those that a token takes."""

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


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "mixtral"])
def test_a_token_costs_the_products_with_its_own_experts(family: str, tmp_path: Path) -> None:
    model = PackedModel(write_model(tmp_path, family))
    matrices = {name: weight for name, weight in model.module.named_parameters() if weight.ndim > 1}
    small = ("embed_tokens", "gate.weight", "shared_expert_gate")  # a table that is read, and routers
    active = sum(
        w.numel() // (2 if w.ndim == 3 else 1) for name, w in matrices.items() if not any(s in name for s in small)
    )
    assert model.cost.a == 2 * active  # two of four experts; a multiplication and an addition each
