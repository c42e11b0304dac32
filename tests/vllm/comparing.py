"""What vLLM is compared with: a whole forward of the plain model, and the embedded engine."""

from collections.abc import Mapping
from typing import Any

import torch

from headrace.inference.backend import GenerationResult
from headrace.rollout.version import Version
from tests.inference.plain_forward import plain_logprobs

TOLERANCE = 1e-5
OF_LONG_TEXTS = 2e-5
"""Hundreds of tokens, sampled without a seed: now and then one rounds a little further."""


def assert_like_plain(
    prompt: list[int],
    result: GenerationResult,
    models: Mapping[Version, Any] | Any,
    temperature: float,
    tolerance: float = TOLERANCE,
) -> None:
    """Every sampled token against the weights of its version, the whole prefix computed with these weights."""
    tokens = prompt + result.token_ids
    spans = result.version_spans
    assert [span[1] for span in spans] == [0, *(span[2] for span in spans[:-1])]
    assert spans[-1][2] == len(result.token_ids) == len(result.logprobs)
    for version, start, end in spans:
        model = models[version] if isinstance(models, Mapping) else models
        plain = plain_logprobs(model, tokens, temperature)[len(prompt) - 1 :]
        torch.testing.assert_close(torch.tensor(result.logprobs[start:end]), plain[start:end], atol=tolerance, rtol=0)
    if result.prompt_logprobs is not None:
        model = models[spans[0][0]] if isinstance(models, Mapping) else models
        plain = plain_logprobs(model, tokens, temperature)[: len(prompt) - 1]
        assert result.prompt_logprobs[0] == 0.0
        torch.testing.assert_close(torch.tensor(result.prompt_logprobs[1:]), plain, atol=tolerance, rtol=0)
