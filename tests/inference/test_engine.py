"""The embedded engine against plain forwards of the same model."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from headrace.inference.embedded import engine as engine_module
from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.request import EngineError, InvalidRequest, RequestCancelled
from headrace.inference.schema import SamplingParams
from headrace.rollout.version import Version
from tests.inference.plain_forward import assert_like_plain, plain_logprobs, run_all

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
ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen2, sliding": lambda: transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=7, max_window_layers=1
    ),
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral, sliding": lambda: transformers.MistralConfig(**SIZES, sliding_window=6),
    "gemma 2, sliding and capped": lambda: transformers.Gemma2Config(**SIZES, head_dim=16, sliding_window=5),
    "gemma 3, sliding": lambda: transformers.Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=5),
}


def random_prompt(rng: random.Random, length: int, vocab: int = 97) -> list[int]:
    return [rng.randrange(3, vocab) for _ in range(length)]


def submit_mixed(engine: Engine, rng: random.Random, count: int) -> list[Any]:
    """Requests of mixed lengths and settings, with some steps between their arrivals."""
    requests = []
    for _ in range(count):
        params = SamplingParams(
            temperature=rng.choice([0, 0.7, 1.0]),
            max_tokens=rng.choice([1, 5, 12]),
            prompt_logprobs=rng.choice([None, 0]),
        )
        requests.append(engine.submit(random_prompt(rng, rng.choice([1, 2, 9, 25, 40])), params))
        for _ in range(rng.choice([0, 1, 3])):
            engine.step()
    run_all(engine)
    return requests


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logprobs_equal_a_plain_forward_for_mixed_lengths_that_join_and_leave(architecture: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(ARCHITECTURES[architecture]())
    engine = Engine(model, max_model_len=64, max_running=4)
    for request in submit_mixed(engine, random.Random(0), 8):
        assert_like_plain(request, model)


def test_prompts_longer_than_a_forward_are_taken_in_chunks(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "PREFILL_TOKENS", 16)
    monkeypatch.setattr(engine_module, "SCORED_LOGITS", 8 * 264)
    engine = Engine(model, max_model_len=64, max_running=4)
    for request in submit_mixed(engine, random.Random(1), 8):
        assert_like_plain(request, model)


@pytest.mark.parametrize("budget", [8192, 12])
def test_prompts_of_different_lengths_are_scored_together(
    model: Any, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    monkeypatch.setattr(engine_module, "PREFILL_TOKENS", budget)
    engine = Engine(model, max_model_len=64)
    rng = random.Random(5)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    requests = [engine.submit(random_prompt(rng, length), params) for length in (1, 2, 3, 11)]
    run_all(engine)
    for request in requests:
        assert_like_plain(request, model)


def test_repeated_prompts_share_their_prefill_and_nothing_else(model: Any) -> None:
    engine = Engine(model, max_model_len=64, max_running=8)
    prompt = random_prompt(random.Random(2), 20)
    widths: list[int] = []
    model.base_model.register_forward_pre_hook(
        lambda _, __, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    requests = [engine.submit(prompt, SamplingParams(max_tokens=6)) for _ in range(3)]
    engine.step()
    requests += [engine.submit(prompt, SamplingParams(max_tokens=6)) for _ in range(2)]
    run_all(engine)
    assert [width for width in widths if width > 1] == [19]
    assert len({tuple(request.tokens) for request in requests}) > 1
    for request in requests:
        assert_like_plain(request, model)


def test_another_cache_salt_does_not_share(model: Any) -> None:
    engine = Engine(model, max_model_len=64)
    widths: list[int] = []
    model.base_model.register_forward_pre_hook(
        lambda _, __, kwargs: widths.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    for salt in ("a", "b"):
        engine.submit([5, 6, 7], SamplingParams(max_tokens=1), cache_salt=salt)
    engine.step()
    assert widths == [2, 2]


def test_a_decode_step_computes_live_requests_only(model: Any) -> None:
    engine = Engine(model, max_model_len=64, max_running=8)
    rows: list[int] = []
    for length in (6, 1, 3):
        engine.submit([7], SamplingParams(max_tokens=length, ignore_eos=True))
    model.register_forward_pre_hook(lambda _, __, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True)
    run_all(engine)
    assert rows == [3, 2, 2, 1, 1, 1]


def test_requests_wait_in_line_beyond_max_running(model: Any) -> None:
    engine = Engine(model, max_model_len=64, max_running=2)
    requests = [engine.submit([5, 6], SamplingParams(max_tokens=2, ignore_eos=True)) for _ in range(3)]
    engine.step()
    assert (len(engine.running), len(engine.waiting)) == (2, 1)
    engine.step()
    assert [request.future.done() for request in requests] == [True, True, False]
    run_all(engine)
    assert requests[2].future.done()


def test_cancelling_frees_the_row_and_leaves_others_exact(model: Any) -> None:
    engine = Engine(model, max_model_len=64, max_running=3)
    rng = random.Random(3)
    requests = [engine.submit(random_prompt(rng, 5 + i), SamplingParams(max_tokens=10)) for i in range(5)]
    engine.step()
    engine.cancel(requests[0])  # running
    engine.cancel(requests[4])  # waiting
    run_all(engine)
    for index in (0, 4):
        with pytest.raises(RequestCancelled):
            requests[index].future.result(timeout=0)
    for index in (1, 2, 3):
        assert_like_plain(requests[index], model)


def test_a_paused_engine_holds_its_requests_and_still_lets_go_of_cancelled_ones(model: Any) -> None:
    engine = Engine(model, max_model_len=64)
    kept, dropped = (engine.submit([5, 6], SamplingParams(max_tokens=4)) for _ in range(2))
    engine.step()
    engine.paused = True
    assert not engine.has_work
    engine.cancel(dropped)
    assert engine.has_work
    run_all(engine)
    assert dropped.future.done()
    assert not kept.future.done()
    engine.paused = False
    run_all(engine)
    assert_like_plain(kept, model)


def test_the_same_seed_samples_the_same_alone_or_in_a_crowd(model: Any) -> None:
    rng = random.Random(4)
    prompt, params = random_prompt(rng, 8), SamplingParams(max_tokens=20, seed=7, ignore_eos=True)
    alone = Engine(model, max_model_len=64, seed=1)
    first = alone.submit(prompt, params)
    run_all(alone)
    crowd = Engine(model, max_model_len=64, seed=2)
    for _ in range(5):
        crowd.submit(random_prompt(rng, 30), SamplingParams(max_tokens=15))
        crowd.step()
    second = crowd.submit(prompt, params)
    other = crowd.submit(prompt, SamplingParams(max_tokens=20, seed=8, ignore_eos=True))
    run_all(crowd)
    assert first.tokens == second.tokens
    assert first.tokens != other.tokens


def test_requests_without_a_seed_follow_the_engines(model: Any) -> None:
    def sampled(seed: int) -> list[int]:
        engine = Engine(model, max_model_len=64, seed=seed)
        request = engine.submit([5, 6, 7], SamplingParams(max_tokens=20, ignore_eos=True))
        run_all(engine)
        return request.tokens

    assert sampled(0) == sampled(0) != sampled(1)


def test_temperature_zero_takes_the_most_likely_token(model: Any) -> None:
    engine = Engine(model, max_model_len=64)
    request = engine.submit([5, 6, 7], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    run_all(engine)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        best = model(input_ids=torch.tensor([request.tokens])).logits[0].argmax(-1)
    assert request.tokens[3:] == best[2:-1].tolist()
    assert_like_plain(request, model)


@pytest.mark.parametrize("params", [SamplingParams(top_k=1, max_tokens=8), SamplingParams(top_p=1e-6, max_tokens=8)])
def test_truncation_changes_the_choice_but_not_the_logprobs(model: Any, params: SamplingParams) -> None:
    engine = Engine(model, max_model_len=64)
    cut = engine.submit([5, 6, 7], params)
    greedy = engine.submit([5, 6, 7], SamplingParams(temperature=0, max_tokens=8))
    run_all(engine)
    assert cut.tokens == greedy.tokens
    assert_like_plain(cut, model)


def test_a_stop_token_ends_the_completion_and_is_its_last_token(model: Any) -> None:
    engine = Engine(model, max_model_len=64)
    greedy = engine.submit([5, 6, 7], SamplingParams(temperature=0, max_tokens=6))
    run_all(engine)
    sampled = greedy.future.result().token_ids
    stopped = engine.submit([5, 6, 7], SamplingParams(temperature=0, max_tokens=6, stop_token_ids=[sampled[2]]))
    run_all(engine)
    result = stopped.future.result()
    assert result.token_ids == sampled[: sampled.index(sampled[2]) + 1]
    assert (result.finish_reason, result.stop_reason) == ("stop", sampled[2])


def test_end_of_sequence_stops_unless_it_is_ignored(model: Any) -> None:
    probe = Engine(model, max_model_len=64)
    greedy = probe.submit([5, 6, 7], SamplingParams(temperature=0, max_tokens=6))
    run_all(probe)
    sampled = greedy.future.result().token_ids
    engine = Engine(model, max_model_len=64, eos_token_ids=[sampled[0]])
    stopped, ignoring = (
        engine.submit([5, 6, 7], SamplingParams(temperature=0, max_tokens=6, ignore_eos=ignore))
        for ignore in (False, True)
    )
    run_all(engine)
    assert stopped.future.result().token_ids == sampled[:1]
    assert stopped.future.result().finish_reason == "stop"
    assert ignoring.future.result().token_ids == sampled
    assert ignoring.future.result().finish_reason == "length"


def test_the_context_limit_ends_a_completion(model: Any) -> None:
    engine = Engine(model, max_model_len=12)
    request = engine.submit(list(range(3, 10)), SamplingParams(ignore_eos=True))
    run_all(engine)
    assert len(request.tokens) == 12
    assert request.future.result().finish_reason == "length"
    assert_like_plain(request, model)


@pytest.mark.parametrize(
    ("token_ids", "params", "named"),
    [
        ([], SamplingParams(), "token_ids is empty"),
        ([5, 264], SamplingParams(), "264.*vocabulary of 264"),
        ([-1], SamplingParams(), "-1.*vocabulary"),
        ([5] * 16, SamplingParams(), "max_model_len = 16"),
        ([5], SamplingParams(temperature=-1), "temperature"),
        ([5], SamplingParams(top_p=0), "top_p"),
        ([5], SamplingParams(top_k=0), "top_k"),
        ([5], SamplingParams(max_tokens=0), "max_tokens"),
        ([5], SamplingParams(logprobs=5), "logprobs"),
    ],
)
def test_requests_that_can_never_be_served_are_refused(
    model: Any, token_ids: list[int], params: SamplingParams, named: str
) -> None:
    engine = Engine(model, max_model_len=16)
    with pytest.raises(InvalidRequest, match=named):
        engine.submit(token_ids, params)
    assert not engine.has_work


def test_a_prefill_that_raises_costs_its_own_requests_only(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(model, max_model_len=64)
    running = engine.submit([5, 6, 7], SamplingParams(max_tokens=6, ignore_eos=True))
    engine.step()
    forward = model.base_model.forward

    def broken(**kwargs: Any) -> Any:
        if kwargs["input_ids"].shape[1] == 12:
            raise RuntimeError("out of something")
        return forward(**kwargs)

    monkeypatch.setattr(model.base_model, "forward", broken)
    hapless = engine.submit(list(range(3, 16)), SamplingParams(max_tokens=2))
    run_all(engine)
    with pytest.raises(EngineError, match="out of something"):
        hapless.future.result(timeout=0)
    assert_like_plain(running, model)


def test_a_step_that_raises_costs_its_requests_and_the_engine_goes_on(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(model, max_model_len=64, max_running=2)
    requests = [engine.submit([5, 6, 7], SamplingParams(max_tokens=4)) for _ in range(3)]
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", lambda **_: 1 / 0)
        engine.step()
    run_all(engine)
    for request in requests[:2]:
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            request.future.result(timeout=0)
    assert_like_plain(requests[2], model)


@pytest.mark.parametrize("seed", range(3))
def test_any_schedule_of_joins_cancels_and_updates_stays_exact(
    make_model: Callable[[int], Any], publish: Callable[[Any, Version], Any], seed: int
) -> None:
    rng = random.Random(seed)
    models = {Version(0, step): make_model(step) for step in range(4)}
    engine = Engine(make_model(0), max_model_len=48, max_running=4)
    prompts = [random_prompt(rng, length) for length in (1, 3, 17, 30)]
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
            engine.update_weights(publish(models[version], version), version)
        engine.step()
    run_all(engine)
    finished = [request for request in requests if request.future.exception(timeout=0) is None]
    assert len(finished) > 10
    assert any(len(request.future.result().version_spans) > 1 for request in finished)
    for request in finished:
        assert_like_plain(request, models)


def test_plain_forward_helper_sees_a_wrong_prefix(model: Any) -> None:
    right, wrong = plain_logprobs(model, [5, 6, 7, 8, 9]), plain_logprobs(model, [50, 6, 7, 8, 9])
    assert (right[1:] - wrong[1:]).abs().max() > 1e-2


def test_urgent_requests_go_before_those_that_wait_and_keep_their_own_order(model: Any) -> None:
    engine = Engine(model, max_model_len=64, max_running=1)
    line = {name: engine.submit([5, 6], SamplingParams(max_tokens=3, ignore_eos=True)) for name in ("first", "second")}
    engine.step()
    line |= {name: engine.submit([5], SamplingParams(max_tokens=1), urgent=True) for name in ("urgent", "too", "gone")}
    engine.cancel(line["gone"])
    ended: list[str] = []
    for name, request in line.items():
        request.future.add_done_callback(lambda _, name=name: ended.append(name))
    run_all(engine)
    assert ended == ["gone", "first", "urgent", "too", "second"]


def test_an_engine_that_ends_fails_its_urgent_requests_too(model: Any) -> None:
    engine = Engine(model, max_model_len=64)
    request = engine.submit([5], SamplingParams(), urgent=True)
    assert engine.has_work
    engine.fail_all(EngineError("over"))
    assert not engine.has_work
    with pytest.raises(EngineError, match="over"):
        request.future.result(timeout=0)


def test_truncated_logprobs_are_relative_to_the_most_likely_tokens(model: Any) -> None:
    engine = Engine(model, max_model_len=64)
    cut = engine.submit([5, 6, 7], SamplingParams(temperature=0.8, top_k=3, max_tokens=6, ignore_eos=True))
    whole = engine.submit([5, 6, 7], SamplingParams(temperature=0.8, max_tokens=6, ignore_eos=True))
    run_all(engine)
    assert whole.future.result().truncated_logprobs is None
    result = cut.future.result()
    assert_like_plain(cut, model)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([cut.tokens]), use_cache=False).logits[0, 2:-1].float()
    mass = torch.softmax(logits / 0.8, -1).topk(3).values.sum(-1)
    expected = torch.tensor(result.logprobs) - mass.log()
    torch.testing.assert_close(torch.tensor(result.truncated_logprobs), expected, atol=1e-5, rtol=0)


def test_a_seeded_request_samples_the_same_to_the_last_bit_in_any_company(model: Any) -> None:
    def sampled(others: int) -> tuple[list[int], list[float]]:
        engine = Engine(model, max_model_len=64, max_running=32)
        for number in range(others):
            engine.submit([number] * (2 + number % 9), SamplingParams(max_tokens=1 + number % 13, ignore_eos=True))
        for _ in range(others % 4):
            engine.step()
        request = engine.submit([5, 6, 7, 8], SamplingParams(max_tokens=16, seed=3, ignore_eos=True))
        run_all(engine)
        result = request.future.result()
        return result.token_ids, result.logprobs

    alone = sampled(0)
    assert all(sampled(others) == alone for others in (1, 2, 5, 14, 40))


def test_broken_weights_leave_nothing_behind_for_those_who_come_after(model: Any) -> None:
    engine = Engine(model, max_model_len=64, max_running=4)
    good = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.fill_(float("nan"))
    hapless = engine.submit([1] * 30, SamplingParams(max_tokens=5, seed=1, ignore_eos=True))  # alone, in two rows
    run_all(engine)
    with pytest.raises(EngineError, match="not finite"):
        hapless.future.result()
    model.load_state_dict(good)
    later = [engine.submit([2 + n] * 10, SamplingParams(max_tokens=30, ignore_eos=True)) for n in range(2)]
    run_all(engine)
    assert [len(request.future.result().token_ids) for request in later] == [30, 30]
