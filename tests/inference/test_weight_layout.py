"""The layout of weights on a CPU does not change what a model computes."""

import copy
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from headrace.inference.embedded.cpu import kernels, weight_layout
from headrace.inference.embedded.cpu.weight_layout import lay_out_for_small_batches
from tests.inference.conftest import make_qwen3

needs_kernels = pytest.mark.skipif(kernels.load_kernels() is None, reason="needs a C compiler")


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


@pytest.fixture(params=["panels", "columns"])
def _layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "columns":
        monkeypatch.setattr(weight_layout, "load_kernels", lambda: None)
    elif kernels.load_kernels() is None:
        pytest.skip("needs a C compiler")


@pytest.mark.usefixtures("_layout")
@pytest.mark.parametrize("make", [lambda: make_qwen3(0), make_qwen2])
def test_a_model_gives_the_same_logits_before_and_after_new_weights(make: type) -> None:
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


@needs_kernels
def test_layers_with_one_input_are_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    products = []
    in_panels = weight_layout._in_panels

    def recorded(weight: torch.Tensor, bias: torch.Tensor | None) -> weight_layout.Product:
        multiply = in_panels(weight, bias)
        return lambda hidden: products.append(hidden.shape[-1]) or multiply(hidden)

    monkeypatch.setattr(weight_layout, "_in_panels", recorded)
    model = make_qwen2()
    lay_out_for_small_batches(model)
    logits(model, 5)
    # Of each of two layers: queries with keys and values, output, gate with up, down. Then the head.
    assert products == [48, 48, 48, 80] * 2 + [48]


@pytest.mark.usefixtures("_layout")
def test_changing_an_output_in_place_does_not_affect_layers_with_the_same_input() -> None:
    """Adapters add their part that way."""

    def add_one(_: torch.nn.Module, __: object, output: torch.Tensor) -> None:
        output[0].add_(1.0)

    plain, model = make_qwen2(), make_qwen2()
    lay_out_for_small_batches(model)
    for each in (plain, model):
        each.model.layers[0].self_attn.k_proj.register_forward_hook(add_one)
    torch.testing.assert_close(logits(model, 9), logits(plain, 9), atol=2e-4, rtol=1e-5)


@needs_kernels
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("width", "depth"), [(1, 7), (33, 600), (100, 48), (768, 128), (256, 1500)])
def test_no_bit_of_a_row_depends_on_rows_beside_it_or_on_threads(
    width: int, depth: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    weight, hidden = torch.randn(width, depth), torch.randn(1, 300, depth)
    added = torch.randn(width) if bias else None
    multiply = weight_layout._in_panels(weight, added)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    alone = torch.cat([multiply(hidden[:, row : row + 1]) for row in range(300)], 1)
    torch.testing.assert_close(alone, torch.nn.functional.linear(hidden, weight, added), atol=1e-3, rtol=1e-4)
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        for rows in (2, 11, 12, 13, 31, 64, 97, 300):
            assert torch.equal(multiply(hidden[:, -rows:]), alone[:, -rows:]), (threads, rows)


@needs_kernels
def test_products_of_several_callers_share_the_thread_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    torch.manual_seed(0)
    multiply = weight_layout._in_panels(torch.randn(512, 128), None)
    inputs = [torch.randn(1, 40 + number, 128) for number in range(4)]
    wanted = [multiply(each) for each in inputs]

    def repeat(number: int) -> bool:
        return all(torch.equal(multiply(inputs[number]), wanted[number]) for _ in range(200))

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(repeat, range(4)))


@needs_kernels
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_a_thread_pool_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    hidden = torch.ones(1, 64, 128)
    multiply = weight_layout._in_panels(torch.ones(512, 128), None)
    assert multiply(hidden).unique().tolist() == [128.0]
    child = os.fork()
    if not child:
        signal.alarm(30)  # ends a child that waits for helpers of its parent
        products = [multiply(hidden)[0, 0, 0].item() for _ in range(20)]
        os._exit(0 if products == [128.0] * 20 else 1)
    assert os.waitpid(child, 0)[1] == 0
