"""Penalties and grammars in the engine, against plain forwards and reference implementations of both."""

import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import pytest
import torch

from headrace.inference.backend import InvalidRequest
from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.request import PENDING, Request
from headrace.inference.schema import PROCESSED, SamplingParams, StructuredOutputs
from headrace.inference.structured import _checked_grammar, grammar_of
from headrace.rollout.version import Version
from headrace.text.tokenizer import Tokenizer
from tests.inference.plain_forward import assert_nothing_left, plain_logits, random_prompt, run_all, weights_of
from tests.inference.serving import engine_of

EOS = 258
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def engines(model: Any, make_model: Any, directory: Path, **settings: Any) -> Iterator[Engine]:
    """The engine of CPUs, and where Triton interprets the one of GPUs."""
    yield engine_of(model, directory, **settings)
    if os.environ.get("TRITON_INTERPRET") == "1":
        from headrace.inference.embedded.cuda import rows
        from headrace.inference.embedded.cuda.runner import CudaRunner

        engine = engine_of(make_model(0), directory, **settings)
        sizes = {"max_running": engine.max_running, "max_model_len": engine.max_model_len}
        blocks = engine.scheduler.blocks.num_usable + 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rows, "EXTRA_PROGRAMS", 8)  # each is interpreted
            engine.runner = CudaRunner(engine.model, blocks, engine.adapters, **sizes, compile=False, graphs=False)
            yield engine


def reference_penalties(logits: torch.Tensor, prompt: list[int], sampled: list[int], params: SamplingParams) -> None:
    """vLLM's definition, one token at a time, in place."""
    for token in {*prompt, *sampled}:
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token, count in Counter(sampled).items():
        logits[token] -= params.frequency_penalty * count + params.presence_penalty


def assert_like_reference(request: Request, model: Any, tokenizer: Any = None, tolerance: float = 1e-4) -> None:
    """Check each sampled token's logprobs against plain logits, penalized and masked one by one."""
    params, result, prompt = request.params, request.future.result(), request.tokens[: request.prompt_length]
    rows = plain_logits(model, request.tokens)[request.prompt_length - 1 :]
    outputs = params.structured_outputs
    matcher = None if outputs is None else llguidance.LLMatcher(tokenizer, grammar_of(outputs))
    for place, (token, logits) in enumerate(zip(result.token_ids, rows, strict=True)):
        reference_penalties(logits, prompt, result.token_ids[:place], params)
        if matcher is not None:
            allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            logits[torch.from_numpy(allowed[: len(logits)] == 0)] = -torch.inf
            assert matcher.consume_token(token)
        expected = torch.log_softmax(logits / (params.temperature or 1), -1)
        assert result.logprobs[place] == pytest.approx(expected[token].item(), abs=tolerance)
        if params.temperature == 0:
            assert logits[token] == logits.max()
        if params.logprobs:
            assert result.top_logprobs is not None
            best = expected.topk(params.logprobs).values.tolist()
            assert [value for _, value in result.top_logprobs[place]] == pytest.approx(best, abs=tolerance)
    assert result.logprobs_mode == params.logprobs_mode


def test_penalties_are_those_of_the_reference(model: Any, make_model: Any, model_directory: Path) -> None:
    settings: list[dict[str, Any]] = [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.7, "temperature": 0},
        {"repetition_penalty": 1.8, "temperature": 0, "logprobs": 3},
        {"repetition_penalty": 0.6, "presence_penalty": -1.0, "frequency_penalty": 2.0, "temperature": 0.7, "seed": 3},
        {"frequency_penalty": -2.0, "top_p": 0.8, "logprobs": 2},
        {},
    ]
    for engine in engines(model, make_model, model_directory, max_running=3, max_step_tokens=32, kv_blocks=8):
        rng = random.Random(0)
        prompt = random_prompt(rng, 40)
        requests = [engine.submit(prompt, SamplingParams(max_tokens=14, ignore_eos=True, **each)) for each in settings]
        run_all(engine)
        for request in requests:
            assert_like_reference(request, engine.model)
        assert [request.future.result().logprobs_mode for request in requests] == [PROCESSED] * 5 + [None]
        assert_nothing_left(engine)
        assert engine.scheduler.preemptions


@pytest.mark.parametrize(
    ("outputs", "matches"),
    [
        ({"json": SCHEMA}, lambda text: set(json.loads(text)) == {"name", "age"}),
        ({"json": json.dumps(SCHEMA)}, lambda text: 0 <= json.loads(text)["age"] <= 99),
        ({"choice": ["yes", "no", "maybe so"]}, lambda text: text in ("yes", "no", "maybe so")),
        ({"regex": r"[0-9]{3}-[a-f]{2,9}"}, lambda text: text[3] == "-" and 6 <= len(text) <= 13),
        ({"grammar": 'start: "a" | "(" start ")" '}, lambda text: text.strip("()") == "a"),
    ],
    ids=["schema", "schema as text", "choice", "regex", "grammar"],
)
def test_completions_match_what_they_must(
    model: Any, make_model: Any, model_directory: Path, outputs: dict[str, Any], matches: Any
) -> None:
    tokenizer = Tokenizer(model_directory)
    vocabulary = llguidance.LLTokenizer(tokenizer.backend.to_str(), n_vocab=264, eos_token=[EOS])
    for engine in engines(model, make_model, model_directory, max_model_len=250, max_running=4):
        requests = [
            engine.submit(
                [7, 8, 9],
                SamplingParams(
                    structured_outputs=StructuredOutputs(**outputs), temperature=1.5, seed=seed, logprobs=top
                ),
            )
            for seed, top in enumerate([None, 2])
        ]
        free = engine.submit([7, 8, 9], SamplingParams(max_tokens=9, ignore_eos=True))
        run_all(engine)
        ended = [request for request in requests if request.future.result().finish_reason == "stop"]
        assert ended
        for request in ended:
            assert_like_reference(request, engine.model, vocabulary)
            text = tokenizer.decode(request.future.result().token_ids, skip_special_tokens=True)
            assert matches(text), text
        assert_like_reference(free, engine.model)


def test_with_a_grammar_the_next_step_is_launched_ahead_on_a_gpu_and_samples_the_same(
    model: Any, make_model: Any, model_directory: Path
) -> None:
    schema = StructuredOutputs(json=SCHEMA)
    kinds: list[dict[str, Any]] = [
        {"structured_outputs": schema},
        {"ignore_eos": True},
        {"structured_outputs": schema, "temperature": 1.5},
        {"structured_outputs": StructuredOutputs(choice=["yes", "no"]), "temperature": 0},
        {"ignore_eos": True, "temperature": 0},
    ]
    vocabulary = llguidance.LLTokenizer(Tokenizer(model_directory).backend.to_str(), n_vocab=264, eos_token=[EOS])
    results, launched_ahead = [], []
    for engine in engines(model, make_model, model_directory, max_model_len=64, max_running=4):
        params = [SamplingParams(seed=seed, max_tokens=20, **kinds[seed % len(kinds)]) for seed in range(8)]
        requests = [engine.submit([7 + place] * 5, each) for place, each in enumerate(params)]
        launched_ahead.append(0)
        while engine.has_work:
            engine.step()
            launched_ahead[-1] += any(request.tokens[-1] == PENDING for request in engine.scheduler.running)
            if engine.steps == 20:  # torch samples for all, from a step on that is launched ahead
                requests.append(engine.submit([9], SamplingParams(seed=9, logprobs=2, max_tokens=9, **kinds[0])))
        for request in requests:
            assert_like_reference(request, engine.model, vocabulary)
        results.append([(request.tokens, request.finish_reason) for request in requests])
        assert_nothing_left(engine)
    assert all(each == results[0] for each in results)
    assert launched_ahead[0] == 0 and all(count > 20 for count in launched_ahead[1:])


def test_a_grammar_survives_new_weights_preemption_and_stop_strings(
    model: Any, make_model: Any, model_directory: Path
) -> None:
    for engine in engines(model, make_model, model_directory, max_running=4, kv_blocks=10, eos_token_ids=()):
        outputs = StructuredOutputs(regex="(yes|no)(,(yes|no)){7}")
        requests = [
            engine.submit([9] * 30, SamplingParams(structured_outputs=outputs, presence_penalty=1.0, ignore_eos=True))
            for _ in range(4)
        ]
        cut = engine.submit([9], SamplingParams(structured_outputs=outputs, stop=[","]))
        for _ in range(12):
            engine.step()
        engine.install(weights_of(make_model(1), Version(0, 1)))
        run_all(engine)
        decode = Tokenizer(model_directory).decode
        for request in requests:
            result = request.future.result()
            assert [word in ("yes", "no") for word in decode(result.token_ids).split(",")] == [True] * 8
            assert [version for version, *_ in result.version_spans] == [Version(0, 0), Version(0, 1)]
        assert decode(cut.future.result().token_ids) in ("yes,", "no,")
        assert engine.scheduler.preemptions
        assert_nothing_left(engine)


@pytest.mark.parametrize(
    ("outputs", "key"),
    [
        ({}, "structured_outputs"),
        ({"regex": "a", "choice": ["b"]}, "structured_outputs"),
        ({"regex": "a("}, "structured_outputs.regex"),
        ({"json": {"type": "wrong"}}, "structured_outputs.json"),
        ({"json": "{"}, "structured_outputs.json"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"grammar": "start: ("}, "structured_outputs.grammar"),
        ({"regex": "a" * 70_000}, "structured_outputs.regex"),
    ],
)
def test_what_is_not_a_grammar_is_refused(outputs: dict[str, Any], key: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        grammar_of(StructuredOutputs(**outputs))
    assert refusal.value.key == key


def test_without_the_extra_the_refusal_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _checked_grammar.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(InvalidRequest) as refusal:
        grammar_of(StructuredOutputs(json_object=True))
    assert "headrace[structured]" in str(refusal.value.fix)
