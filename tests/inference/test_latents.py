"""Thinking in latent space: the engine against the formulas, computed token by token without cache and batch."""

import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from headrace.inference.backend import InvalidRequest
from headrace.inference.embedded.cpu.weight_layout import lay_out_for_small_batches
from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.request import Request
from headrace.inference.latents import GATES, add_gates
from headrace.inference.schema import GenerateChoice, LatentParams, SamplingParams, WeightVersionSpan, read_completion
from tests.inference.conftest import make_qwen3
from tests.inference.plain_forward import assert_close, assert_like_plain, random_prompt, run_all
from tests.refusals import refused

NEVER = LatentParams(until="\x00 never")
SOFT = LatentParams(kind="soft", until="\x00 never")


def model_for(latents: LatentParams) -> Any:
    """With gates, if any, as after training, so that they matter to every logit."""
    made = make_qwen3(3)
    if latents.kind == "hybrid":
        add_gates(made)
        with torch.no_grad():
            made.latent_gates.retention.fill_(1.0)
    return made


@pytest.fixture
def model() -> Any:
    return model_for(NEVER)


def engine_of(model: Any, **options: Any) -> Engine:
    return Engine(model, max_model_len=96, decode=lambda ids: "".join(map(chr, ids)), **options)


def params(latents: LatentParams | None = NEVER, **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 20, "ignore_eos": True, "latents": latents, **more})


def latents_of(request: Request) -> np.ndarray:
    content = request.future.result(timeout=0).latents
    assert content is not None
    return np.frombuffer(content, "<f2").reshape(len(request.logprobs), -1)


def logits_after(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(inputs_embeds=inputs[None], use_cache=False).logits[0]
    model.set_attn_implementation(before)
    return logits


def blended(model: Any, e: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """The hybrid input embedding, straight from the paper."""
    gates = getattr(model, GATES)
    r = torch.sigmoid(gates.recurrence_weight @ e + gates.recurrence_bias)
    i = torch.sigmoid(gates.input_weight @ e + gates.input_bias)
    a = torch.exp(-8 * torch.log1p(torch.exp(-gates.retention)) * r)
    return a * e + torch.sqrt(1 - a**2 + 1e-8) * (i * h)


@torch.no_grad()
def assert_like_formulas(request: Request, model: Any) -> None:
    """Check every latent and every logprob, each with the engine's latents before it."""
    kind, table = request.params.latents.kind, model.get_input_embeddings().weight
    latents = torch.from_numpy(latents_of(request).astype(np.float32))
    start, tokens = request.prompt_length, request.tokens
    used = latents.any(-1)
    thoughts = [
        h if kind == "soft" else blended(model, table[t], h) for t, h in zip(tokens[start:], latents, strict=True)
    ]
    inputs = torch.cat(
        [table[tokens[:start]], torch.where(used[:, None], torch.stack(thoughts), table[tokens[start:]])]
    )
    logits = logits_after(model, inputs)[start - 1 : -1]
    p = torch.softmax(logits / 0.5, -1)
    expected = p @ table if kind == "soft" else (p @ table) / p.norm(dim=-1, keepdim=True)
    logprobs = torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens[start:])[:, None])[:, 0]
    if kind == "soft":
        sigma = 0.33 * table.pow(2).mean().sqrt()
        logprobs = torch.where(used, -((latents - expected) ** 2).sum(-1) / (2 * sigma**2), logprobs)
    else:  # float16 has 11 bits
        torch.testing.assert_close(latents[used], expected[used], rtol=2**-11, atol=1e-5)
    assert_close(request.logprobs, logprobs, atol=1e-3 if kind == "soft" else 1e-5)


@pytest.mark.parametrize("latents", [NEVER, SOFT], ids=["hybrid", "soft"])
@pytest.mark.parametrize("fused", [True, False])
def test_every_latent_and_logprob_is_that_of_the_formulas(latents: LatentParams, fused: bool) -> None:
    model = model_for(latents)
    engine = engine_of(model, compile=fused)
    rng = random.Random(1)
    requests = [engine.submit(random_prompt(rng, length), params(latents)) for length in (5, 17, 17, 33)]
    plain = engine.submit(random_prompt(rng, 9), params(None))
    run_all(engine)
    for request in requests:
        assert latents_of(request).any(-1).all()
        assert_like_formulas(request, model)
    assert plain.future.result().latents is None
    assert_like_plain(plain, model)


def test_the_gates_start_near_the_plain_model(model: Any) -> None:
    add_gates(model)
    e = model.get_input_embeddings().weight[:50]
    kept, added, _ = getattr(model, GATES)(e, torch.zeros_like(e))
    assert kept.min() > 0.99 and kept.max() < 1 and 0.995 < kept.mean() < 0.999
    torch.testing.assert_close(kept**2 + added**2, torch.ones_like(kept))


def test_tokens_after_the_end_of_the_thoughts_are_plain(model: Any) -> None:
    engine = engine_of(model)
    first = engine.submit([5, 6, 7], params(seed=4))
    run_all(engine)
    end = first.tokens[3 + 6]
    request = engine.submit([5, 6, 7], params(LatentParams(until=chr(end)), seed=4))
    run_all(engine)
    place = first.tokens[3:].index(end)
    assert request.tokens[: 3 + place + 1] == first.tokens[: 3 + place + 1]
    assert latents_of(request).any(-1).tolist() == [True] * place + [False] * (20 - place)
    assert_like_formulas(request, model)


def test_preempted_requests_are_recomputed_with_their_latents(model: Any) -> None:
    engine = engine_of(model, max_running=4, kv_blocks=7)
    rng = random.Random(5)
    requests = [engine.submit(random_prompt(rng, 20), params(max_tokens=40)) for _ in range(4)]
    run_all(engine)
    assert engine.scheduler.preemptions
    for request in requests:
        assert_like_formulas(request, model)


def test_cached_thoughts_are_not_shared_with_plain_tokens(model: Any) -> None:
    engine = engine_of(model)
    prompt = random_prompt(random.Random(6), 16)
    thinking = engine.submit(prompt, params(max_tokens=40))
    run_all(engine)
    plain = engine.submit(thinking.tokens[:50], params(None))
    run_all(engine)
    assert plain.future.result().cached_tokens == 16  # the prompt alone
    assert_like_plain(plain, model)
    again = engine.submit(plain.tokens[:60], params(None))
    run_all(engine)
    assert again.future.result().cached_tokens == 48


@pytest.mark.parametrize("latents", [NEVER, SOFT], ids=["hybrid", "soft"])
def test_a_seed_gives_the_same_thoughts_alone_and_in_a_batch(latents: LatentParams) -> None:
    results = []
    for others in (0, 5):
        model = model_for(latents)
        lay_out_for_small_batches(model)
        engine = engine_of(model)
        for number in range(others):
            engine.submit([8 + number] * 9, params(latents))
        request = engine.submit([5, 6, 7], params(latents, seed=11))
        run_all(engine)
        results.append((request.tokens, latents_of(request).tobytes()))
    assert results[0] == results[1]


@pytest.mark.parametrize(("latents", "other"), [(NEVER, SOFT), (SOFT, NEVER)], ids=["hybrid", "soft"])
def test_thoughts_of_another_kind_than_the_models_are_refused(latents: LatentParams, other: LatentParams) -> None:
    engine = engine_of(model_for(latents))
    with refused(InvalidRequest, key="latents"):
        engine.submit([5], params(other))


def test_latents_travel_as_base64_in_json() -> None:
    rows = np.arange(6, dtype=np.float16).reshape(2, 3)
    choice = GenerateChoice(0, [1, 2], "stop", weight_versions=[WeightVersionSpan("0-0", 0, 2)])
    choice.flat_logprobs, choice.latents = [-1.0, -2.0], rows.tobytes()
    completion = read_completion(msgspec.json.encode({"choices": [choice]}))
    np.testing.assert_array_equal(completion.latents, rows)
