"""The GPU's way to compute steps, on a CPU through Triton's interpreter: all but graphs and compiled layers."""

import os
import random
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from headrace.inference.embedded import scheduler as scheduler_module
from headrace.inference.embedded.engine import Engine
from headrace.inference.schema import SamplingParams
from headrace.rollout.version import Version
from tests.inference.plain_forward import assert_like_plain, assert_nothing_left, random_prompt, run_all, weights_of

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton does not interpret; tests/gpu has the same on a GPU", allow_module_level=True)

from headrace.inference.embedded.cuda import items
from headrace.inference.embedded.cuda.runner import CudaRunner

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_engine(model: Any, **settings: Any) -> Engine:
    """An engine that computes as on a GPU."""
    engine = Engine(model, **settings)
    engine.runner = CudaRunner(
        model,
        engine.scheduler.pool.count + 1,
        engine.adapters,
        max_running=engine.max_running,
        max_model_len=engine.max_model_len,
        compile=False,
        graphs=False,
    )
    return engine


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "CHUNK", 16)
    monkeypatch.setattr(items, "PROGRAMS", 8)
    monkeypatch.setattr(items, "SHORTEST", 64)


@pytest.mark.parametrize(
    "config",
    [
        transformers.Qwen3Config(**SIZES, head_dim=16),
        transformers.MistralConfig(**SIZES, sliding_window=6),
        transformers.Gemma2Config(**SIZES, head_dim=16, sliding_window=5),
    ],
    ids=["qwen3", "mistral, sliding", "gemma 2, sliding and capped"],
)
def test_mixed_requests_are_exact(config: Any) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    engine = make_engine(model, max_model_len=100, max_running=6, max_step_tokens=48, kv_blocks=7)
    rng = random.Random(8)
    text = random_prompt(rng, 90)
    requests: list[Any] = []
    for number, length in enumerate((1, 25, 40, 9, 85, 2)):
        params = SamplingParams(
            temperature=rng.choice([0, 0.7, 1.0]),
            max_tokens=rng.choice([3, 14]),
            prompt_logprobs=rng.choice([None, 0]),
            seed=rng.choice([None, 1]),
            top_p=rng.choice([1.0, 0.8]),
            logprobs=rng.choice([None, 2]),
            ignore_eos=True,
        )
        prompt = text[:length] if number % 2 else random_prompt(rng, length)
        requests += [engine.submit(prompt, params) for _ in range(1 + number % 2)]
        engine.step()
    engine.cancel(requests.pop(3))
    run_all(engine)
    for request in requests:
        assert_like_plain(request, model)
        result = request.future.result()
        if request.params.logprobs:
            assert [len(entry) for entry in result.top_logprobs] == [2] * len(result.token_ids)
    assert_nothing_left(engine)
    assert engine.scheduler.preemptions


def test_a_request_samples_what_it_samples_on_a_cpu(model: Any, make_model: Any) -> None:
    def sampled(engine: Engine) -> list[list[int]]:
        settings = [{}, {"temperature": 0}, {"top_k": 5}, {"temperature": 0.5}]
        requests = [
            engine.submit([5 + place] * 9, SamplingParams(max_tokens=8, seed=3, ignore_eos=True, **each))
            for place, each in enumerate(settings)
        ]
        run_all(engine)
        return [request.tokens for request in requests]

    expected = sampled(Engine(model, max_model_len=32, max_running=4))
    assert sampled(make_engine(make_model(0), max_model_len=32, max_running=4)) == expected


@pytest.mark.parametrize("kv_on_update", ["recompute", "keep"])
def test_new_weights_between_tokens(make_model: Any, kv_on_update: Any) -> None:
    models = {Version(0, step): make_model(step) for step in range(2)}
    engine = make_engine(make_model(0), max_model_len=64, max_running=3, kv_on_update=kv_on_update)
    requests = [engine.submit([7] * length, SamplingParams(max_tokens=6, ignore_eos=True)) for length in (3, 20, 33)]
    for _ in range(3):
        engine.step()
    engine.install(weights_of(models[Version(0, 1)], Version(0, 1)))
    run_all(engine)
    for request in requests:
        assert [span[0].step for span in request.future.result().version_spans] == [0, 1]
        if kv_on_update == "recompute":
            assert_like_plain(request, models)


def test_logits_that_are_no_numbers_end_their_request_alone(model: Any, make_model: Any) -> None:
    engine = make_engine(model, max_model_len=64, max_running=4)
    with torch.no_grad():
        model.model.embed_tokens.weight[200] = torch.nan  # tied: it is a row of the logits as well
    requests = [engine.submit([5, 6, 7], SamplingParams(max_tokens=3)), engine.submit([5, 200], SamplingParams())]
    run_all(engine)
    assert all("not finite" in str(request.future.exception()) for request in requests)
    assert_nothing_left(engine)


def test_a_request_that_fails_leaves_others_exact(model: Any, make_model: Any) -> None:
    engine = make_engine(model, max_model_len=64, max_running=4)
    requests = [engine.submit([5 + n, 6, 7], SamplingParams(max_tokens=6, ignore_eos=True)) for n in range(3)]
    engine.step()
    requests[1].tokens[-1] = 10_000  # no such token
    run_all(engine)
    assert requests[1].future.exception() is not None
    for request in (requests[0], requests[2]):
        assert_like_plain(request, make_model(0))
