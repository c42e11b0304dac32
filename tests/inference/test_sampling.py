"""Choosing tokens, by hand-worked numbers."""

import math

import pytest
import torch

from headrace.inference.embedded.sampling import draw, sample, truncate
from headrace.inference.schema import SamplingParams


def test_evenly_spread_numbers_draw_in_proportion() -> None:
    probs = torch.tensor([0.5, 0.0, 0.2, 0.3]).expand(1000, 4)
    tokens = draw(probs, [(i + 0.5) / 1000 for i in range(1000)])
    assert torch.bincount(tokens, minlength=4).tolist() == [500, 0, 200, 300]


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_extreme_numbers_never_draw_an_impossible_token(uniform: float) -> None:
    assert draw(torch.tensor([[0.0, 0.4, 0.6, 0.0]]), [uniform]).item() in (1, 2)


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (-1, 1.0, [0.1, 0.4, 0.3, 0.2]),
        (2, 1.0, [0.0, 0.4, 0.3, 0.0]),
        (-1, 0.7, [0.0, 0.4, 0.3, 0.0]),
        (-1, 0.71, [0.0, 0.4, 0.3, 0.2]),
        (-1, 1e-9, [0.0, 0.4, 0.0, 0.0]),
        # after top_k 3 the shares are 4/9, 3/9 and 2/9: 0.45 needs the second, too
        (3, 0.45, [0.0, 0.4, 0.3, 0.0]),
        (99, 1.0, [0.1, 0.4, 0.3, 0.2]),
    ],
)
def test_truncation_keeps_the_likeliest(top_k: int, top_p: float, kept: list[float]) -> None:
    probs = torch.tensor([[0.1, 0.4, 0.3, 0.2]], dtype=torch.float64)
    assert truncate(probs, [top_k], [top_p]).tolist() == [kept]


def test_logprobs_are_scaled_by_temperature_over_the_whole_vocabulary() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.6, 0.3]])).repeat(3, 1)
    params = [
        SamplingParams(temperature=2.0, top_k=1),
        SamplingParams(temperature=1.0, top_p=0.5),
        SamplingParams(temperature=0),
    ]
    tokens, logprobs, _ = sample(logits, params, [0.99, 0.99, 0.0])
    roots = math.sqrt(0.1) + math.sqrt(0.6) + math.sqrt(0.3)
    assert tokens.tolist() == [1, 1, 1]
    assert logprobs.tolist() == pytest.approx(
        [math.log(math.sqrt(0.6) / roots), math.log(0.6), math.log(0.6)], abs=1e-6
    )


def test_each_row_has_its_own_settings() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.6, 0.3]])).repeat(2, 1)
    tokens = sample(logits, [SamplingParams(), SamplingParams(top_k=2)], [0.05, 0.05]).tokens
    assert tokens.tolist() == [0, 1]


def test_the_mass_that_truncation_leaves_is_told() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.5, 0.3, 0.1]])).repeat(5, 1)
    params = [
        SamplingParams(top_k=2),
        SamplingParams(top_p=0.4),
        SamplingParams(top_k=3, top_p=0.9),  # of .5, .3 and .1, the shares 5/9 and 3/9 do not reach .9: all three
        SamplingParams(),
        SamplingParams(temperature=0, top_k=2),
    ]
    log_mass = sample(logits, params, [0.5] * 5).log_mass
    assert log_mass is not None
    assert log_mass.exp().tolist() == pytest.approx([0.8, 0.5, 0.9, 1.0, 1.0], abs=1e-6)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0, top_p=0.5)])
def test_what_is_not_truncated_pays_for_no_mass(params: SamplingParams) -> None:
    assert sample(torch.zeros(2, 4), [params] * 2, [0.1, 0.9]).log_mass is None
