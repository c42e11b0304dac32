"""Sampling, with numbers worked by hand."""

import math
from typing import Any

import pytest
import torch

from headrace.inference.embedded.sampling import draw, sample, scaled_logprobs, top_tokens, truncate
from headrace.inference.schema import SamplingParams


def test_evenly_spread_numbers_draw_in_proportion() -> None:
    probs = torch.tensor([0.5, 0.0, 0.2, 0.3]).expand(1000, 4)
    tokens = draw(probs, [(i + 0.5) / 1000 for i in range(1000)])
    assert torch.bincount(tokens, minlength=4).tolist() == [500, 0, 200, 300]


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_extreme_numbers_never_draw_an_impossible_token(uniform: float) -> None:
    assert draw(torch.tensor([[0.0, 0.4, 0.6, 0.0]]), [uniform]).item() in (1, 2)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, [0.1, 0.4, 0.3, 0.2]),
        ({"top_k": 0}, [0.1, 0.4, 0.3, 0.2]),
        ({"top_k": -1}, [0.1, 0.4, 0.3, 0.2]),
        ({"top_k": 2}, [0.0, 0.4, 0.3, 0.0]),
        ({"top_k": 99}, [0.1, 0.4, 0.3, 0.2]),
        ({"top_p": 0.7}, [0.0, 0.4, 0.3, 0.0]),
        ({"top_p": 0.71}, [0.0, 0.4, 0.3, 0.2]),
        ({"top_p": 1e-9}, [0.0, 0.4, 0.0, 0.0]),
        # after top_k 3 the shares are 4/9, 3/9 and 2/9: 0.45 needs the second, too
        ({"top_k": 3, "top_p": 0.45}, [0.0, 0.4, 0.3, 0.0]),
        # half of the likeliest is 0.2: what is less likely goes, and that alone
        ({"min_p": 0.5}, [0.0, 0.4, 0.3, 0.2]),
        ({"min_p": 0.51}, [0.0, 0.4, 0.3, 0.0]),
        ({"min_p": 1.0}, [0.0, 0.4, 0.0, 0.0]),
        ({"min_p": 0.25}, [0.1, 0.4, 0.3, 0.2]),
        ({"min_p": 0.51, "top_k": 1}, [0.0, 0.4, 0.0, 0.0]),
        # after min_p the shares are 4/7 and 3/7: 0.55 needs only the first, which of all has 0.4
        ({"min_p": 0.51, "top_p": 0.55}, [0.0, 0.4, 0.0, 0.0]),
    ],
)
def test_truncation_keeps_the_likeliest(settings: dict[str, Any], kept: list[float]) -> None:
    probs = torch.tensor([[0.1, 0.4, 0.3, 0.2]], dtype=torch.float64)
    assert truncate(probs, [SamplingParams(**settings)]).tolist() == [kept]


def test_tokens_as_likely_as_the_likeliest_survive_every_min_p() -> None:
    probs = torch.tensor([[0.4, 0.2, 0.4]])
    assert truncate(probs, [SamplingParams(min_p=1.0)]).tolist() == probs.masked_fill(probs < 0.3, 0).tolist()


def test_rows_are_truncated_each_by_its_own_settings() -> None:
    probs = torch.tensor([0.1, 0.4, 0.3, 0.2]).repeat(3, 1)
    cut = truncate(probs, [SamplingParams(top_k=1), SamplingParams(min_p=0.6), SamplingParams(top_p=0.8)])
    assert cut.gt(0).tolist() == [[False, True, False, False], [False, True, True, False], [False, True, True, True]]


@pytest.mark.parametrize(
    ("settings", "truncates"),
    [
        ({}, False),
        ({"top_k": 0}, False),
        ({"top_k": -1}, False),
        ({"top_k": 1}, True),
        ({"top_p": 0.99}, True),
        ({"min_p": 0.01}, True),
        ({"min_p": 0.01, "temperature": 0}, False),
    ],
)
def test_which_settings_truncate(settings: dict[str, Any], truncates: bool) -> None:
    assert SamplingParams(**settings).truncates is truncates


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


def test_the_mass_left_by_truncation_is_returned() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.5, 0.3, 0.1]])).repeat(6, 1)
    params = [
        SamplingParams(top_k=2),
        SamplingParams(top_p=0.4),
        SamplingParams(top_k=3, top_p=0.9),  # of .5, .3 and .1, the shares 5/9 and 3/9 do not reach .9: all three
        SamplingParams(),
        SamplingParams(temperature=0, top_k=2),
        SamplingParams(min_p=0.5),
    ]
    log_mass = sample(logits, params, [0.5] * 6).log_mass
    assert log_mass is not None
    assert log_mass.exp().tolist() == pytest.approx([0.8, 0.5, 0.9, 1.0, 1.0, 0.8], abs=1e-6)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0, top_p=0.5)])
def test_no_mass_is_computed_without_truncation(params: SamplingParams) -> None:
    assert sample(torch.zeros(2, 4), [params] * 2, [0.1, 0.9]).log_mass is None


def test_the_logprob_of_a_choice_is_that_of_log_softmax() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 20 * torch.randn(400, 300, generator=generator)
    temperatures = [0.0, 0.5, 1.0, 1.7] * 100
    params = [SamplingParams(temperature=value) for value in temperatures]
    tokens, logprobs, _ = sample(logits, params, torch.rand(400, generator=generator).tolist())
    scales = torch.tensor([value or 1.0 for value in temperatures], dtype=torch.float64)[:, None]
    exact = torch.log_softmax(logits.double() / scales, -1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), exact, atol=5e-6, rtol=0)
    scaled = scaled_logprobs(logits, temperatures).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(scaled, logprobs, atol=5e-6, rtol=0)


def test_no_uniform_number_draws_an_impossible_token_from_a_large_vocabulary() -> None:
    generator = torch.Generator().manual_seed(1)
    probs = torch.rand(500, 1000, generator=generator) * (torch.rand(500, 1000, generator=generator) < 0.01)
    probs[:, 700] += 0.001  # at least one is possible
    uniforms = torch.rand(500, generator=generator, dtype=torch.float64)
    uniforms[:3] = torch.tensor([0.0, 1 - 2**-53, 1 - 2**-30])
    tokens = draw(probs, uniforms.tolist())
    assert (probs.gather(1, tokens[:, None]) > 0).all()
    cumulative = probs.double().cumsum(-1)
    expected = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)[:, 0]
    assert (tokens == expected.clamp(max=999)).sum() >= 495  # up to rounding at the border of two


def test_top_tokens_are_in_order_and_as_many_as_each_row_requests() -> None:
    logprobs = torch.log(torch.tensor([[0.1, 0.6, 0.3], [0.7, 0.1, 0.2], [0.2, 0.3, 0.5]]))
    found = top_tokens(logprobs, [2, 0, 9])
    assert [[token for token, _ in row] for row in found] == [[1, 2], [], [2, 1, 0]]
    assert [value for _, value in found[0]] == pytest.approx([math.log(0.6), math.log(0.3)])


def test_nan_logits_affect_only_their_own_row() -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = torch.nan
    tokens, logprobs, _ = sample(logits, [SamplingParams(), SamplingParams(), SamplingParams(top_k=2)], [0.3] * 3)
    assert logprobs.isnan().tolist() == [False, True, False]
    assert all(0 <= token < 4 for token in tokens.tolist())
