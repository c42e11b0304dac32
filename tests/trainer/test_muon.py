"""Muon's own arithmetic; its steps are in test_optim.py."""

import pytest
import torch
from torch.nn import Parameter

from headrace.trainer.optim import Muon, orthogonalize


def random_matrix(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", [(6, 9), (12, 5), (8, 8), (1, 7)])
def test_singular_values_end_near_one_and_singular_vectors_stay(shape: tuple[int, int]):
    matrix = 100 * random_matrix(*shape)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    result = u.T @ orthogonalize(matrix, 5) @ v.T
    values = result.diagonal()
    assert ((values > 0.6) & (values < 1.3)).all()
    assert (result - values.diag()).abs().max() < 1e-3


def test_nothing_stays_nothing():
    assert torch.equal(orthogonalize(torch.zeros(3, 4), 5), torch.zeros(3, 4))


@pytest.mark.parametrize("shape", [(3, 6, 9), (3, 9, 6)])
def test_each_matrix_of_a_stack_is_taken_by_itself(shape: tuple[int, int, int]):
    stack = random_matrix(*shape) * torch.tensor([1.0, 10.0, 0.1])[:, None, None]
    expected = torch.stack([orthogonalize(matrix, 5) for matrix in stack])
    torch.testing.assert_close(orthogonalize(stack, 5), expected)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(6, 9), (12, 5)])
def test_steps_are_those_of_torch_within_its_bfloat16(shape: tuple[int, int], nesterov: bool):
    ours, theirs = Parameter(random_matrix(*shape)), Parameter(random_matrix(*shape))
    settings = {"lr": 0.1, "weight_decay": 0.1, "nesterov": nesterov}
    optimizers = Muon([ours], **settings), torch.optim.Muon([theirs], adjust_lr_fn="match_rms_adamw", **settings)
    for seed in (1, 2, 3):
        ours.grad = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    moved = (theirs - random_matrix(*shape)).norm()
    assert (ours - theirs).norm() < 0.02 * moved
