"""Experts on a CPU compute several rows or none."""

from functools import partial
from typing import Any

import torch
from benchmarks.inference.self_check import make_sharp_model
from torch import Tensor

from headrace.inference.experts import compute_lone_tokens_twice


def test_no_token_is_alone_at_an_expert_and_the_result_is_that_of_the_plain_experts() -> None:
    model: Any = make_sharp_model("qwen3, experts", 0, torch.float32)
    experts = model.model.layers[0].mlp.experts
    plain, computed = experts.forward, []

    def spy(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        computed.append(chosen)
        result: Tensor = plain(hidden, chosen, weights)
        return result

    experts.forward = spy
    for _ in range(2):  # by two engines
        compute_lone_tokens_twice(model)
    assert isinstance(experts.forward, partial) and experts.forward.args == (spy,)
    generator = torch.Generator().manual_seed(0)
    for tokens in (1, 2, 3, 9):
        hidden = torch.randn(tokens, model.config.hidden_size, generator=generator)
        chosen = torch.rand(tokens, 4, generator=generator).topk(2).indices
        weights = torch.rand(tokens, 2, generator=generator)
        with torch.no_grad():
            torch.testing.assert_close(experts(hidden, chosen, weights), plain(hidden, chosen, weights))
        assert 1 not in torch.bincount(computed[-1].flatten()).tolist()
    assert any(len(chosen) > tokens for chosen, tokens in zip(computed, (1, 2, 3, 9), strict=True))
