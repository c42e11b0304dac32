"""What vLLM samples behind our contract is what the plain model says, and what the embedded engine says."""

import asyncio

import pytest
import torch

from headrace.inference.backend import GenerationResult, InvalidRequest, RequestCancelled
from headrace.inference.embedded.engine import Engine
from headrace.inference.schema import SamplingParams
from headrace.inference.vllm.backend import VllmBackend
from tests.inference.plain_forward import plain_logprobs
from tests.refusals import refused
from tests.vllm.comparing import TOLERANCE, assert_like_plain
from tests.vllm.conftest import LONGEST, make_model

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

PROMPTS = [[5], [60, 2, 7], list(range(10, 50)), list(range(200, 3, -1)), [9] * 300]
TEXT = list(range(32))


async def sample(backend: VllmBackend, prompt: list[int], **params: object) -> GenerationResult:
    return await backend.submit(prompt, SamplingParams(**{"logprobs": 0, **params})).result()  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.8])
async def test_logprobs_are_those_of_a_plain_forward_whatever_the_length(
    backend: VllmBackend, temperature: float
) -> None:
    scored = temperature in (0.0, 1.0)
    asked = {"temperature": temperature, "max_tokens": 40, "ignore_eos": True}
    results = await asyncio.gather(
        *[sample(backend, prompt, **asked, prompt_logprobs=0 if scored else None) for prompt in PROMPTS]
    )
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert len(result.token_ids) == 40 and result.finish_reason == "length"
        assert (result.prompt_logprobs is not None) == scored
        assert_like_plain(prompt, result, make_model(0), temperature)


async def test_the_embedded_engine_gives_the_same_tokens_the_same_logprobs(backend: VllmBackend) -> None:
    engine = Engine(make_model(0), max_model_len=LONGEST)
    asked = {"temperature": 0.7, "max_tokens": 30, "ignore_eos": True}
    for prompt, result in zip(
        PROMPTS, await asyncio.gather(*[sample(backend, prompt, **asked) for prompt in PROMPTS]), strict=True
    ):
        request = engine.submit(
            prompt + result.token_ids, SamplingParams(temperature=0.7, max_tokens=1, prompt_logprobs=0)
        )
        while engine.has_work:
            engine.step()
        ours = request.future.result(timeout=0).prompt_logprobs
        assert ours is not None
        torch.testing.assert_close(
            torch.tensor(ours[len(prompt) :]), torch.tensor(result.logprobs), atol=TOLERANCE, rtol=0
        )


@pytest.mark.parametrize("taken", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}, {"top_k": 4, "top_p": 0.8}])
async def test_what_top_p_top_k_and_min_p_take_away_does_not_change_logprobs(
    backend: VllmBackend, taken: dict[str, float]
) -> None:
    asked = {"temperature": 0.7, "max_tokens": 30, "ignore_eos": True, **taken}
    for result in await asyncio.gather(*[sample(backend, TEXT, **asked) for _ in range(4)]):
        assert_like_plain(TEXT, result, make_model(0), 0.7)
        if "top_k" in taken:
            model = make_model(0)
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([TEXT + result.token_ids])).logits[0, len(TEXT) - 1 : -1]
            best = logits.topk(int(taken["top_k"])).indices.tolist()
            assert all(token in allowed for token, allowed in zip(result.token_ids, best, strict=True))


async def test_requests_of_one_batch_keep_their_own_temperature_and_truncation(backend: VllmBackend) -> None:
    kinds = [{"temperature": 0.0}, {"temperature": 0.5}, {"temperature": 1.5, "top_k": 2}, {"temperature": 1.0}]
    asked = [sample(backend, TEXT, max_tokens=20, ignore_eos=True, **kind) for kind in kinds]
    for kind, result in zip(kinds, await asyncio.gather(*asked), strict=True):
        assert_like_plain(TEXT, result, make_model(0), kind["temperature"])


async def test_alternatives_are_the_likeliest_tokens_in_order(backend: VllmBackend) -> None:
    result = await sample(backend, TEXT, temperature=1.0, max_tokens=10, ignore_eos=True, logprobs=4, prompt_logprobs=3)
    with torch.no_grad():
        logits = make_model(0)(input_ids=torch.tensor([TEXT + result.token_ids])).logits[0, :-1]
    expected = torch.log_softmax(logits, -1)
    assert result.top_logprobs is not None and result.prompt_top_logprobs is not None
    assert result.prompt_top_logprobs[0] == []
    for count, given, wanted in [
        (4, result.top_logprobs, expected[len(TEXT) - 1 :]),
        (3, result.prompt_top_logprobs[1:], expected[: len(TEXT) - 1]),
    ]:
        best = wanted.topk(count)
        assert [[token for token, _ in place] for place in given] == best.indices.tolist()
        torch.testing.assert_close(
            torch.tensor([[logprob for _, logprob in place] for place in given]), best.values, atol=1e-4, rtol=0
        )


async def test_a_stream_equals_the_whole_response(backend: VllmBackend) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=25, seed=11, logprobs=1, ignore_eos=True)
    whole = await backend.submit(TEXT, params).result()
    generation = backend.submit(TEXT, params)
    pieces = [piece async for piece in generation.chunks()]
    streamed = await generation.result()
    assert len(pieces) > 5
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids == streamed.token_ids
    assert (streamed.top_logprobs, streamed.version_spans) == (whole.top_logprobs, whole.version_spans)
    assert [logprob for piece in pieces for logprob in piece.logprobs] == pytest.approx(whole.logprobs, abs=TOLERANCE)


async def test_a_seed_decides_and_greedy_takes_the_likeliest(backend: VllmBackend) -> None:
    twice = [await sample(backend, TEXT, seed=-1, max_tokens=12, ignore_eos=True) for _ in range(2)]
    assert twice[0].token_ids == twice[1].token_ids
    greedy = await sample(backend, TEXT, temperature=0.0, max_tokens=12, ignore_eos=True)
    with torch.no_grad():
        logits = make_model(0)(input_ids=torch.tensor([TEXT + greedy.token_ids])).logits[0, len(TEXT) - 1 : -1]
    assert logits.argmax(-1).tolist() == greedy.token_ids


async def test_a_request_ends_at_its_stop_tokens_and_strings(backend: VllmBackend) -> None:
    asked = {"seed": 4, "max_tokens": 60, "ignore_eos": True}
    free = (await sample(backend, TEXT, **asked)).token_ids
    place = next(n for n, token in enumerate(free) if n > 2 and 33 <= token < 94 and token not in free[:n])
    by_id = await sample(backend, TEXT, **asked, stop_token_ids=[free[place]])
    assert by_id.token_ids == free[: place + 1]
    assert (by_id.finish_reason, by_id.stop_reason) == ("stop", free[place])
    text = backend._decode([free[place]])
    by_text = await sample(backend, TEXT, **asked, stop=["never", text])
    assert by_text.token_ids == free[: place + 1]
    assert (by_text.finish_reason, by_text.stop_reason) == ("stop", text)


async def test_the_end_of_sequence_ends_a_request_unless_it_is_ignored(
    backend: VllmBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = await sample(backend, TEXT, temperature=0.0, max_tokens=20, ignore_eos=True)
    monkeypatch.setattr(backend, "_eos_token_ids", frozenset({free.token_ids[4]}))
    ended = await sample(backend, TEXT, temperature=0.0, max_tokens=20)
    first = free.token_ids.index(free.token_ids[4])
    assert ended.token_ids == free.token_ids[: first + 1]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None)
    ignored = await sample(backend, TEXT, temperature=0.0, max_tokens=20, ignore_eos=True)
    assert ignored.token_ids == free.token_ids


async def test_without_a_limit_a_request_fills_the_context(backend: VllmBackend) -> None:
    prompt = [7] * (LONGEST - 5)
    result = await sample(backend, prompt, ignore_eos=True)
    assert len(result.token_ids) == 5 and result.finish_reason == "length"
    assert len((await sample(backend, prompt, ignore_eos=True, max_tokens=100)).token_ids) == 5


async def test_bad_requests_cost_themselves_alone(backend: VllmBackend) -> None:
    bad: list[tuple[list[int], SamplingParams, str]] = [
        ([], SamplingParams(), "token_ids"),
        ([264], SamplingParams(), "token_ids"),
        ([-1], SamplingParams(), "token_ids"),
        ([1] * LONGEST, SamplingParams(), "token_ids"),
        ([1], SamplingParams(temperature=-1.0), "temperature"),
        ([1], SamplingParams(temperature=0.001), "temperature"),
        ([1], SamplingParams(temperature=3.0), "temperature"),
        ([1], SamplingParams(stop_token_ids=[-5]), "stop_token_ids"),
        ([1], SamplingParams(temperature=0.5, prompt_logprobs=0), "prompt_logprobs"),
    ]
    for prompt, params, key in bad:
        with refused(InvalidRequest, key=key):
            backend.submit(prompt, params)
    odd = await sample(backend, [1, 2], seed=-1, max_tokens=3, top_k=10**6, stop=["\x00\ud7ff"], ignore_eos=True)
    assert len(odd.token_ids) == 3


async def test_a_cancelled_request_ends_and_leaves_room(backend: VllmBackend) -> None:
    asked = [backend.submit(TEXT, SamplingParams(max_tokens=400, ignore_eos=True)) for _ in range(32)]
    waiting = [asyncio.ensure_future(generation.result()) for generation in asked]
    await asyncio.sleep(0.3)
    assert backend.state().running + backend.state().waiting == 32
    for generation in asked:
        generation.cancel()
        generation.cancel()
    for outcome in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(outcome, RequestCancelled)
    assert backend.state().waiting == 0
    assert len((await sample(backend, TEXT, max_tokens=3, ignore_eos=True)).token_ids) == 3


async def test_scores_are_those_of_the_whole_prompt_though_its_prefix_is_cached(backend: VllmBackend) -> None:
    prompt = [3, *range(100, 260)]
    await sample(backend, prompt, max_tokens=1)
    again = await sample(backend, prompt, max_tokens=1, temperature=1.0, prompt_logprobs=0)
    cached = await sample(backend, prompt, max_tokens=1)
    assert cached.cached_tokens >= 128
    assert again.prompt_logprobs is not None
    plain = plain_logprobs(make_model(0), prompt)
    torch.testing.assert_close(torch.tensor(again.prompt_logprobs[1:]), plain, atol=TOLERANCE, rtol=0)
