"""Structured outputs on a GPU: masks after the graph, against plain forwards on a CPU and sampling by torch."""

import json
from pathlib import Path
from typing import Any

import llguidance
import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.grammar import Grammars
from headrace.inference.embedded.request import PENDING, Request
from headrace.inference.schema import SamplingParams, StructuredOutputs
from headrace.text.tokenizer import Tokenizer
from headrace.trainer.tiny import write_tiny_model
from tests.inference.test_logits_processing import SCHEMA, assert_like_reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PROMPT = [40, 41, 42]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_tiny_model(path)
    return path


def load(directory: Path, device: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device).eval()


def make_engine(directory: Path, device: str = "cuda", **settings: Any) -> Engine:
    model, tokenizer = load(directory, device), Tokenizer(directory)
    grammars = Grammars(tokenizer.backend, model.config.vocab_size, [tokenizer.eos_token_id])
    sizes = {"max_model_len": 200, "max_running": 40, "eos_token_ids": [tokenizer.eos_token_id]}
    return Engine(model, decode=tokenizer.decode, grammars=grammars, **sizes, **settings)


def run_all(engine: Engine) -> int:
    """Return how many steps were launched before the one before was read."""
    ahead = 0
    while engine.has_work:
        engine.step()
        ahead += any(request.tokens[-1] == PENDING for request in engine.scheduler.running)
    return ahead


@pytest.mark.parametrize("settings", [{}, {"compile": False}, {"compile": False, "graphs": False}], ids=str)
def test_mixed_requests_match_their_grammars_with_logprobs_of_the_masked_model(
    directory: Path, settings: dict[str, Any]
) -> None:
    engine, tokenizer = make_engine(directory, **settings), Tokenizer(directory)
    schema, regex = StructuredOutputs(json=SCHEMA), StructuredOutputs(regex="[0-9]{3}-[a-f]{2,9}")
    kinds: list[dict[str, Any]] = [
        {"structured_outputs": schema, "temperature": 1.5},
        {"structured_outputs": regex, "temperature": 0.7},
        {"ignore_eos": True, "max_tokens": 30},
        {"structured_outputs": regex, "temperature": 0},
    ]
    requests = [engine.submit(PROMPT, SamplingParams(**kinds[place % 4])) for place in range(100)]
    assert run_all(engine) > 50
    requests += [engine.submit(PROMPT, SamplingParams(logprobs=2, **kinds[place % 4])) for place in range(8)]
    requests += [engine.submit(PROMPT, SamplingParams(**kinds[place % 4])) for place in range(8)]
    run_all(engine)
    model = load(directory, "cpu")
    vocabulary = llguidance.LLTokenizer(
        tokenizer.backend.to_str(), n_vocab=model.config.vocab_size, eos_token=[tokenizer.eos_token_id]
    )
    for request in requests:
        assert_like_reference(request, model, vocabulary, tolerance=2e-3)
        if request.params.structured_outputs == schema and request.finish_reason == "stop":
            text = tokenizer.decode(request.future.result().token_ids, skip_special_tokens=True)
            assert set(json.loads(text)) == {"name", "age"}
    assert sum(request.finish_reason == "stop" for request in requests) > 70


def test_a_seed_samples_the_same_in_graphs_without_them_by_torch_and_on_a_cpu(directory: Path) -> None:
    def sampled(engine: Engine, **params: Any) -> list[list[int]]:
        outputs = StructuredOutputs(json=SCHEMA)
        requests: list[Request] = [
            engine.submit(PROMPT, SamplingParams(seed=seed, structured_outputs=outputs, temperature=1.5, **params))
            for seed in range(33)
        ]
        run_all(engine)
        return [request.tokens for request in requests]

    captured = sampled(make_engine(directory, compile=False))
    others = [
        sampled(make_engine(directory, compile=False, graphs=False)),
        sampled(make_engine(directory, compile=False), logprobs=1),
        sampled(make_engine(directory, "cpu")),
    ]
    for other in others:  # rounding may change a token whose uniform number is at a border
        assert sum(mine == its for mine, its in zip(captured, other, strict=True)) >= 31
