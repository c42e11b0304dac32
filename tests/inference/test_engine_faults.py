"""A request that cannot be computed fails alone."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headrace.inference.backend import EngineError
from headrace.inference.embedded import batch as window_module
from headrace.inference.embedded import runner as runner_module
from headrace.inference.embedded import scheduler as scheduler_module
from headrace.inference.embedded.engine import Engine
from headrace.inference.schema import SamplingParams
from tests.inference.plain_forward import assert_like_plain, assert_nothing_left, random_prompt, run_all

MARKED = 200
"""A token that no random prompt has, and that breaks each request with it."""


def break_forward(model: Any, patch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
    """Make every forward raise in its last layer that has the marked token in it."""
    seen: list[torch.Tensor] = []
    model.base_model.register_forward_pre_hook(lambda _, __, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True)
    forward = model.base_model.layers[-1].forward

    def broken(*args: Any, **kwargs: Any) -> Any:
        if MARKED in seen[-1]:
            raise error or RuntimeError("out of something")
        return forward(*args, **kwargs)

    patch.setattr(model.base_model.layers[-1], "forward", broken)


@pytest.fixture
def breaking_model(model: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(scheduler_module, "CHUNK_TOKENS", 16)
    monkeypatch.setattr(window_module, "MIN_ROW_TOKENS", 16)
    with monkeypatch.context() as patch:
        break_forward(model, patch)
        yield model


def submit_others(engine: Engine, rng: random.Random, count: int = 6) -> list[Any]:
    text = random_prompt(rng, 60)
    return [
        engine.submit(
            text[: rng.randint(1, 60)] if number % 2 else random_prompt(rng, rng.randint(1, 60)),
            SamplingParams(max_tokens=8, stop_token_ids=[MARKED], prompt_logprobs=rng.choice([None, 0])),
        )
        for number in range(count)
    ]


@pytest.mark.parametrize(("place", "blocks"), [(0, None), (10, 8), (35, 8)])
def test_a_prompt_that_breaks_every_forward_fails_alone(
    breaking_model: Any, make_model: Any, place: int, blocks: int | None
) -> None:
    engine = Engine(breaking_model, max_model_len=80, max_step_tokens=32, kv_blocks=blocks)
    rng = random.Random(place)
    before = submit_others(engine, rng)
    engine.step()
    engine.step()
    prompt = random_prompt(rng, 40)
    prompt[place] = MARKED
    hapless = [engine.submit(prompt, SamplingParams(max_tokens=3, seed=seed)) for seed in (None, None, 1)]
    after = submit_others(engine, rng)
    run_all(engine)
    for request in hapless:
        with pytest.raises(EngineError, match="out of something"):
            request.future.result(timeout=0)
    for request in (*before, *after):
        assert_like_plain(request, make_model(0))
    assert_nothing_left(engine)
    finished = engine.state().finished
    assert (finished["length"] + finished.get("stop", 0), finished["error"]) == (12, 3)


def test_a_sampled_token_that_breaks_forwards_fails_only_its_request(
    model: Any, make_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(model, max_model_len=80)
    others = submit_others(engine, random.Random(1))
    hapless = engine.submit([5, 6, 7], SamplingParams(max_tokens=20, ignore_eos=True))
    for _ in range(3):
        engine.step()
    hapless.tokens[-1] = MARKED
    with monkeypatch.context() as patch:
        break_forward(model, patch)
        run_all(engine)
    with pytest.raises(EngineError, match="out of something"):
        hapless.future.result(timeout=0)
    for request in others:
        assert_like_plain(request, make_model(0))
    assert_nothing_left(engine)


def test_a_step_that_fails_once_is_repeated_without_loss(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(model, max_model_len=64, max_running=2)
    requests = [engine.submit([5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True)) for _ in range(3)]
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", lambda **_: 1 / 0)
        engine.step()
    run_all(engine)
    for request in requests:
        assert_like_plain(request, model)


def test_requests_that_fail_alone_end_and_the_engine_continues(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(model, max_model_len=64, max_running=2)
    requests = [engine.submit([5, 6, 7], SamplingParams(max_tokens=4)) for _ in range(3)]
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", lambda **_: 1 / 0)
        for _ in range(3):
            engine.step()  # together, then each alone
    run_all(engine)
    for request in requests[:2]:
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            request.future.result(timeout=0)
    assert_like_plain(requests[2], model)
    assert_nothing_left(engine)


def test_a_seeded_request_samples_the_same_after_a_failed_step(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def sampled(fails: bool) -> list[int]:
        engine = Engine(model, max_model_len=64)
        requests = [engine.submit([5, 6, seed], SamplingParams(max_tokens=9, seed=seed)) for seed in (1, 2)]
        for _ in range(3):
            engine.step()
        if fails:
            with monkeypatch.context() as patch:
                patch.setattr(model, "forward", lambda **_: 1 / 0)
                engine.step()
        run_all(engine)
        return [token for request in requests for token in request.future.result(timeout=0).token_ids]

    assert sampled(True) == sampled(False)


def test_a_failure_while_sampling_changes_no_seeded_request(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def sampled(fails: bool) -> list[int]:
        engine = Engine(model, max_model_len=64)
        requests = [engine.submit([5, 6, seed], SamplingParams(max_tokens=9, seed=seed)) for seed in (1, 2)]
        engine.step()
        if fails:
            with monkeypatch.context() as patch:
                patch.setattr(runner_module, "sample", lambda *_: 1 / 0)
                engine.step()
        run_all(engine)
        return [token for request in requests for token in request.future.result(timeout=0).token_ids]

    assert sampled(True) == sampled(False)


@pytest.mark.parametrize("place", [0, 20])
def test_a_token_with_nan_fails_only_requests_with_it(model: Any, make_model: Any, place: int) -> None:
    model.get_input_embeddings().register_forward_hook(
        lambda _, args, output: output.masked_fill((args[0] == MARKED)[..., None], torch.nan)
    )
    engine = Engine(model, max_model_len=64, max_running=4, kv_blocks=12)
    rng = random.Random(place)
    prompt = random_prompt(rng, 40)
    good = [engine.submit(prompt, SamplingParams(max_tokens=12, stop_token_ids=[MARKED])) for _ in range(2)]
    engine.step()
    bad = [*prompt[:place], MARKED, *prompt[place + 1 :]]
    params = [SamplingParams(max_tokens=5, prompt_logprobs=scored) for scored in (None, None, 0)]
    hapless = [engine.submit(bad, each) for each in params]
    good += submit_others(engine, rng)
    run_all(engine)
    for request in hapless:
        with pytest.raises(EngineError, match=r"0-0.*1\.0"):
            request.future.result(timeout=0)
    good += submit_others(engine, rng)
    run_all(engine)
    for request in good:
        assert_like_plain(request, make_model(0))
    assert_nothing_left(engine)


@pytest.mark.parametrize("length", [1, 70])
def test_nan_of_a_failed_request_does_not_spread_through_its_row(model: Any, make_model: Any, length: int) -> None:
    model.get_input_embeddings().register_forward_hook(
        lambda _, args, output: output.masked_fill((args[0] == MARKED)[..., None], torch.nan)
    )
    engine = Engine(model, max_model_len=128)
    rng = random.Random(0)
    params = SamplingParams(max_tokens=25, stop_token_ids=[MARKED])
    longest = engine.submit(random_prompt(rng, 100), params)
    hapless = engine.submit(random_prompt(rng, 60), params)
    for _ in range(3):
        engine.step()
    hapless.tokens[-1] = MARKED
    others = [engine.submit(random_prompt(rng, length), params)]
    engine.step()
    engine.step()
    with pytest.raises(EngineError, match="finite"):
        hapless.future.result(timeout=0)
    others.append(engine.submit(random_prompt(rng, 3), params))
    run_all(engine)
    for request in (longest, *others):
        assert_like_plain(request, make_model(0))


def test_nan_of_broken_weights_does_not_reach_later_requests(model: Any) -> None:
    engine = Engine(model, max_model_len=64, max_running=4, kv_blocks=4)
    good = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.fill_(float("nan"))
    hapless = engine.submit([1] * 30, SamplingParams(max_tokens=5, seed=1, ignore_eos=True))
    run_all(engine)
    with pytest.raises(EngineError, match="finite"):
        hapless.future.result()
    model.load_state_dict(good)
    later = [engine.submit([2 + n] * 10, SamplingParams(max_tokens=30, ignore_eos=True)) for n in range(2)]
    run_all(engine)
    for request in later:
        assert_like_plain(request, model)


def test_a_decode_that_raises_costs_its_own_request_only(model: Any) -> None:
    def decode(tokens: list[int]) -> str:
        raise UnicodeError("no such character")

    engine = Engine(model, max_model_len=64, decode=decode)
    plain = [engine.submit([5, 6, 7 + n], SamplingParams(max_tokens=1 + n, ignore_eos=True)) for n in range(3)]
    hapless = engine.submit([5, 6, 8], SamplingParams(max_tokens=3, stop=["x"]))
    run_all(engine)
    with pytest.raises(EngineError, match="no such character"):
        hapless.future.result(timeout=0)
    assert [len(request.future.result(timeout=0).token_ids) for request in plain] == [1, 2, 3]
    for request in plain:
        assert_like_plain(request, model)


def test_a_lost_device_raises_instead_of_failing_a_request(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(model, max_model_len=64)
    request = engine.submit([5, 6, MARKED], SamplingParams(max_tokens=3))
    with monkeypatch.context() as patch:
        break_forward(model, patch, torch.AcceleratorError("the device is lost"))
        with pytest.raises(torch.AcceleratorError, match="lost"):
            engine.step()
    assert not request.future.done()
