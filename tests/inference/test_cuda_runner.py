"""The CUDA runner on a CPU through Triton's interpreter: all but graphs and compiled layers."""

import itertools
import math
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from headrace.inference.backend import EngineError, RequestCancelled
from headrace.inference.embedded import drafts
from headrace.inference.embedded import scheduler as scheduler_module
from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.request import PENDING
from headrace.inference.embedded.self_check import check_engine
from headrace.inference.schema import LatentParams, SamplingParams
from headrace.rollout.version import Version
from headrace.transport.adapter import Adapter, write_adapter
from tests.inference.plain_forward import assert_like_plain, assert_nothing_left, random_prompt, run_all, weights_of
from tests.inference.test_latents import NEVER, SOFT, assert_like_formulas, model_for
from tests.inference.test_named_adapters import CONFIG, adapted, matrices

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton does not interpret; tests/gpu has the same on a GPU", allow_module_level=True)

from headrace.inference.embedded.cuda import make_cuda_runner, rows, runner, steps
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
        engine.scheduler.blocks.num_usable + 1,
        engine.adapters,
        max_running=engine.max_running,
        max_model_len=engine.max_model_len,
        compile=False,
        graphs=False,
    )
    return engine


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "CHUNK_TOKENS", 16)
    monkeypatch.setattr(rows, "EXTRA_PROGRAMS", 8)
    monkeypatch.setattr(rows, "MIN_ITEM_KEYS", 64)
    monkeypatch.setattr(drafts, "PAUSE_STEPS", 0)


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


def test_steps_launched_ahead_are_exact_and_end_at_stop_tokens(model: Any) -> None:
    engine = make_engine(model, max_model_len=80, max_running=4, eos_token_ids=range(40))
    rng = random.Random(0)
    text = random_prompt(rng, 70)
    requests = [engine.submit(text[:length], SamplingParams(max_tokens=9)) for length in (33, 33, 5, 16, 16, 47, 1)]
    launched_ahead = 0
    while engine.has_work:
        engine.step()
        launched_ahead += any(request.tokens[-1] == PENDING for request in engine.scheduler.running)
        if launched_ahead == 3:
            engine.cancel(requests[2])
    assert launched_ahead > 5
    assert isinstance(requests.pop(2).future.exception(), RequestCancelled)
    for request in requests:
        assert_like_plain(request, model)
        *others, last = request.future.result().token_ids
        assert min(others, default=40) >= 40 and (last < 40 or len(others) == 8)
    assert {request.finish_reason for request in requests} == {"stop", "length"}
    assert engine.scheduler.tokens_cached > 0
    assert_nothing_left(engine)


def test_a_block_filled_by_tokens_in_flight_is_found_by_the_next_turn(model: Any) -> None:
    engine = make_engine(model, max_model_len=80, max_running=2)
    first = engine.submit([5] * 10, SamplingParams(max_tokens=30, ignore_eos=True))
    run_all(engine)
    second = engine.submit([*first.tokens, 7, 8, 9], SamplingParams(max_tokens=3))
    run_all(engine)
    assert second.cached_tokens == 32  # of 40 tokens, of which the last one was never computed
    assert_like_plain(second, model)


def test_drafts_change_the_number_of_steps_and_nothing_else(model: Any, make_model: Any) -> None:
    prompt = [5] * 10

    def run(model: Any, speculative_tokens: int) -> tuple[Engine, list[Any]]:
        sizes = {"max_model_len": 80, "max_running": 16, "eos_token_ids": range(8)}
        engine = make_engine(model, **sizes, speculative_tokens=speculative_tokens)
        requests = [engine.submit(prompt, SamplingParams(max_tokens=24, seed=seed)) for seed in (0, 1)]
        run_all(engine)
        engine.reset_counters()
        # One that samples what its sibling did, one that soon differs, and one with another end.
        requests.append(engine.submit(prompt, SamplingParams(max_tokens=24, seed=0)))
        requests.append(engine.submit(prompt, SamplingParams(max_tokens=24, temperature=0)))
        requests.append(engine.submit(prompt, SamplingParams(max_tokens=13, seed=1)))
        run_all(engine)
        return engine, requests

    plain, expected = run(model, 0)
    drafting, requests = run(make_model(0), 6)
    assert [request.tokens for request in requests] == [request.tokens for request in expected]
    assert [request.finish_reason for request in requests] == [request.finish_reason for request in expected]
    for request in requests:
        assert_like_plain(request, make_model(0))
    assert drafting.steps < plain.steps
    assert 10 < drafting.tokens_accepted <= drafting.tokens_drafted
    assert drafting.tokens_sampled == plain.tokens_sampled
    assert_nothing_left(drafting)


def test_drafts_leave_the_distribution_of_sequences_as_it_is(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chi-square over all sequences of five tokens, with a table of probabilities in the place of the model: 5.5
    standard deviations are one false alarm in 50 million. Drafts have up to three tokens."""
    vocab, length, count, prompt = 3, 5, 16_000, [0, 1, 2, 1]
    table = torch.tensor([[0.1, 0.7, 0.2], [0.2, 0.1, 0.7], [0.7, 0.2, 0.1]], dtype=torch.float64)

    def compute(runner: CudaRunner, shape: Any) -> torch.Tensor:
        rows = min(shape.tokens, runner._rows.count)
        inputs, sampled = runner._rows.inputs, runner._sampled
        sources = inputs.sources[:rows]
        ids = torch.where(sources >= 0, sampled[0][sources].long(), inputs.ids[:rows])
        cumulated = table.cumsum(1)[ids, :-1]
        sampled[0, :rows] = (inputs.uniforms[:rows, None] > cumulated).sum(1).double()
        return torch.zeros(rows, 1)

    monkeypatch.setattr(CudaRunner, "_compute", compute)
    engine = make_engine(model, max_model_len=32, max_running=64, speculative_tokens=4)
    observed: Counter[tuple[int, ...]] = Counter()
    for _ in range(count // 16):
        requests = [engine.submit(prompt, SamplingParams(max_tokens=length, ignore_eos=True)) for _ in range(16)]
        run_all(engine)
        observed.update(tuple(request.tokens[len(prompt) :]) for request in requests)
    assert engine.tokens_accepted > count / 20
    every = [*itertools.product(range(vocab), repeat=length)]
    chances = [math.prod(table[pair].item() for pair in itertools.pairwise([prompt[-1], *each])) for each in every]
    expected = count * torch.tensor(chances, dtype=torch.float64)
    counts = torch.tensor([float(observed[each]) for each in every], dtype=torch.float64)
    is_rare = expected < 5  # joined to one cell
    counts, expected = (torch.cat([each[~is_rare], each[is_rare].sum()[None]]) for each in (counts, expected))
    freedom = len(counts) - 1
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert abs(chi_square - freedom) < 5.5 * (2 * freedom) ** 0.5, (chi_square, freedom)


def test_blocks_filled_by_drafts_are_found_by_the_next_turn(model: Any) -> None:
    engine = make_engine(model, max_model_len=80, max_running=16, speculative_tokens=6)
    for _ in range(2):
        engine.scheduler.blocks.evict_all()
        turn = engine.submit([5] * 10, SamplingParams(max_tokens=30, ignore_eos=True, seed=0))
        run_all(engine)
    assert engine.tokens_accepted > 15  # the second one samples what the first did
    following = engine.submit([*turn.tokens, 7, 8, 9], SamplingParams(max_tokens=3))
    run_all(engine)
    assert following.cached_tokens == 32  # of 40 tokens, of which the last one was never computed
    assert_like_plain(following, model)


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


def test_nan_logits_fail_only_their_request(model: Any, make_model: Any) -> None:
    engine = make_engine(model, max_model_len=64, max_running=4)
    with torch.no_grad():
        model.model.embed_tokens.weight[200] = torch.nan  # tied: it is a row of the logits as well
    requests = [engine.submit([5, 6, 7], SamplingParams(max_tokens=3)), engine.submit([5, 200], SamplingParams())]
    run_all(engine)
    assert all(isinstance(request.future.exception(), EngineError) for request in requests)
    assert_nothing_left(engine)


def test_a_request_that_fails_leaves_others_exact(model: Any, make_model: Any) -> None:
    engine = make_engine(model, max_model_len=64, max_running=4)
    requests = [engine.submit([5 + n, 6, 7], SamplingParams(max_tokens=6, ignore_eos=True)) for n in range(3)]
    engine.step()
    engine.finish_step()
    requests[1].tokens[-1] = 10_000  # no such token
    run_all(engine)
    assert requests[1].future.exception() is not None
    for request in (requests[0], requests[2]):
        assert_like_plain(request, make_model(0))


def test_decode_does_not_use_the_adapter_of_a_prefill(make_model: Any, tmp_path: Path) -> None:
    layers = matrices(make_model(0), seed=3)
    write_adapter(tmp_path / "adapter", Adapter(CONFIG, layers))
    engine = make_engine(make_model(0), max_model_len=32, max_running=8)
    engine.adapters.add(engine.adapters.read("wheel", tmp_path / "adapter"))
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    plain = [engine.submit([7, 8, 9], params)]
    engine.step()
    changed = [engine.submit([5, 6], params, adapter="wheel")]  # as many tokens as the smallest batch has rows
    engine.step()
    plain += [engine.submit([10 + n, 11], params) for n in range(3)]
    engine.step()
    changed.append(engine.submit([5, 6, 4], params, adapter="wheel"))
    run_all(engine)
    for request in plain:
        assert_like_plain(request, make_model(0))
    for request in changed:
        assert_like_plain(request, adapted(make_model(0), layers))


def plain_varlen(query: Any, key: Any, value: Any, *begins: Any, scale: float, window_size: Any, **_: Any) -> Any:
    """What torch's kernel computes, sequence by sequence; it has none for CPUs."""
    query_begins, key_begins, longest_query, longest_key = begins
    shared = query.shape[1] // key.shape[1]
    parts = []
    for row in range(len(query_begins) - 1):
        q = query[query_begins[row] : query_begins[row + 1]]
        k, v = (s[key_begins[row] : key_begins[row + 1]].repeat_interleave(shared, 1) for s in (key, value))
        assert len(q) <= longest_query and len(k) <= longest_key
        places, keys = torch.arange(len(k) - len(q), len(k))[:, None], torch.arange(len(k))
        visible = (keys <= places) & ((keys >= places - window_size[0]) | (window_size[0] < 0))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v))
    assert key_begins[-1] == len(key)
    return torch.cat(parts)


@pytest.mark.parametrize(("most", "calls"), [(100, 4), (1 << 17, 1)])
def test_prompts_that_begin_in_the_cache_read_no_more_keys_at_once_than_they_may(
    make_model: Any, monkeypatch: pytest.MonkeyPatch, most: int, calls: int
) -> None:
    read: list[int] = []

    def attend(query: Any, key: Any, *rest: Any, **options: Any) -> Any:
        read.append(len(key))
        return plain_varlen(query, key, *rest, **options)

    monkeypatch.setattr(steps, "varlen_attn", attend)
    monkeypatch.setattr(steps, "MAX_GATHERED_KEYS", most)
    monkeypatch.setattr(runner, "MAX_PREFILLS", 0)  # a forward of their own, as long prompts have
    engine = make_engine(make_model(0), max_model_len=160, max_running=8)
    engine.runner._flash = True  # type: ignore[attr-defined]
    beginning = [7 + n % 50 for n in range(32)]
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    requests = [engine.submit([*beginning, 1], params)]
    run_all(engine)
    read.clear()
    requests += [engine.submit([*beginning, *range(3, 3 + length)], params) for length in (8, 100, 9, 10, 48)]
    engine.step()
    assert len(read) == 2 * calls  # of two layers
    assert sum(read) == 2 * (5 * 32 + 8 + 100 + 9 + 10 + 48)
    run_all(engine)
    for request in requests:
        assert_like_plain(request, make_model(0))


def test_a_model_that_the_cuda_runner_does_not_support_is_left_unchanged(caplog: pytest.LogCaptureFixture) -> None:
    sizes = {**SIZES, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1}
    model = AutoModelForCausalLM.from_config(transformers.GptOssConfig(**sizes)).eval()
    engine = Engine(model, max_model_len=64)
    settings = {"max_running": 4, "max_model_len": 64, "compile": False, "graphs": False}
    assert make_cuda_runner(model, 9, engine.adapters, **settings) is None
    assert "NotImplementedError: attention sinks" in caplog.text
    assert not any(hasattr(module, "paged_keys") for module in model.modules())
    check_engine(Engine(model, max_model_len=64))


def test_a_step_is_long_where_attention_needs_no_padding(model: Any) -> None:
    runner = make_engine(model, max_model_len=32, max_running=4).runner
    assert runner.max_prefill_tokens == 2048
    runner._flash = True  # type: ignore[attr-defined]
    assert runner.max_prefill_tokens == 16384


@pytest.mark.parametrize("latents", [NEVER, SOFT], ids=["hybrid", "soft"])
def test_thoughts_in_latent_space_are_those_of_the_formulas_beside_plain_requests(latents: LatentParams) -> None:
    model = model_for(latents)
    decode = {"decode": lambda ids: "".join(map(chr, ids))}
    engine = make_engine(model, max_model_len=96, max_running=4, kv_blocks=8, **decode)
    rng = random.Random(2)
    kinds = [latents, None, latents, None]
    prompts = [random_prompt(rng, length) for length in (5, 17, 20, 3)]
    requests = [
        engine.submit(prompt, SamplingParams(max_tokens=24, ignore_eos=True, latents=kind))
        for prompt, kind in zip(prompts, kinds, strict=True)
    ]
    run_all(engine)
    for request, kind in zip(requests, kinds, strict=True):
        (assert_like_plain if kind is None else assert_like_formulas)(request, model)
    assert_nothing_left(engine)
