"""Tiny modules that run packed rows, without the rest of a trainer."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from headrace.trainer import attention
from headrace.trainer.packed_row import PackedRow, make_row
from tests.trainer.training_samples import ARCHITECTURES


def packed_module(name: str, layers: int, **sizes: int) -> Any:
    """The same random tensors for the same architecture."""
    config = copy.deepcopy(ARCHITECTURES[name])
    config.update({"num_hidden_layers": layers, **sizes})
    if getattr(config, "layer_types", None):
        config.layer_types = (config.layer_types * layers)[:layers]
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config)
    module.set_attn_implementation(attention.PACKED_ATTENTION)
    return module.train()


def sequences_that_share(scale: int = 1) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 96, 20 * scale)
    sequences = [np.concatenate([prompt, rng.integers(0, 96, n * scale)]) for n in (1, 3, 9, 30)]
    return [*sequences, rng.integers(0, 96, 40 * scale)]


def row_that_shares() -> PackedRow:
    return make_row(sequences_that_share(), torch.device("cpu"))


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def assert_similar(given: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """By the norm of the difference: what narrow types and a free order of additions allow."""
    for name, tensor in expected.items():
        error = float((given[name].float() - tensor.float()).norm() / tensor.float().norm())
        assert error < tolerance, f"{name}: {error}"


def hidden_states(module: Any, row: PackedRow) -> Tensor:
    output = module.model(input_ids=row.token_ids, position_ids=row.position_ids, use_cache=False, layout=row.layout)
    return output.last_hidden_state[0]


def backward_through(module: Any, row: PackedRow) -> tuple[Tensor, dict[str, Tensor]]:
    """The row's hidden states, and the gradients of a fixed function of them."""
    module.zero_grad()
    hidden = hidden_states(module, row)
    direction = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
    (hidden * direction.to(hidden)).sum().backward()
    return hidden.detach(), {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
