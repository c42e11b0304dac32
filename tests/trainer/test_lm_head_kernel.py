"""The head's kernels compute what its operators compute: on a GPU, or on a CPU with TRITON_INTERPRET=1."""

import os

import pytest
import torch
from torch import Tensor

from headrace.trainer import lm_head

pytest.importorskip("triton", reason="torch's CUDA builds bring triton")
if not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"):
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)

from headrace.trainer import lm_head_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS = 6


def chunk_of_logits(dtype: torch.dtype, vocabulary: int, spread: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (spread * torch.randn(TOKENS, vocabulary, generator=generator)).to(dtype)
    labels = torch.randint(vocabulary, (TOKENS,), generator=generator)
    temperatures = 0.5 + torch.rand(TOKENS, generator=generator)
    return logits.to(DEVICE), labels.to(DEVICE), temperatures.to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [1, 31, 4096, 4097, 9000])
def test_scores_equal_those_in_float64(dtype: torch.dtype, vocabulary: int):
    logits, labels, temperatures = chunk_of_logits(dtype, vocabulary)
    given = lm_head_kernels.score(logits, labels, temperatures)
    expected = lm_head._score(logits.double(), labels, temperatures.double())
    for found, wanted in zip(given, expected, strict=True):
        torch.testing.assert_close(found, wanted.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [31, 4097])
def test_gradients_take_the_place_of_logits_and_equal_those_in_float64(dtype: torch.dtype, vocabulary: int):
    logits, labels, temperatures = chunk_of_logits(dtype, vocabulary)
    wide, scales = logits.double(), torch.linspace(-1, 2, TOKENS, device=DEVICE)
    logprobs, normalizers, _ = lm_head._score(wide, labels, temperatures.double())
    expected = lm_head._gradient(wide, labels, temperatures.double(), logprobs, normalizers, scales.double())
    given = lm_head_kernels.gradient(logits, labels, temperatures, logprobs.float(), normalizers.float(), scales)
    assert given is logits
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(given.double(), expected, atol=1e-7, rtol=tolerance)


@pytest.mark.parametrize("order", ["rising", "falling"])
def test_the_largest_logit_may_come_first_or_last(order: str):
    """Over three blocks, with logits so far apart that sums without a correction would be infinite."""
    logits = torch.linspace(-400, 400, 9000, device=DEVICE)[None]
    logits = logits if order == "rising" else logits.flip(1)
    labels, ones = torch.tensor([4500], device=DEVICE), torch.ones(1, device=DEVICE)
    given = lm_head_kernels.score(logits.contiguous(), labels, ones)
    expected = lm_head._score(logits.double(), labels, ones.double())
    for found, wanted in zip(given, expected, strict=True):
        torch.testing.assert_close(found, wanted.float(), atol=1e-4, rtol=1e-5)


def test_logits_that_are_no_numbers_are_not_hidden():
    logits, labels, temperatures = chunk_of_logits(torch.float32, 31)
    logits[2, 5] = torch.nan
    logprobs, _, entropy = lm_head_kernels.score(logits, labels, temperatures)
    assert logprobs.isnan().tolist() == entropy.isnan().tolist() == [token == 2 for token in range(TOKENS)]


def test_no_tokens_are_no_work():
    nothing = torch.zeros(0, device=DEVICE)
    assert len(lm_head_kernels.score(torch.zeros(0, 8, device=DEVICE), nothing.long(), nothing)[0]) == 0


@pytest.mark.parametrize("is_frozen", [False, True])
def test_the_head_with_kernels_gives_the_heads_own_gradients(is_frozen: bool, monkeypatch: pytest.MonkeyPatch):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, 8, generator=generator).to(DEVICE).requires_grad_()
    weight = torch.randn(50, 8, generator=generator).to(DEVICE).requires_grad_(not is_frozen)
    labels, temperatures = torch.arange(11, device=DEVICE), torch.linspace(0.5, 2, 11, device=DEVICE)
    direction, wanted = torch.linspace(-1, 1, 11, device=DEVICE), [hidden] if is_frozen else [hidden, weight]

    def gradients(passes: lm_head._Passes) -> tuple[Tensor, ...]:
        monkeypatch.setattr(lm_head, "_passes", lambda *_: passes)
        logprobs, _ = lm_head.label_logprobs(hidden, weight, labels, temperatures, 4)
        return torch.autograd.grad((logprobs * direction).sum(), wanted)

    kernels = gradients(lm_head._Passes(lm_head_kernels.score, lm_head_kernels.gradient))
    torch.testing.assert_close(kernels, gradients(lm_head._Passes(lm_head._score, lm_head._gradient)))
