"""The embedded engine on a GPU against plain forwards: with and without graphs and compiled layers."""

import random
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from headrace.inference.backend import RequestCancelled
from headrace.inference.embedded import scheduler as scheduler_module
from headrace.inference.embedded.cuda import weight_copies
from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.projections import join_projections, separate_projections
from headrace.inference.rounding import MAX_ROUNDING_RATIO, WiderType, typical_difference
from headrace.inference.schema import SamplingParams
from headrace.inference.weights.buffers import copy_tensors
from headrace.inference.weights.published import PublishedWeights
from headrace.rollout.version import Version

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SIZES = {
    "vocab_size": 997,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, Any] = {
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=32),
    "qwen2, sliding": lambda: transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=50, max_window_layers=1
    ),
    "mistral, sliding": lambda: transformers.MistralConfig(**SIZES, sliding_window=40),
    "gemma 2, sliding and capped": lambda: transformers.Gemma2Config(**SIZES, head_dim=32, sliding_window=30),
    "llama": lambda: transformers.LlamaConfig(**SIZES),
}


SLEEP_CYCLES = 10_000_000
"""About five milliseconds."""
FLOAT32_ROUNDING = 1e-5
"""Of logprobs that are about 10, in steps of 1e-6: the model's own code may happen to round less."""


def make_plain_model(kind: str = "qwen3", seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=dtype).cuda().eval()


def make_model(kind: str = "qwen3", seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A model as it is loaded for an engine on a GPU."""
    model = make_plain_model(kind, seed, dtype)
    join_projections(model)
    return model


def make_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, 990) for _ in range(length)]


def run_all(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


@torch.no_grad()
def plain_logprobs(model: Any, tokens: list[int], temperature: float) -> torch.Tensor:
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    ids = torch.tensor([tokens], device="cuda")
    with separate_projections(model):
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].double()
    model.set_attn_implementation(before)
    return torch.log_softmax(logits / (temperature or 1.0), -1).gather(-1, ids[0, 1:, None])[:, 0].cpu()


def compared_logprobs(request: Any, models: dict[Version, Any]) -> torch.Tensor:
    """[3, token]: every logprob that the request was given; by the model's own code; the same in a wider type.

    Of the version that sampled it.
    """
    result = request.future.result(timeout=0)
    found = []
    for version, start, end in result.version_spans:
        model = models[version]
        plain = plain_logprobs(model, request.tokens, request.params.temperature)
        with WiderType(model.dtype):
            exact = plain_logprobs(model, request.tokens, request.params.temperature)
        both = torch.stack([plain, exact])
        ours = torch.tensor(result.logprobs[start:end], dtype=torch.float64)
        found.append(torch.cat([ours[None], both[:, request.prompt_length - 1 :][:, start:end]]))
        if start == 0 and result.prompt_logprobs is not None:
            ours = torch.tensor(result.prompt_logprobs[1:], dtype=torch.float64)
            found.append(torch.cat([ours[None], both[:, : request.prompt_length - 1]]))
    return torch.cat(found, 1)


def largest_difference(first: torch.Tensor, second: torch.Tensor) -> float:
    return (first - second).abs().max().item()


def assert_exact(requests: list[Any], models: dict[Version, Any] | Any) -> None:
    """The engine is not farther from the result in a wider type than rounding explains, typically and at most."""
    versions = models if isinstance(models, dict) else {Version(0, 0): models}
    ours, plain, exact = torch.cat([compared_logprobs(request, versions) for request in requests], 1)
    for measure in (typical_difference, largest_difference):
        bound = MAX_ROUNDING_RATIO * (measure(plain, exact) + FLOAT32_ROUNDING)
        assert measure(ours, exact) < bound, (measure(ours, exact), measure(plain, exact))


def submit_mixed(engine: Engine, rng: random.Random, count: int) -> list[Any]:
    text = make_prompt(rng, 300)
    requests: list[Any] = []
    for _ in range(count):
        params = SamplingParams(
            temperature=rng.choice([0, 0.7, 1.0]),
            max_tokens=rng.choice([1, 5, 40]),
            prompt_logprobs=rng.choice([None, None, 0]),
            seed=rng.choice([None, None, 1]),
            top_p=rng.choice([1.0, 1.0, 0.9]),
            logprobs=rng.choice([None, None, 3]),
            ignore_eos=True,
        )
        length = rng.choice([1, 2, 16, 25, 100, 290])
        prompt = text[:length] if rng.random() < 0.5 else make_prompt(rng, length)
        requests += [engine.submit(prompt, params) for _ in range(rng.choice([1, 1, 3]))]
        for _ in range(rng.choice([0, 1, 3])):
            engine.step()
    return requests


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_mixed_lengths_chunks_prefixes_duplicates_evictions_and_cancels(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "CHUNK_TOKENS", 64)
    model = make_model(kind, dtype=dtype)
    engine = Engine(model, max_model_len=400, max_running=9, max_step_tokens=128, kv_blocks=40, compile=False)
    requests = submit_mixed(engine, random.Random(8), 24)
    cancelled = requests.pop()
    engine.cancel(cancelled)
    run_all(engine)
    assert isinstance(cancelled.future.exception(), RequestCancelled)
    assert_exact(requests, model)
    assert min(engine.scheduler.preemptions, engine.scheduler.tokens_cached) > 0
    assert engine.scheduler.blocks.num_free == engine.scheduler.blocks.num_usable


@pytest.mark.parametrize("kind", ["qwen3", "qwen2, sliding"])
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_compiled_layers_compute_the_same(kind: str, graphs: bool, dtype: torch.dtype) -> None:
    model = make_model(kind, dtype=dtype)
    engine = Engine(model, max_model_len=400, max_running=9, max_step_tokens=128, kv_blocks=60, graphs=graphs)
    assert engine.runner._layers is not None  # type: ignore[attr-defined]
    requests = submit_mixed(engine, random.Random(3), 16)
    run_all(engine)
    assert_exact(requests, model)


def test_graphs_choose_what_is_chosen_without_them() -> None:
    def sampled(**settings: Any) -> list[list[int]]:
        engine = Engine(make_model(), max_model_len=256, max_running=40, **settings)
        rng = random.Random(1)
        requests = [
            engine.submit(make_prompt(rng, 20 + n), SamplingParams(max_tokens=60, seed=n, ignore_eos=True))
            for n in range(33)
        ]
        run_all(engine)
        return [request.tokens for request in requests]

    captured = sampled(compile=False)
    assert captured == sampled(compile=False)  # again, to the bit
    plain = sampled(compile=False, graphs=False)
    assert sum(mine == other for mine, other in zip(captured, plain, strict=True)) >= 31


@pytest.mark.parametrize("kv_on_update", ["recompute", "keep"])
def test_new_weights_are_used_from_the_next_token_on(kv_on_update: Any) -> None:
    models = {Version(0, step): make_model(seed=step) for step in range(3)}
    engine = Engine(make_model(), max_model_len=256, max_running=8, kv_on_update=kv_on_update, compile=False)
    rng = random.Random(2)
    requests = []
    for step in range(3):
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        requests += [engine.submit(make_prompt(rng, length), params) for length in (5, 70)]
        for _ in range(6):
            engine.step()
        if step:
            tensors = {name: tensor.clone() for name, tensor in models[Version(0, step)].state_dict().items()}
            engine.install(PublishedWeights(Version(0, step), "", tensors))
    last = engine.submit(make_prompt(rng, 40), params)
    run_all(engine)
    assert [span[0].step for span in requests[0].future.result().version_spans] == [0, 1, 2]
    if kv_on_update == "recompute":
        assert_exact(requests, models)
    assert_exact([last], models)


@pytest.mark.parametrize("compile", [True, False])
def test_each_step_uses_one_version_while_weights_are_copied_beside_it(
    compile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps and copies begin late, so that one that does not wait for another comes before it."""
    steps = torch.cuda.current_stream()
    late_copies = 0

    def copy_late(pairs: Any) -> Any:
        nonlocal late_copies
        if torch.cuda.current_stream() != steps:
            torch.cuda._sleep(SLEEP_CYCLES)
            late_copies += 1
        return copy_tensors(pairs)

    monkeypatch.setattr(weight_copies, "MIN_BYTES", 0)
    monkeypatch.setattr(weight_copies, "copy_tensors", copy_late)
    models = [make_plain_model(seed=seed) for seed in range(2)]
    versions = {Version(0, step): models[step % 2] for step in range(30)}
    engine = Engine(make_model(), max_model_len=256, max_running=8, compile=compile)
    rng = random.Random(6)
    requests = [
        engine.submit(make_prompt(rng, length), SamplingParams(max_tokens=100, ignore_eos=True)) for length in (5, 70)
    ]
    for step, version in enumerate(versions):
        if step:
            engine.install(PublishedWeights(version, "", models[step % 2].state_dict()))
        if step % 3 == 0:  # with a prefill beside the graph
            params = SamplingParams(max_tokens=7, ignore_eos=True, prompt_logprobs=0)
            requests.append(engine.submit(make_prompt(rng, 20), params))
        for _ in range(rng.choice([1, 2, 4])):
            torch.cuda._sleep(SLEEP_CYCLES)
            engine.step()
    run_all(engine)
    assert late_copies == 2 * (len(versions) - 1)
    assert_exact(requests, versions)


def test_a_restored_cache_works_with_the_same_graphs() -> None:
    model = make_model()
    engine = Engine(model, max_model_len=256, max_running=8, compile=False)
    rng = random.Random(3)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    requests = [engine.submit(make_prompt(rng, length), params) for length in (3, 50, 120)]
    for _ in range(10):
        engine.step()
    free = torch.cuda.mem_get_info()[0]
    assert engine.release_cache() == engine.runner.cache_bytes > 0
    assert torch.cuda.mem_get_info()[0] > free
    engine.runner.restore()
    run_all(engine)
    assert_exact(requests, model)


def test_nan_logits_fail_only_their_request() -> None:
    marked = 995
    model = make_model()
    model.get_input_embeddings().register_forward_hook(
        lambda _, args, output: output.masked_fill((args[0] == marked)[..., None], torch.nan)
    )
    engine = Engine(model, max_model_len=256, max_running=8, compile=False)
    rng = random.Random(4)
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0)  # does not sample the token by chance
    prompts = [make_prompt(rng, 30) for _ in range(6)]
    prompts[2][10] = marked
    requests = [engine.submit(prompt, params) for prompt in prompts]
    for _ in range(4):
        engine.step()
    engine.finish_step()
    requests[4].tokens[-1] = marked
    run_all(engine)
    ended = [request.future.exception() is not None for request in requests]
    assert ended == [False, False, True, False, True, False]
    assert_exact([request for request in requests if request.future.exception() is None], model)
    later = engine.submit(prompts[0], params)  # in blocks that the others had
    run_all(engine)
    assert_exact([later], model)


@pytest.mark.parametrize("compile", [True, False])
def test_an_adapters_requests_run_beside_captured_ones(tmp_path: Any, compile: bool) -> None:
    peft = pytest.importorskip("peft")
    directory = tmp_path / "adapter"
    torch.manual_seed(5)
    adapted = peft.get_peft_model(make_plain_model(), peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(directory)
    model = make_model()
    engine = Engine(model, max_model_len=128, max_running=8, compile=compile)
    engine.adapters.add(engine.adapters.read("a", directory))
    rng = random.Random(5)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    plain = [engine.submit(make_prompt(rng, 20), params) for _ in range(3)]
    with_adapter = [engine.submit(make_prompt(rng, 20), params, adapter="a") for _ in range(2)]
    run_all(engine)
    assert_exact(plain, make_model())  # the engine's own has the adapter's hooks
    assert_exact(with_adapter, adapted.merge_and_unload())
