"""An embedding that adds its gradient up in place learns what torch's own does."""

import pytest
import torch
from torch.nn import Embedding

from headrace.trainer.lm_head import accumulate_in_place

TOKENS = torch.tensor([[3, 1, 3, 0, 2, 2]])


@pytest.mark.parametrize("padding", [None, 2])
def test_gradients_add_up_to_those_of_torch(padding: int | None):
    torch.manual_seed(0)
    plain = Embedding(5, 4, padding_idx=padding)
    own = Embedding(5, 4, padding_idx=padding, _weight=plain.weight.detach().clone())
    accumulate_in_place(own)
    for step in range(3):
        for table in (plain, own):
            (table(TOKENS) * torch.arange(4.0) * (step + 1)).sum().backward()
    assert torch.equal(own(TOKENS), plain(TOKENS))
    torch.testing.assert_close(own.weight.grad, plain.weight.grad)


def test_a_table_that_is_also_the_head_has_both_gradients():
    torch.manual_seed(0)
    tables = [Embedding(5, 4) for _ in range(2)]
    tables[1].weight.data.copy_(tables[0].weight)
    accumulate_in_place(tables[1])
    for table in tables:
        (table(TOKENS)[0].tanh() @ table.weight.t()).square().sum().backward()
    torch.testing.assert_close(tables[1].weight.grad, tables[0].weight.grad)


def test_tables_that_are_frozen_or_compute_more_are_left_alone():
    class Scaled(Embedding):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(tokens)

    frozen, scaled = Embedding(5, 4).requires_grad_(False), Scaled(5, 4)
    for table in (frozen, scaled):
        accumulate_in_place(table)
        assert "forward" not in vars(table)
