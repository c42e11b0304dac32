"""The embedded engine: admission, sampling and the end of requests, and independence from the batch."""

import contextlib
import copy
import random
from typing import Any

import pytest
import torch

from headrace.inference.backend import EngineError, InvalidRequest, RequestCancelled
from headrace.inference.embedded import scheduler as scheduler_module
from headrace.inference.embedded.cpu.weight_layout import lay_out_for_small_batches
from headrace.inference.embedded.engine import Engine
from headrace.inference.schema import SamplingParams
from tests.inference.plain_forward import assert_like_plain, assert_nothing_left, random_prompt, run_all
from tests.refusals import refused


def count_tokens(model: Any) -> list[int]:
    """How many tokens each forward computes, from here on."""
    counts: list[int] = []
    model.base_model.register_forward_pre_hook(
        lambda _, __, kwargs: counts.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    return counts


def test_repeated_prompts_are_computed_once_and_share_nothing_else(model: Any) -> None:
    engine = Engine(model, max_model_len=64, max_running=8)
    prompt = random_prompt(random.Random(2), 20)
    counts = count_tokens(model)
    requests = [engine.submit(prompt, SamplingParams(max_tokens=6, ignore_eos=True)) for _ in range(3)]
    engine.step()
    requests += [engine.submit(prompt, SamplingParams(max_tokens=6, ignore_eos=True)) for _ in range(2)]
    run_all(engine)
    # Twenty tokens for three; then of two more the four that are in no whole block, beside the newest ones.
    assert counts == [20, 3 + 4, 5, 5, 5, 5, 2]
    assert [request.future.result().cached_tokens for request in requests] == [0, 20, 20, 16, 20]
    assert engine.state().tokens_cached == 76
    assert len({tuple(request.tokens) for request in requests}) > 1
    for request in requests:
        assert_like_plain(request, model)


def test_another_cache_salt_does_not_share(model: Any) -> None:
    engine = Engine(model, max_model_len=64)
    counts = count_tokens(model)
    for salt in ("a", "b", "a"):
        engine.submit([5, 6, 7], SamplingParams(max_tokens=1), cache_salt=salt)
    engine.step()
    assert counts == [6]


def test_without_a_prefix_cache_everything_is_computed(model: Any) -> None:
    engine = Engine(model, max_model_len=64, prefix_cache=False)
    counts = count_tokens(model)
    requests = [engine.submit(list(range(40)), SamplingParams(max_tokens=1)) for _ in range(3)]
    run_all(engine)
    assert (sum(counts), engine.state().tokens_cached) == (120, 0)
    for request in requests:
        assert_like_plain(request, model)


def test_a_decode_step_computes_live_requests_only(model: Any) -> None:
    engine = Engine(model, max_model_len=64, max_running=8)
    counts = count_tokens(model)
    for place, length in enumerate((6, 1, 3)):
        engine.submit([7 + place], SamplingParams(max_tokens=length, ignore_eos=True))
    run_all(engine)
    assert counts == [3, 2, 2, 1, 1, 1]


def test_requests_beyond_max_running_wait_in_the_queue(model: Any) -> None:
    engine = Engine(model, max_model_len=64, max_running=2)
    requests = [engine.submit([5, 6], SamplingParams(max_tokens=2, ignore_eos=True)) for _ in range(3)]
    engine.step()
    assert (len(engine.scheduler.running), engine.scheduler.num_waiting) == (2, 1)
    engine.step()
    assert [request.future.done() for request in requests] == [True, True, False]
    run_all(engine)
    assert requests[2].future.done()


def test_cancelling_admits_the_next_and_leaves_others_exact(model: Any) -> None:
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
    assert_nothing_left(engine)


def test_a_paused_engine_keeps_its_requests_and_drops_cancelled_ones(model: Any) -> None:
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


def test_a_seed_samples_the_same_tokens_alone_or_in_a_batch(model: Any) -> None:
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
    ("token_ids", "params", "key"),
    [
        ([], SamplingParams(), "token_ids"),
        ([5, 264], SamplingParams(), "token_ids"),
        ([-1], SamplingParams(), "token_ids"),
        ([5] * 16, SamplingParams(), "token_ids"),
        ([5], SamplingParams(temperature=-1), "temperature"),
        ([5], SamplingParams(top_p=0), "top_p"),
        ([5], SamplingParams(top_k=-2), "top_k"),
        ([5], SamplingParams(min_p=1.1), "min_p"),
        ([5], SamplingParams(temperature=float("nan")), "temperature"),
        ([5], SamplingParams(max_tokens=0), "max_tokens"),
        ([5], SamplingParams(logprobs=21), "logprobs"),
        ([5], SamplingParams(prompt_logprobs=-1), "prompt_logprobs"),
        ([5], SamplingParams(stop=["x"]), "stop"),
        ([5], SamplingParams(stop=[""]), "stop"),
    ],
)
def test_requests_that_can_never_be_served_are_refused(
    model: Any, token_ids: list[int], params: SamplingParams, key: str
) -> None:
    engine = Engine(model, max_model_len=16)
    with refused(InvalidRequest, key=key):
        engine.submit(token_ids, params)
    assert not engine.has_work


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


def test_stopping_the_engine_fails_urgent_requests_too(model: Any) -> None:
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


LENGTHS = (4, 16, 33, 100)


def sampled_in_batch(model: Any, length: int, others: int, *, max_step_tokens: int) -> tuple[list[int], list[float]]:
    """What a seeded request samples after a prompt of that length, with others around it."""
    rng = random.Random(others)
    engine = Engine(model, max_model_len=160, max_running=32, max_step_tokens=max_step_tokens)
    prompt = random_prompt(random.Random(length), length)
    for number in range(others):
        own = random_prompt(rng, rng.choice([1, 2, 9, 40, 120]))
        seed = rng.choice([None, 5])
        engine.submit(own if number % 4 else prompt, SamplingParams(max_tokens=1 + number % 13, seed=seed))
    for _ in range(others % 4):
        engine.step()
    request = engine.submit(prompt, SamplingParams(max_tokens=16, seed=3, ignore_eos=True))
    run_all(engine)
    assert engine.scheduler.preemptions == 0
    result = request.future.result()
    return result.token_ids, result.logprobs


@pytest.mark.parametrize("length", LENGTHS)
def test_a_seeded_request_samples_the_same_to_the_last_bit_in_any_batch(
    model: Any, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "CHUNK_TOKENS", 32)
    model = copy.deepcopy(model)
    lay_out_for_small_batches(model)  # as stored, some CPUs multiply two rows in another order than many
    alone = sampled_in_batch(model, length, 0, max_step_tokens=64)
    for others in (1, 5, 14):
        assert sampled_in_batch(model, length, others, max_step_tokens=64) == alone
    assert sampled_in_batch(model, length, 5, max_step_tokens=32) == alone


def test_the_state_counts_what_happened(model: Any) -> None:
    engine = Engine(model, max_model_len=64, max_running=2, eos_token_ids=range(264))
    stopped = engine.submit([5, 6, 7], SamplingParams(max_tokens=9))
    running = engine.submit([8] * 20, SamplingParams(max_tokens=3, ignore_eos=True))
    waiting = engine.submit([9], SamplingParams(max_tokens=3, ignore_eos=True))
    engine.cancel(waiting)
    engine.step()
    state = engine.state()
    assert (state.running, state.waiting, state.capacity, state.paused) == (1, 0, 2, False)
    assert (state.tokens_sampled, state.tokens_computed, state.tokens_cached) == (2, 23, 0)
    assert state.kv_usage == 2 / 8  # twenty tokens are in two of 2 * 64 / 16 blocks
    run_all(engine)
    state = engine.state()
    assert (state.tokens_sampled, state.kv_usage) == (4, 0.0)
    assert state.finished == {"stop": 1, "cancelled": 1, "length": 1}
    assert stopped.future.result().finish_reason == "stop"
    assert running.future.result().finish_reason == "length"


def test_a_cache_smaller_than_the_longest_request_is_made_to_fit_it(model: Any) -> None:
    engine = Engine(model, max_model_len=64, kv_blocks=1)
    assert engine.scheduler.blocks.num_usable == 4
    request = engine.submit([5] * 50, SamplingParams(ignore_eos=True))
    run_all(engine)
    assert len(request.tokens) == 64
    assert_like_plain(request, model)


@pytest.mark.parametrize(
    "extreme",
    [
        {"temperature": 1e-40},
        {"temperature": 1e-320},
        {"temperature": 1e300},
        {"top_k": 2**63},
        {"top_k": 10**30},
        {"top_p": 1e-320},
        {"min_p": 1e-320},
        {"seed": -(2**80)},
        {"max_tokens": 2**80},
        {"stop_token_ids": [2**80, -1]},
    ],
)
def test_extreme_settings_are_served_or_refused_and_touch_no_neighbour(model: Any, extreme: dict[str, Any]) -> None:
    def sampled(settings: dict[str, Any] | None) -> list[int]:
        engine = Engine(model, max_model_len=32)
        neighbour = engine.submit([5, 7], SamplingParams(max_tokens=5, seed=1, ignore_eos=True))
        if settings is not None:
            with contextlib.suppress(InvalidRequest):
                engine.submit([5, 6], SamplingParams(**settings))
        run_all(engine)
        assert engine.finished["error"] == 0
        return neighbour.future.result().token_ids

    assert sampled(extreme) == sampled(None)


def test_a_negative_seed_is_another_one_than_its_opposite(model: Any) -> None:
    engine = Engine(model, max_model_len=64)
    requests = [
        engine.submit([5, 6], SamplingParams(max_tokens=12, seed=seed, ignore_eos=True)) for seed in (-1, 1, -1)
    ]
    run_all(engine)
    first, other, same = (request.future.result().token_ids for request in requests)
    assert first == same != other


def test_steps_that_fail_though_each_of_their_requests_alone_does_not_end_the_engine(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(model, max_model_len=64)
    arrange = engine.runner.cache.prepare

    def prepare(batch: Any, unverified_blocks: Any) -> None:
        if len(batch.chunks) > 1:
            raise RuntimeError("two are too many")
        arrange(batch, unverified_blocks)

    monkeypatch.setattr(engine.runner.cache, "prepare", prepare)
    for _ in range(2):
        engine.submit([5, 6], SamplingParams(max_tokens=50, ignore_eos=True, prompt_logprobs=0))
    with pytest.raises(RuntimeError, match="two are too many"):
        run_all(engine)
