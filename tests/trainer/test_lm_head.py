"""Logprob, entropy and gradients from hidden states equal the plain computation, whatever the chunk."""

import math

import pytest
import torch

from headrace.trainer.lm_head import label_logprobs


def plain(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, temperatures: torch.Tensor):
    logits = hidden @ weight.t() / temperatures[:, None]
    log_softmax = logits.log_softmax(-1)
    return log_softmax.gather(-1, labels[:, None])[:, 0], -(log_softmax.exp() * log_softmax).sum(-1)


def inputs(tokens: int = 23, size: int = 7, vocabulary: int = 31):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, size, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(vocabulary, size, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(vocabulary, (tokens,), generator=generator)
    temperatures = 0.5 + torch.rand(tokens, generator=generator, dtype=torch.float64)
    return hidden, weight, labels, temperatures


@pytest.mark.parametrize("chunk", [1, 5, 23, 1000])
def test_values_and_gradients_equal_the_plain_computation(chunk: int):
    hidden, weight, labels, temperatures = inputs()
    direction = torch.randn(23, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected, expected_entropy = plain(hidden, weight, labels, temperatures)
    wanted = torch.autograd.grad((expected * direction).sum(), (hidden, weight))
    logprobs, entropy = label_logprobs(hidden, weight, labels, temperatures, chunk)
    given = torch.autograd.grad((logprobs * direction).sum(), (hidden, weight))
    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(entropy, expected_entropy)
    torch.testing.assert_close(given, wanted)


def test_gradient_passes_numerical_differentiation():
    hidden, weight, labels, temperatures = inputs(tokens=6, size=3, vocabulary=5)
    assert torch.autograd.gradcheck(lambda h, w: label_logprobs(h, w, labels, temperatures, 4)[0], (hidden, weight))


def test_entropy_has_no_gradient_and_uniform_logits_give_log_of_the_vocabulary():
    weight = torch.zeros(8, 4, requires_grad=True)
    logprobs, entropy = label_logprobs(torch.ones(2, 4), weight, torch.tensor([0, 7]), torch.ones(2), 1)
    assert not entropy.requires_grad
    torch.testing.assert_close(entropy, torch.full((2,), 8.0).log())
    torch.testing.assert_close(logprobs.detach(), -torch.full((2,), 8.0).log())


@pytest.mark.parametrize("offset", [0.0, 30.0, -400.0])
def test_the_entropy_of_a_nearly_certain_model_is_right_and_not_negative(offset: float):
    # The logits are the weights: one token above 5,000 others, by a margin that leaves them less and less.
    margins = torch.linspace(5, 40, 200)
    logits = torch.full((200, 5000), offset)
    logits[:, 7] += margins
    logprobs, entropy = label_logprobs(
        torch.eye(200), logits.t().contiguous(), torch.full((200,), 7), torch.full((200,), 0.7), 64
    )
    exact = (logits.double() / torch.tensor(0.7).double()).log_softmax(-1)
    assert (entropy >= 0).all()
    # Each logit is rounded to a float32 once, when it is divided by the temperature.
    rounding = float((abs(offset) + 40) / 0.7 * torch.finfo(torch.float32).eps)
    torch.testing.assert_close(entropy.double(), -(exact.exp() * exact).sum(-1), atol=10 * rounding, rtol=1e-3)
    torch.testing.assert_close(logprobs.double(), exact[:, 7], atol=rounding, rtol=1e-3)


def test_narrow_hidden_states_are_scored_in_float32_and_keep_the_weights_gradient():
    weight = torch.randn(16, 4, requires_grad=True)
    hidden = torch.randn(5, 4).to(torch.bfloat16).requires_grad_()
    logprobs, _ = label_logprobs(hidden, weight, torch.arange(5), torch.ones(5), 2)
    logprobs.sum().backward()
    assert logprobs.dtype == torch.float32
    assert hidden.grad.dtype == torch.bfloat16
    assert weight.grad.dtype == torch.float32


def test_no_tokens_at_all_still_run_backward():
    weight = torch.randn(16, 4, requires_grad=True)
    hidden = torch.zeros(0, 4, requires_grad=True)
    logprobs, _ = label_logprobs(hidden, weight, torch.zeros(0, dtype=torch.long), torch.ones(0), 8)
    logprobs.sum().backward()
    assert weight.grad.abs().sum() == 0


@pytest.mark.parametrize("chunk", [2, 100])
def test_fp32_head_equals_the_plain_computation_in_float32_with_narrow_hidden_states(chunk: int):
    hidden, weight, labels, temperatures = (tensor.detach() for tensor in inputs())
    narrow, weight = hidden.bfloat16().requires_grad_(), weight.float().requires_grad_()
    direction = torch.randn(23, generator=torch.Generator().manual_seed(1))
    expected, expected_entropy = plain(narrow.float(), weight, labels, temperatures.float())
    wanted = torch.autograd.grad((expected * direction).sum(), (narrow, weight))
    logprobs, entropy = label_logprobs(narrow, weight, labels, temperatures.float(), chunk, fp32=True)
    given = torch.autograd.grad((logprobs * direction).sum(), (narrow, weight))
    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(entropy, expected_entropy)
    torch.testing.assert_close(given, wanted)
    rounded, _ = label_logprobs(narrow, weight, labels, temperatures.float(), chunk)
    assert (rounded - expected).abs().max() > 1e-3


def test_fp32_head_stays_float32_under_autocast():
    hidden, weight, labels, temperatures = (tensor.detach().float() for tensor in inputs())
    with torch.autocast("cpu", torch.bfloat16):
        logprobs, _ = label_logprobs(hidden.bfloat16(), weight, labels.long(), temperatures, 5, fp32=True)
    expected, _ = plain(hidden.bfloat16().float(), weight, labels.long(), temperatures)
    torch.testing.assert_close(logprobs, expected)


def test_gradient_of_a_nearly_certain_label_is_not_lost_to_rounding():
    hidden = torch.tensor([[1.0]], dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([[8.0], [0.0]])
    logprobs, _ = label_logprobs(hidden, weight, torch.tensor([0]), torch.ones(1), 1)
    logprobs.sum().backward()
    # d log p / d hidden = (1 - p) * (8 - 0), with 1 - p = 1 / (1 + e^8)
    torch.testing.assert_close(hidden.grad.float(), torch.tensor([[8 / (1 + math.exp(8))]]), rtol=1e-2, atol=0)


@pytest.mark.parametrize("chunk", [1, 5, 23, 1000])
def test_a_frozen_head_passes_the_same_gradient_on(chunk: int):
    hidden, weight, labels, temperatures = inputs()
    direction = torch.randn(23, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    learned, _ = label_logprobs(hidden, weight, labels, temperatures, chunk)
    (wanted,) = torch.autograd.grad((learned * direction).sum(), hidden)
    frozen, _ = label_logprobs(hidden, weight.detach(), labels, temperatures, chunk)
    (given,) = torch.autograd.grad((frozen * direction).sum(), hidden)
    torch.testing.assert_close(given, wanted)
    torch.testing.assert_close(frozen, learned)


@pytest.mark.parametrize("chunk", [5, 23])
def test_gradients_added_in_place_are_those_that_are_returned(chunk: int):
    hidden, weight, labels, temperatures = inputs()
    returned, _ = label_logprobs(hidden, weight, labels, temperatures, chunk)
    wanted = torch.autograd.grad(returned.sum(), (hidden, weight))
    for times in (1, 2):
        hidden.grad = None
        logprobs, _ = label_logprobs(hidden, weight, labels, temperatures, chunk, in_place=True)
        logprobs.sum().backward()
        torch.testing.assert_close(hidden.grad, wanted[0])
        torch.testing.assert_close(weight.grad, times * wanted[1])


def test_a_second_backward_pass_through_the_same_graph_gives_the_same():
    hidden, weight, labels, temperatures = inputs()
    logprobs, _ = label_logprobs(hidden, weight, labels, temperatures, 7)
    first = torch.autograd.grad(logprobs.sum(), (hidden, weight), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(logprobs.sum(), (hidden, weight)), first)


def test_parts_of_a_narrow_weights_gradient_add_up_in_float32():
    """512 tokens, each with the same small part: a sum in bfloat16 stops growing at 256 times that."""
    tokens = 512
    hidden = torch.ones(tokens, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    logprobs, _ = label_logprobs(hidden, weight, torch.zeros(tokens, dtype=torch.long), torch.ones(tokens), 1)
    logprobs.sum().backward()
    torch.testing.assert_close(weight.grad.float(), torch.tensor([[256.0], [-256.0]]))  # half of each token
