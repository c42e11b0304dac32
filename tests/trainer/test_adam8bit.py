"""AdamW with a state of 8 bits, against AdamW in float32."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import Parameter

from headrace.trainer.adam8bit import BLOCK_ENTRIES, MAX_CHUNK_ENTRIES, Adam8bit, decode, encode
from headrace.trainer.optim import Optimizer, adamw


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("key", "error"), [("exp_avg", 0.07), ("exp_avg_sq", 0.05)])
def test_a_moment_is_kept_to_a_few_percent_of_its_size(key: str, error: float) -> None:
    """Two neighbouring codes near the largest differ by power / levels, and further below by more."""
    moment = torch.rand(3, 2 * BLOCK_ENTRIES + 5, generator=generator()) * 0.5 + 0.5
    moment *= -1 if key == "exp_avg" else 1
    restored = decode(*encode(moment, key, generator()), key)
    assert restored.shape == moment.shape
    torch.testing.assert_close(restored, moment, rtol=error, atol=0)


@pytest.mark.parametrize(("key", "power", "levels"), [("exp_avg", 4, 127), ("exp_avg_sq", 6, 255)])
def test_rounding_has_no_bias(key: str, power: int, levels: int) -> None:
    """A rounding deviates by at most half the distance of two codes; the mean of n by five times that / sqrt(n)."""
    moment, repeats, random = torch.logspace(-6, 0, BLOCK_ENTRIES)[None], 500, generator()
    mean = torch.stack([decode(*encode(moment, key, random), key) for _ in range(repeats)]).mean(0)
    code = (moment ** (1 / power) * levels).floor()
    distance = ((code + 1) / levels) ** power - (code / levels) ** power
    assert ((mean - moment).abs() <= 5 * distance / 2 / math.sqrt(repeats)).all()


def test_zeros_stay_and_no_second_moment_becomes_zero() -> None:
    moment = torch.tensor([[0.0, 1e-30, 1.0]])
    restored = decode(*encode(moment, "exp_avg_sq", generator()), "exp_avg_sq")
    assert restored[0, 0] == 0
    assert restored[0, 1] > 0
    assert not decode(*encode(torch.zeros(2, 3), "exp_avg", generator()), "exp_avg").any()


def test_a_second_moment_follows_gradients_that_become_smaller() -> None:
    """Rounded to the nearest code, a decay of a thousandth would be lost in every step."""
    weight = Parameter(torch.zeros(8, BLOCK_ENTRIES))
    optimizer = Adam8bit([weight], betas=(0.9, 0.99))
    for step in range(300):
        weight.grad = torch.full_like(weight, 1.0 if step < 100 else 0.1)
        optimizer.step()
    state = optimizer.state[weight]
    square = decode(state["exp_avg_sq_codes"], state["exp_avg_sq_scales"], "exp_avg_sq")
    # exactly: (1 - .99**100) * .99**500 + .01 * (1 - .99**500)
    expected = (1 - 0.99**100) * 0.99**200 + 0.01 * (1 - 0.99**200)
    assert square.mean() == pytest.approx(expected, rel=0.05)


def test_a_large_parameter_is_updated_in_chunks_like_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.trainer import adam8bit

    def first_step(chunk: int) -> torch.Tensor:
        monkeypatch.setattr(adam8bit, "MAX_CHUNK_ENTRIES", chunk)
        weight = Parameter(torch.zeros(7, 300))
        weight.grad = torch.randn(7, 300, generator=generator())
        Adam8bit([weight], lr=0.1).step()
        return weight.detach()

    assert torch.equal(first_step(MAX_CHUNK_ENTRIES), first_step(2 * 300))


def test_it_learns_as_adamw_in_float32_does() -> None:
    """A noisy regression: the loss after training is that of float32 within a tenth, and far below the first one."""
    inputs = torch.randn(4096, 64, generator=generator(1))
    targets = inputs @ torch.randn(64, 32, generator=generator(2)) + 0.1 * torch.randn(4096, 32, generator=generator(3))

    def losses(bits: int) -> tuple[float, float]:
        weight = Parameter(torch.zeros(64, 32))
        optimizer = Optimizer({"weight": weight}, lambda parameters: adamw(parameters, state_bits=bits))
        batches = torch.randint(4096, (200, 64), generator=generator(4))
        for step, batch in enumerate(batches):
            (inputs[batch] @ weight - targets[batch]).square().mean().backward()
            optimizer.step(0.2 * (1 - step / 200))
        return targets.square().mean().item(), (inputs @ weight - targets).square().mean().item()

    (first, exact), (_, rounded) = losses(32), losses(8)
    assert rounded == pytest.approx(exact, rel=0.1)
    assert rounded < 0.01 * first
