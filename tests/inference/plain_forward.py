"""What the engine is compared with: a whole forward of the plain model, without cache, batch or padding."""

import random
from collections.abc import Mapping
from typing import Any

import torch
from transformers import DynamicCache

from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.request import Request
from headrace.inference.weights.file_layout import as_in_files
from headrace.inference.weights.published import PublishedWeights
from headrace.rollout.version import Version


def plain_logprobs(model: Any, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Each token's logprob after those before it (so one fewer than tokens)."""
    return _chosen(plain_logits(model, tokens), tokens[1:], temperature)


def plain_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """The logits after each token but the last."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            logits: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, :-1].float()
    finally:
        model.set_attn_implementation(before)
    return logits


def kept_logprobs(models: Mapping[Version, Any], request: Request) -> torch.Tensor:
    """Each sampled token's logprob by a plain cache that is kept while the weights change under it."""
    cache = DynamicCache()
    found = []
    computed = 0
    for version, start, end in request.future.result(timeout=0).version_spans:
        known = request.prompt_length + end - 1  # the last one is computed with the next token
        model = models[version]
        model.set_attn_implementation("eager")
        with torch.no_grad():
            ids = torch.tensor([request.tokens[computed:known]])
            logits = model(input_ids=ids, past_key_values=cache).logits[0, start - end :]
        found.append(_chosen(logits, request.tokens[known + 1 - (end - start) : known + 1], request.params.temperature))
        computed = known
    return torch.cat(found)


def _chosen(logits: torch.Tensor, tokens: list[int], temperature: float) -> torch.Tensor:
    logprobs = torch.log_softmax(logits.float() / (temperature or 1.0), -1)
    return logprobs.gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def random_prompt(rng: random.Random, length: int, vocab: int = 97) -> list[int]:
    return [rng.randrange(3, vocab) for _ in range(length)]


def run_all(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def assert_nothing_left(engine: Engine) -> None:
    """No block is allocated, and no request runs or waits."""
    scheduler = engine.scheduler
    assert (len(scheduler.running), scheduler.num_waiting, len(scheduler.quarantine)) == (0, 0, 0)
    assert scheduler.blocks.num_free == scheduler.blocks.num_usable


def weights_of(model: Any, version: Version) -> PublishedWeights:
    """A model's weights as they would be read, without a disk."""
    tensors = {name: tensor.clone() for name, tensor in as_in_files(model, model.state_dict()).items()}
    return PublishedWeights(version, f"of {version}", tensors)


def assert_close(values: list[float], expected: torch.Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(torch.tensor(values), expected, atol=atol, rtol=0)


def assert_like_plain(request: Request, models: Mapping[Version, Any] | Any, atol: float = 1e-5) -> None:
    """Every sampled token against the weights of its version, the whole prefix computed with these weights."""
    result = request.future.result(timeout=0)
    spans = result.version_spans
    assert [span[1] for span in spans] == [0, *(span[2] for span in spans[:-1])]
    assert spans[-1][2] == len(result.token_ids) == len(result.logprobs)
    assert result.cached_tokens <= request.prompt_length
    for version, start, end in spans:
        model = models[version] if isinstance(models, Mapping) else models
        plain = plain_logprobs(model, request.tokens, request.params.temperature)
        assert_close(result.logprobs[start:end], plain[request.prompt_length - 1 :][start:end], atol)
        if start == 0 and result.prompt_logprobs is not None:
            assert result.prompt_logprobs[0] == 0.0
            assert_close(result.prompt_logprobs[1:], plain[: request.prompt_length - 1], atol)
