"""What the engine is compared with: a whole forward of the plain model, without cache, batch or padding."""

from collections.abc import Mapping
from typing import Any

import torch

from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.request import Request
from headrace.rollout.version import Version


def plain_logprobs(model: Any, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Each token's logprob after those before it (so one fewer than tokens)."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, :-1].float()
    finally:
        model.set_attn_implementation(before)
    logprobs = torch.log_softmax(logits / (temperature or 1.0), -1)
    return logprobs.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]


def run_all(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def assert_like_plain(request: Request, models: Mapping[Version, Any] | Any) -> None:
    """Every sampled token against the weights of its version, the whole prefix computed with these weights."""
    result = request.future.result(timeout=0)
    spans = result.version_spans
    assert [span[1] for span in spans] == [0, *(span[2] for span in spans[:-1])]
    assert spans[-1][2] == len(result.token_ids) == len(result.logprobs)
    for version, start, end in spans:
        model = models[version] if isinstance(models, Mapping) else models
        plain = plain_logprobs(model, request.tokens, request.params.temperature)[request.prompt_length - 1 :]
        torch.testing.assert_close(torch.tensor(result.logprobs[start:end]), plain[start:end], atol=1e-5, rtol=0)
    if result.prompt_logprobs is not None:
        model = models[spans[0][0]] if isinstance(models, Mapping) else models
        plain = plain_logprobs(model, request.tokens, request.params.temperature)[: request.prompt_length - 1]
        assert result.prompt_logprobs[0] == 0.0
        torch.testing.assert_close(torch.tensor(result.prompt_logprobs[1:]), plain, atol=1e-5, rtol=0)
