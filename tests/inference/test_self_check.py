"""The self-check at load accepts right engines and refuses wrong ones, with logits as large as trained weights give."""

from typing import Any

import pytest
import torch
from benchmarks.inference.self_check import FAMILIES, FAULTS, make_sharp_model
from torch import nn

from headrace.inference import rounding
from headrace.inference.embedded import self_check
from headrace.inference.embedded.cpu.weight_layout import lay_out_for_small_batches
from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.self_check import (
    Text,
    UnsupportedModel,
    check_engine,
    compute_texts,
    measure_deviations,
    plain_logprobs,
)
from headrace.inference.rounding import MAX_ROUNDING_RATIO, WiderType, typical_difference
from tests.refusals import refused

TYPES = [torch.bfloat16, torch.float16, torch.float32]
TEXT = Text(list(range(5, 25)), [0.0] * 19, [])


def prompts(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_right_engines_of_every_family_are_accepted(family: str, dtype: torch.dtype) -> None:
    engine = Engine(make_sharp_model(family, 0, dtype), max_model_len=128)
    check_engine(engine)
    assert not engine.has_work


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(t, marks=() if t is torch.bfloat16 else pytest.mark.full) for t in TYPES],  # its rounding hides most
    ids=str,
)
@pytest.mark.parametrize(
    ("family", "fault"),
    [
        ("llama", "mask"),
        ("phi 3", "hidden keys"),
        ("qwen3", "positions"),
        ("llama", "decode positions"),
        ("qwen2", "biases"),
        ("gpt neox", "biases"),
        ("mistral", "window"),
        ("gemma 2", "window"),
        ("gemma 2", "soft-cap"),
        ("gemma 3", "window"),
        ("granite", "scaling"),
    ],
)
def test_engines_with_a_fault_are_refused(family: str, fault: str, dtype: torch.dtype) -> None:
    model = make_sharp_model(family, 0, dtype)
    with FAULTS[fault](model), refused(UnsupportedModel, key="model", value=type(model).__name__):
        check_engine(Engine(model, max_model_len=128, compile=False))


def test_a_fault_that_only_fused_layers_have_is_refused() -> None:
    model = make_sharp_model("qwen2", 0, torch.float32)
    with FAULTS["biases"](model), refused(UnsupportedModel, key="model", value="Qwen2ForCausalLM"):
        check_engine(Engine(model, max_model_len=128))


def test_a_fault_of_decode_alone_is_not_one_of_prefill() -> None:
    model = make_sharp_model("llama", 0, torch.bfloat16)
    with FAULTS["decode positions"](model):
        texts = compute_texts(Engine(model, max_model_len=128, compile=False), prompts())
    ratios = {deviation.phase: deviation.ratio for deviation in measure_deviations(model, texts)}
    assert ratios["prefill"] <= MAX_ROUNDING_RATIO < ratios["decode"]


def test_logprobs_that_are_not_numbers_are_refused() -> None:
    model = make_sharp_model("llama", 0, torch.float32)
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(torch.nan)
    with refused(UnsupportedModel, key="model", value="LlamaForCausalLM"):
        check_engine(Engine(model, max_model_len=128))


@pytest.mark.parametrize("longest", [2, 13, 30, 70])
def test_prompts_fit_into_short_contexts(longest: int) -> None:
    engine = Engine(make_sharp_model("mistral", 0, torch.bfloat16), max_model_len=longest)
    check_engine(engine)
    assert max(len(text.tokens) for text in compute_texts(engine, prompts())) <= longest


def test_the_longest_prompt_exceeds_the_window_only_where_that_is_cheap() -> None:
    model = make_sharp_model("mistral", 0, torch.float32)
    engine = Engine(model, max_model_len=2048, max_running=1)
    assert len(compute_texts(engine, prompts())[0].tokens) == 60 + 40 + 12
    model.config.sliding_window = 1025
    assert len(compute_texts(engine, prompts())[0].tokens) == 40 + 12


def test_a_rare_outlier_of_rounding_is_forgiven_and_a_repeated_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(make_sharp_model("llama", 0, torch.bfloat16), max_model_len=128)
    deviating = [self_check.Deviation("decode", 1.0, 0.1)]
    measured = [deviating, deviating, []]
    monkeypatch.setattr(self_check, "measure_deviations", lambda *_: measured.pop(0))
    check_engine(engine)
    measured += [deviating] * 3
    with refused(UnsupportedModel, key="model"):
        check_engine(engine)


def test_one_large_difference_among_many_counts_little() -> None:
    values = torch.full((36,), 0.01, dtype=torch.float64)
    outlier = values.clone()
    outlier[3] = 1.0
    assert typical_difference(values, torch.zeros(36)) == pytest.approx(0.01)
    assert typical_difference(outlier, torch.zeros(36)) == pytest.approx(((35 * 0.1 + 1) / 36) ** 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_wider_type_computes_what_a_converted_model_computes(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "MAX_WIDENED_ENTRIES", 1000)  # weights are converted in several parts
    model = make_sharp_model(family, 0, torch.bfloat16)
    with WiderType(torch.bfloat16):
        wider = plain_logprobs(model, [TEXT])
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(wider, plain_logprobs(model.float(), [TEXT]), atol=1e-4, rtol=0)


def test_float32_is_widened_too_and_without_the_layout_for_speed() -> None:
    model = make_sharp_model("qwen2", 0, torch.float32)
    plain = plain_logprobs(model, [TEXT])
    lay_out_for_small_batches(model)
    forwards = {module: vars(module).get("forward") for module in model.modules() if isinstance(module, nn.Linear)}
    assert any(forwards.values())
    with WiderType(torch.float32):
        wider = plain_logprobs(model, [TEXT])
    assert {module: vars(module).get("forward") for module in forwards} == forwards
    assert 0 < (wider - plain).abs().max() < 1e-4


def test_the_model_is_left_as_it_was() -> None:
    model = make_sharp_model("qwen3, experts", 0, torch.bfloat16)
    engine = Engine(model, max_model_len=64)
    before = model.config._attn_implementation, model.config._experts_implementation
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    check_engine(engine)
    assert (model.config._attn_implementation, model.config._experts_implementation) == before
    after: dict[str, Any] = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in weights.items())
