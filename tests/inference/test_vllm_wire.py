"""Our requests in vLLM's form, its answers in ours, and its metrics."""

import json
from typing import Any

import pytest

from headrace.inference.backend import EngineError, InvalidRequest, RequestCancelled
from headrace.inference.schema import SamplingParams, StructuredOutputs
from headrace.inference.vllm import wire
from headrace.inference.vllm.control import Metrics, PreemptionCounter, read_metrics
from headrace.rollout.version import Version
from tests.refusals import refused

A, B, C = Version(0, 1), Version(0, 2), Version(1, 0)


def body(params: SamplingParams, **more: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "request_id": "7x", "max_tokens": 5, "eos_token_ids": {3, 2}, "model": "policy", "cache_salt": None,
        "urgent": False, "stream": False, "logprobs": True, **more,
    }  # fmt: skip
    return json.loads(wire.request_body([1, 2], params, **given))


def test_a_request_omits_unset_fields() -> None:
    assert body(SamplingParams(temperature=0.5, top_k=-1)) == {
        "request_id": "7x",
        "token_ids": [1, 2],
        "model": "policy",
        "priority": 0,
        "stream": False,
        "sampling_params": {
            "temperature": 0.5, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 5, "stop": [],
            "stop_token_ids": [2, 3], "ignore_eos": True, "detokenize": False, "skip_special_tokens": False,
            "logprobs": 0, "output_kind": 2,
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(ignore_eos=True, stop_token_ids=[9]), {"stop_token_ids": [9]}),
        (SamplingParams(stop_token_ids=[9]), {"stop_token_ids": [9, 2, 3]}),
        (SamplingParams(stop=["end"]), {"stop": ["end"], "detokenize": True}),
        (SamplingParams(logprobs=0), {"logprobs": 0}),
        (SamplingParams(logprobs=3), {"logprobs": 4}),
        (SamplingParams(prompt_logprobs=2), {"prompt_logprobs": 2}),
        (
            SamplingParams(presence_penalty=0.5),
            {"presence_penalty": 0.5, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
        ),
        (
            SamplingParams(structured_outputs=StructuredOutputs(choice=["a", "b"])),
            {"structured_outputs": {"choice": ["a", "b"]}},
        ),
        (SamplingParams(seed=-1), {"seed": 2**63 - 1}),
        (SamplingParams(seed=2**63 + 5), {"seed": 5}),
    ],
)
def test_what_is_asked_for_arrives_in_vllms_terms(params: SamplingParams, expected: dict[str, Any]) -> None:
    assert expected.items() <= body(params)["sampling_params"].items()


def test_a_stream_is_asked_for_its_usage_and_an_urgent_request_comes_first() -> None:
    found = body(SamplingParams(), stream=True, urgent=True, cache_salt="s", logprobs=False)
    assert (found["stream_options"], found["priority"], found["cache_salt"]) == ({"include_usage": True}, -1, "s")
    assert not {"output_kind", "logprobs"} & found["sampling_params"].keys()


@pytest.mark.parametrize(
    ("tokens", "params", "key"),
    [
        ([], SamplingParams(), "token_ids"),
        ([5, 100], SamplingParams(), "token_ids"),
        ([-1], SamplingParams(), "token_ids"),
        ([1] * 20, SamplingParams(), "token_ids"),
        ([1], SamplingParams(top_p=0.0), "top_p"),
        ([1], SamplingParams(temperature=0.005), "temperature"),
        ([1], SamplingParams(temperature=2.5), "temperature"),
        ([1], SamplingParams(stop_token_ids=[100]), "stop_token_ids"),
        ([1], SamplingParams(temperature=0.5, prompt_logprobs=0), "prompt_logprobs"),
    ],
)
def test_what_could_harm_vllm_or_be_answered_wrongly_is_refused(
    tokens: list[int], params: SamplingParams, key: str
) -> None:
    with refused(InvalidRequest, key=key):
        wire.check(tokens, params, 100, 20)


@pytest.mark.parametrize("temperature", [0.0, 0.01, 1.0, 2.0])
def test_temperatures_in_vllms_range_are_accepted(temperature: float) -> None:
    wire.check([1], SamplingParams(temperature=temperature), 100, 20)
    if temperature in (0.0, 1.0):
        wire.check([1], SamplingParams(temperature=temperature, prompt_logprobs=0), 100, 20)


def answer(**fields: Any) -> wire.VllmResponse:
    return wire.decode_response(json.dumps(fields).encode())


def logprob(token: int, value: float, *, old: bool) -> dict[str, Any]:
    return {"token": f"token_id:{token}", "logprob": value} if old else {"token_id": token, "logprob": value}


@pytest.mark.parametrize("old", [False, True])
def test_both_ways_to_name_tokens_are_read_and_alternatives_are_the_best(old: bool) -> None:
    # The sampled token 5 is the third; four were asked for to have the best three.
    tops = [logprob(token, value, old=old) for token, value in [(5, -2.0), (8, -0.5), (9, -1.5), (2, -3.0)]]
    content = [{**logprob(5, -2.0, old=old), "top_logprobs": tops}]
    [choice] = answer(choices=[{"index": 0, "token_ids": [5], "logprobs": {"content": content}}]).choices
    found = wire.token_chunk(choice, SamplingParams(logprobs=3))
    assert (found.token_ids, found.logprobs) == ([5], [-2.0])
    assert found.top_logprobs == [[(8, -0.5), (9, -1.5), (5, -2.0)]]
    assert wire.token_chunk(choice, SamplingParams(logprobs=0)).top_logprobs is None


def test_logprobs_of_another_number_of_tokens_are_an_error() -> None:
    [choice] = answer(
        choices=[{"token_ids": [5, 6], "logprobs": {"content": [{"token_id": 5, "logprob": -1}]}}]
    ).choices
    with pytest.raises(EngineError, match=r"\b2\b.*\b1\b"):
        wire.token_chunk(choice, SamplingParams(logprobs=0))


def test_a_token_that_cannot_have_been_sampled_is_an_error() -> None:
    entries = [{"token_id": 5, "logprob": -1.0}, {"token_id": 6, "logprob": -9999.0}]
    [choice] = answer(choices=[{"token_ids": [5, 6], "logprobs": {"content": entries}}]).choices
    with pytest.raises(EngineError, match=r"\b6\b.*-9999"):
        wire.token_chunk(choice, SamplingParams(logprobs=0))
    tables = [None, {"7": {"logprob": -1.0}, "4": {"logprob": -9999.0}}, {"9": {"logprob": -9999.0}}]
    found = answer(choices=[], prompt_logprobs=tables)
    with pytest.raises(EngineError, match=r"\b9\b.*-9999"):
        wire.prompt_logprobs(found, [1, 7, 9], SamplingParams(prompt_logprobs=0))


def test_prompt_logprobs_are_those_of_the_prompts_tokens() -> None:
    tables = [None, {"7": {"logprob": -1.0, "rank": 2}, "4": {"logprob": -0.5}}, {"9": {"logprob": -3.0}}]
    found = answer(choices=[], prompt_logprobs=tables)
    assert wire.prompt_logprobs(found, [1, 7, 9], SamplingParams(prompt_logprobs=0)) == ([0.0, -1.0, -3.0], None)
    assert wire.prompt_logprobs(found, [1, 7, 9], SamplingParams(prompt_logprobs=1))[1] == [
        [],
        [(4, -0.5)],
        [(9, -3.0)],
    ]
    assert wire.prompt_logprobs(found, [1, 7, 9], SamplingParams()) == (None, None)
    with pytest.raises(EngineError, match=r"\b3\b.*\b2\b"):
        wire.prompt_logprobs(found, [1, 7], SamplingParams(prompt_logprobs=0))


@pytest.mark.parametrize(
    ("marks", "length", "expected"),
    [
        ([(A, 0)], 5, [(A, 0, 5)]),
        ([(A, 0), (B, 2)], 5, [(A, 0, 2), (B, 2, 5)]),
        ([(A, 0), (B, 0)], 5, [(B, 0, 5)]),  # it had not begun
        ([(A, 0), (B, 2), (C, 2)], 5, [(A, 0, 2), (C, 2, 5)]),
        ([(A, 0), (B, 2), (C, 4)], 5, [(A, 0, 2), (B, 2, 4), (C, 4, 5)]),
        ([(A, 0), (B, 5)], 5, [(A, 0, 5)]),  # it had ended
    ],
)
def test_spans_follow_from_how_far_a_request_was_at_each_update(marks: Any, length: int, expected: Any) -> None:
    assert wire.counted_spans(marks, length) == expected


def test_what_vllm_gave_up_is_an_error() -> None:
    assert wire.finish_reason(wire.Choice(finish_reason="length")) == "length"
    with pytest.raises(RequestCancelled):
        wire.finish_reason(wire.Choice(finish_reason="abort"))
    with pytest.raises(EngineError, match="None"):
        wire.finish_reason(wire.Choice())


def test_metrics_are_summed_over_copies_of_the_model() -> None:
    text = """# HELP vllm:num_requests_running x
vllm:num_requests_running{engine="0",model_name="a"} 3.0
vllm:num_requests_running{engine="1",model_name="a"} 4.0
vllm:kv_cache_usage_perc{engine="0",model_name="a"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="a"} 0.1
vllm:prompt_tokens_total{engine="0",model_name="a"} 100.0
vllm:prefix_cache_hits_total{engine="0",model_name="a"} 30.0
vllm:generation_tokens_total{engine="0",model_name="a"} 1.5e+03
vllm:request_success_total{engine="0",finished_reason="stop",model_name="a"} 2.0
vllm:request_success_total{engine="1",finished_reason="stop",model_name="a"} 3.0
vllm:request_success_total{engine="0",finished_reason="abort",model_name="a"} 1.0
vllm:request_success_total{engine="0",finished_reason="error",model_name="a"} 0.0
process_open_fds 49.0
"""
    assert read_metrics(text) == Metrics(
        running=7, kv_usage=0.3, tokens_sampled=1500, tokens_computed=70, tokens_cached=30,
        finished={"stop": 5, "cancelled": 1},
    )  # fmt: skip
    assert read_metrics("") == Metrics()


def test_preemptions_by_an_update_are_not_counted() -> None:
    preemptions = PreemptionCounter()

    def counted(*totals: int) -> list[int]:
        found = []
        for total in totals:
            preemptions.update(total)
            found.append(preemptions.count)
        return found

    assert counted(0, 2, 2) == [0, 2, 2]
    preemptions.expect(5, limit=8)
    assert counted(2, 4) == [2, 2]  # three more are to come
    preemptions.expect(7, limit=8)  # so that eight are
    assert counted(9, 12, 13) == [2, 2, 3]
