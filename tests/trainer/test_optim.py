"""The optimizer refuses broken gradients, and the learning rate follows its schedule."""

import logging
import math

import pytest
import torch

from headrace.trainer.optim import Optimizer, learning_rate_factor


def parameter(*values: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(values))


def test_first_step_moves_each_parameter_by_the_learning_rate():
    # Adam's first step is lr * g / (|g| + eps), whatever the size of g.
    weight = parameter(1.0, 2.0)
    optimizer = Optimizer({"weight": weight}, max_grad_norm=None)
    weight.grad = torch.tensor([5.0, -0.01])
    assert optimizer.step(lr=0.1) == pytest.approx(math.hypot(5.0, 0.01))
    torch.testing.assert_close(weight.detach(), torch.tensor([0.9, 2.1]))
    assert weight.grad is None


def test_gradients_are_scaled_down_to_the_norm_but_never_up():
    for gradient, expected in ((3.0, 1.0), (0.5, 0.5)):
        weight = parameter(0.0)
        optimizer = Optimizer({"weight": weight}, max_grad_norm=1.0)
        weight.grad = torch.tensor([gradient])
        assert optimizer.step(lr=0.0) == pytest.approx(gradient)
        assert optimizer.state_tensors()["weight.exp_avg"].item() == pytest.approx(0.1 * expected, rel=1e-5)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_step_with_a_broken_gradient_is_skipped_counted_and_said(broken: float, caplog: pytest.LogCaptureFixture):
    weight = parameter(1.0, 2.0)
    optimizer = Optimizer({"weight": weight})
    weight.grad = torch.tensor([broken, 1.0])
    with caplog.at_level(logging.WARNING):
        optimizer.step(lr=0.1)
    assert weight.tolist() == [1.0, 2.0]
    assert optimizer.skipped == 1
    assert "changes nothing (1 skipped so far)" in caplog.text
    weight.grad = torch.tensor([1.0, 1.0])
    optimizer.step(lr=0.1)
    torch.testing.assert_close(weight.detach(), torch.tensor([0.9, 1.9]))


def test_moments_of_another_model_are_refused():
    optimizer = Optimizer({"weight": parameter(1.0)})
    with pytest.raises(ValueError, match="no step, exp_avg, exp_avg_sq for parameter weight"):
        optimizer.load_state_tensors({"other.exp_avg": torch.zeros(1)})


def test_schedules_warm_up_and_end_at_the_minimum():
    def factors(kind: str, warmup: int = 0, minimum: float = 0.0) -> list[float]:
        return [
            learning_rate_factor(step, kind=kind, warmup_steps=warmup, min_factor=minimum, max_steps=6)
            for step in range(1, 8)
        ]

    assert factors("constant", warmup=2) == [0.5, 1, 1, 1, 1, 1, 1]
    assert factors("linear", warmup=2) == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25, 0])
    assert factors("linear", warmup=2, minimum=0.5) == pytest.approx([0.5, 1, 1, 0.875, 0.75, 0.625, 0.5])
    assert factors("cosine", minimum=0.2)[3] == pytest.approx(0.6)  # halfway
    assert factors("cosine")[6] == pytest.approx(0.0)
