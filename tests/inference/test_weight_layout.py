"""The layout of weights on a CPU does not change what a model computes."""

import copy

import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from headrace.inference.embedded.cpu import weight_layout
from headrace.inference.embedded.cpu.weight_layout import lay_out_for_small_batches
from tests.inference.conftest import make_qwen3

NEVER = 1 << 60


def make_qwen2() -> PreTrainedModel:
    """With biases, and a head of its own."""
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=96,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        tie_word_embeddings=False,
        initializer_range=0.25,
    )
    model = Qwen2ForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.25)
    return model


def logits(model: PreTrainedModel, tokens: int) -> torch.Tensor:
    ids = torch.arange(tokens)[None] % 90
    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("packed_from", [0, NEVER])
@pytest.mark.parametrize("make", [lambda: make_qwen3(0), make_qwen2])
def test_a_model_gives_the_same_logits_before_and_after_new_weights(
    make: type, packed_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_layout, "MIN_PACKED_ENTRIES", packed_from)
    plain = make()
    model = copy.deepcopy(plain)
    lay_out_for_small_batches(model)
    for change in (0.0, 0.1, -0.2):
        with torch.no_grad():
            for one, other in zip(plain.parameters(), model.parameters(), strict=True):
                one.add_(change)
                other.add_(change)
        for tokens in (1, 2, 31, 64):
            torch.testing.assert_close(logits(model, tokens), logits(plain, tokens), atol=2e-4, rtol=1e-5)


def test_layers_with_one_input_are_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    products = []
    multiply = weight_layout._multiply_packed
    monkeypatch.setattr(weight_layout, "MIN_PACKED_ENTRIES", 0)
    monkeypatch.setattr(
        weight_layout, "_multiply_packed", lambda h, w, b: products.append(h.shape[-1]) or multiply(h, w, b)
    )
    model = make_qwen2()
    lay_out_for_small_batches(model)
    logits(model, 5)
    # Of each of two layers: queries with keys and values, output, gate with up, down. Then the head.
    assert products == [48, 48, 48, 80] * 2 + [48]


def test_changing_an_output_in_place_does_not_affect_layers_with_the_same_input(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Adapters add their part that way."""

    def add_one(_: torch.nn.Module, __: object, output: torch.Tensor) -> None:
        output[0].add_(1.0)

    monkeypatch.setattr(weight_layout, "MIN_PACKED_ENTRIES", 0)
    plain, model = make_qwen2(), make_qwen2()
    lay_out_for_small_batches(model)
    for each in (plain, model):
        each.model.layers[0].self_attn.k_proj.register_forward_hook(add_one)
    torch.testing.assert_close(logits(model, 9), logits(plain, 9), atol=2e-4, rtol=1e-5)
