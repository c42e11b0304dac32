"""Fused layers compute what the model's own layers compute; unsupported layers are not fused."""

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from headrace.inference.embedded import batch as batch_module
from headrace.inference.embedded.cpu import kernels
from headrace.inference.embedded.cpu.layers import FusedLayer, fuse_layers
from headrace.inference.embedded.cpu.weight_layout import lay_out_for_small_batches
from headrace.inference.embedded.engine import Engine
from headrace.inference.schema import SamplingParams
from tests.inference.conftest import make_qwen3
from tests.inference.plain_forward import assert_like_plain, random_prompt, run_all
from tests.inference.test_engine_parity import ARCHITECTURES, SIZES

USUAL = ["qwen3", "qwen2", "qwen2, sliding", "llama", "mistral, sliding", "granite"]

pytestmark = pytest.mark.skipif(kernels.load_kernels() is None, reason="needs a C compiler")


def make(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_supported_layers_are_fused_and_others_are_not(architecture: str) -> None:
    model = make(ARCHITECTURES[architecture]())
    assert fuse_layers(model) is (architecture in USUAL)
    fused = [isinstance(module.forward, FusedLayer) for module in model.modules()]
    assert sum(fused) == (SIZES["num_hidden_layers"] if architecture in USUAL else 0)


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(**SIZES, hidden_act="gelu"),
        transformers.GraniteConfig(**SIZES, residual_multiplier=0.5),
        transformers.Qwen3Config(**SIZES, head_dim=16, dtype=torch.bfloat16),
        transformers.Ernie4_5Config(**SIZES, head_dim=16),
    ],
    ids=["another activation", "other residuals", "bfloat16", "another rotation"],
)
def test_layers_that_compute_something_else_keep_their_own_forward(config: Any) -> None:
    assert not fuse_layers(make(config))


def test_layers_with_hooks_or_a_changed_forward_are_not_fused() -> None:
    hooked, replaced = make_qwen3(0), make_qwen3(0)
    hooked.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    replaced.model.layers[0].input_layernorm.forward = lambda hidden: hidden
    assert not fuse_layers(hooked)
    assert not fuse_layers(replaced)


@pytest.mark.parametrize("narrow", [1, 24, 128])
def test_long_chunks_attend_in_groups_beside_single_tokens(narrow: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module, "MAX_SINGLE_CHUNK", narrow)
    model = make(ARCHITECTURES["mistral, sliding"]())
    engine = Engine(model, max_model_len=128, max_running=4)
    rng = random.Random(1)
    params = SamplingParams(max_tokens=9, ignore_eos=True, prompt_logprobs=0)
    requests = [engine.submit(random_prompt(rng, length), params) for length in (1, 2, 20, 31, 60, 100)]
    run_all(engine)
    for request in requests:
        assert_like_plain(request, model)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_batch_changes_no_bit_of_a_request_with_a_seed(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = make_qwen3(0)
        lay_out_for_small_batches(model)  # as stored, some CPUs multiply two rows in another order than many
        engine = Engine(model, max_model_len=512, max_running=64)
        rng = random.Random(2)
        prompts = [random_prompt(rng, length) for length in (1, 17, 40, 200)]
        params = SamplingParams(max_tokens=6, ignore_eos=True, seed=5)
        alone = []
        for prompt in prompts:
            alone.append(engine.submit(prompt, params))
            run_all(engine)
        for _ in range(12):
            engine.submit(random_prompt(rng, rng.randint(1, 300)), SamplingParams(max_tokens=10, ignore_eos=True))
        together = [engine.submit(prompt, params) for prompt in prompts]
        run_all(engine)
    finally:
        torch.set_num_threads(before)
    for one, other in zip(alone, together, strict=True):
        assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs)


def test_a_model_is_fused_once_and_computes_by_itself_what_it_did() -> None:
    plain = make_qwen3(0)
    model = copy.deepcopy(plain)
    assert fuse_layers(model)
    forwards = [module.forward for module in model.modules() if isinstance(module.forward, FusedLayer)]
    assert fuse_layers(model)
    assert forwards == [module.forward for module in model.modules() if isinstance(module.forward, FusedLayer)]
    ids = torch.arange(30)[None]
    with torch.inference_mode():
        assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)


def test_activations_are_exact_at_the_ends_of_the_exponential_and_keep_nan() -> None:
    gate = torch.tensor([[[float("nan"), -1e4, -200.0, -87.5, -1.0, 0.0, 1.0, 87.5, 200.0, 1e4]]])
    gated, ones = torch.empty_like(gate), torch.ones_like(gate)
    kernels.load_kernels().gate_with_silu(
        kernels.rows(gate), kernels.rows(ones), gated.data_ptr(), 1, gate.shape[-1], 1
    )
    torch.testing.assert_close(gated, torch.nn.functional.silu(gate), atol=1e-33, rtol=1e-6, equal_nan=True)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    kernels.load_kernels.cache_clear()
    yield tmp_path / "compiled/c"
    kernels.load_kernels.cache_clear()


def test_kernels_are_compiled_once_for_all_processes(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels.load_kernels() is not None
    (library,) = empty_cache.iterdir()
    kernels.load_kernels.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "_compile", lambda compiler: pytest.fail("compiled again"))
        assert kernels.load_kernels() is not None
    monkeypatch.setattr(kernels, "FLAGS", (*kernels.FLAGS, "-g"))
    kernels.load_kernels.cache_clear()
    assert kernels.load_kernels() is not None
    assert library.exists()
    assert len(list(empty_cache.iterdir())) == 2


def test_a_damaged_library_in_the_cache_is_compiled_again(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels.load_kernels() is not None
    (library,) = empty_cache.iterdir()
    whole = library.read_bytes()
    library.unlink()  # the file that is loaded stays as it is
    library.write_bytes(whole[:100] + bytes(len(whole) - 100))
    compiled, compile_again = [], kernels._compile
    monkeypatch.setattr(kernels, "_compile", lambda compiler: compiled.append(compiler) or compile_again(compiler))
    for _ in range(2):
        kernels.load_kernels.cache_clear()
        assert kernels.load_kernels() is not None
    assert len(compiled) == 1


def test_a_cache_directory_that_cannot_be_written_is_not_needed(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file"))
    assert kernels.load_kernels() is not None


def test_a_compiler_that_fails_is_followed_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "COMPILERS", ("false", *kernels.COMPILERS))
    kernels.load_kernels.cache_clear()
    assert fuse_layers(make_qwen3(0))


def test_without_a_compiler_layers_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels, "COMPILERS", ("no-such-compiler",))
    kernels.load_kernels.cache_clear()
    try:
        with caplog.at_level("INFO", kernels.__name__):
            assert not fuse_layers(make_qwen3(0))
        assert caplog.messages == ["layers are not fused: there is no C compiler"]
        monkeypatch.setattr(kernels, "COMPILERS", ("false",))
        kernels.load_kernels.cache_clear()
        assert not fuse_layers(make_qwen3(0))
        assert "false failed" in caplog.messages[-1]
    finally:
        kernels.load_kernels.cache_clear()
