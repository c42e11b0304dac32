"""On-policy self-distillation: what the policy would say if it had seen a demonstration."""

import threading
from typing import Any

import numpy as np
import pytest

from headrace.algorithms import opsd
from headrace.algorithms.hints import MAX_INLINE_CHARS, Hints
from headrace.algorithms.opsd import demonstration
from headrace.rollout.types import Task
from headrace.tools.check_algorithm.fixtures import algorithm_config
from tests.algorithms.teachers import (
    MODEL,
    Teacher,
    hint_ids,
    host_of,
    opsd_of,
    pretended_logprobs,
    rollout_of,
    set_up,
    survivors,
)
from tests.refusals import refused

PLAIN = "{demonstration}"


def task_of(**data: Any) -> Task:
    return Task("env", data, "task-7")


async def test_the_sample_is_scored_verbatim_after_the_demonstration_in_its_template():
    policy = Teacher()
    algorithm = await set_up(opsd_of(), policy)
    batch = survivors([rollout_of([1, 2], [3], temperature=0.5)], task_of(demonstration="Like {this}, see {0}?"))
    await algorithm.score_rollout(batch[0])
    await algorithm.score_batch(batch)
    hint = hint_ids(
        "Here is a demonstration of how the task below can be done well:\n\nLike {this}, see {0}?\n\nUnderstand why it "
        "works. Then do the task below in your own words, step by step."
    )
    for sample, (asked, temperature) in zip(batch[0].samples, policy.asked[::-1], strict=True):
        assert (asked, temperature) == ([*hint, *sample.token_ids], 0.5)
        expected = pretended_logprobs(asked, 0.5)[len(hint) :].astype(np.float32)
        assert sample.streams["ref_logprobs"].tolist() == expected.tolist()
    assert algorithm.tally.take() == {"prefills": 2, "failures": 0, "hints_apart": 2}  # prompts of one made-up token


async def test_any_number_of_turns_is_one_sequence():
    policy = Teacher()
    algorithm = await set_up(opsd_of(template=PLAIN), policy)
    [view] = survivors([rollout_of([1, 2], [3], [4, 5], one_sample=True)], task_of(demonstration="so"))
    await algorithm.score_batch([view])
    assert [asked for asked, _ in policy.asked] == [[*hint_ids("so"), 100, 1, 2, 90, 3, 90, 4, 5]]
    assert view.samples[0].streams["ref_logprobs"].shape == (8,)


async def test_an_empty_hint_has_no_tokens():
    policy = Teacher()
    algorithm = await set_up(opsd_of(template=PLAIN), policy)
    await algorithm.score_batch(survivors([rollout_of([1, 2])], task_of(demonstration="")))
    assert policy.asked == [([100, 1, 2], 1.0)]


@pytest.mark.parametrize("empty", ["", " \n", [], [{"role": "assistant", "content": ""}]])
async def test_a_template_without_a_demonstration_in_it_is_refused_on_arrival(empty: Any):
    algorithm = await set_up(opsd_of())
    [view] = survivors([rollout_of([1])], task_of(demonstration=empty))
    with pytest.raises(ValueError, match=r"task-7.*'demonstration'"):
        await algorithm.score_rollout(view)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        ({"info": {"demo": "inner"}, "demo": "outer"}, "inner"),
        ({"info": {"other": 1}, "demo": "outer"}, "outer"),
        ({"info": {"demo": None}, "demo": "outer"}, "outer"),
        ({"info": "a text", "demo": "outer"}, "outer"),
        ({"demo": ""}, ""),
        ({"info": {"demo": ""}}, ""),
        ({"info": {"demo": ""}, "demo": "outer"}, "outer"),
    ],
)
def test_a_demonstration_is_looked_for_in_info_and_then_at_the_top(data: dict[str, Any], found: str):
    assert demonstration(task_of(**data), "demo") == found


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ({"question": "?"}, "has no demonstration"),
        ({"info": {}, "demo": None}, "has no demonstration"),
        ({"demo": 42}, "has a demonstration that is a int"),
        ({"demo": ["not", "messages"]}, "has a demonstration that is a list"),
    ],
)
async def test_a_missing_demonstration_is_reported_on_arrival_and_names_the_example(
    data: dict[str, Any], complaint: str
):
    algorithm = await set_up(opsd_of(demo_key="demo"))
    [view] = survivors([rollout_of([1])], task_of(**data))
    with pytest.raises(ValueError) as caught:
        await algorithm.score_rollout(view)
    assert str(caught.value) == (
        f"task task-7 of env {complaint}: opsd needs a text or a list of messages as 'demo' in its info or at its top "
        "level; add it to the data, or set demo_key to the name that it has"
    )


def test_a_demonstration_of_messages_reads_like_a_transcript():
    call = {"id": "0", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2]}}}
    bare = {"function": {"name": "add", "arguments": '{"a": 3}'}}
    messages = [
        {"role": "user", "content": "What is 1 + 2?"},
        {"role": "assistant", "content": None, "reasoning_content": "I need the sum.", "tool_calls": [call, bare]},
        {"role": "tool", "content": [{"type": "text", "text": "3"}, {"type": "image", "image": "..."}]},
        {"role": "assistant", "content": "It is 3."},
        {"role": "user", "content": ""},
    ]
    assert demonstration(task_of(demonstration=messages), "demonstration") == (
        'user: What is 1 + 2?\n\nI need the sum.\nadd({"a":1,"b":[2]})\nadd({"a": 3})\n\ntool: 3\n\nIt is 3.'
    )


async def test_a_frozen_teacher_is_asked_instead_of_the_policy_and_closed():
    policy, teacher = Teacher(), Teacher()
    algorithm = await set_up(opsd_of(teacher), policy)
    await algorithm.score_batch(survivors([rollout_of([1])], task_of(demonstration="so")))
    assert (len(teacher.asked), len(policy.asked)) == (1, 0)
    await algorithm.stop()
    assert (teacher.closed, policy.closed) == (True, False)


async def test_the_policy_is_not_closed_with_the_algorithm():
    policy = Teacher()
    algorithm = await set_up(opsd_of(), policy)
    assert policy.checked is not None
    await algorithm.stop()
    assert not policy.closed


async def test_a_failing_teacher_drops_what_it_did_not_score():
    algorithm = await set_up(opsd_of(Teacher(fails=lambda token_ids: token_ids[-1] == 66)))
    batch = survivors([rollout_of([1]), rollout_of([66])], task_of(demonstration="so"))
    await algorithm.score_batch(batch)
    assert [view.drop_reason for view in batch] == ["", "no_reference"]
    assert algorithm.tally.take() == {"prefills": 1, "failures": 1, "hints_apart": 1}


def test_a_template_without_a_place_for_the_demonstration_is_refused():
    with refused(key="algo.template", value="Do it well."):
        algorithm_config({"type": "opsd", "template": "Do it well."}, "test")


def test_the_default_template_has_one_place():
    assert opsd.TEMPLATE.count(opsd.PLACEHOLDER) == 1


async def test_each_prompt_is_rendered_once_with_each_text_and_long_ones_in_a_thread(monkeypatch: pytest.MonkeyPatch):
    threads: list[int] = []
    render_ids = MODEL.renderer.render_ids

    def counting(*args: Any, **options: Any) -> list[int]:
        threads.append(threading.get_ident())
        return list(render_ids(*args, **options))

    monkeypatch.setattr(MODEL.renderer, "render_ids", counting)
    hints, rollout = Hints(host_of(Teacher()), "See {it}", "{it}"), rollout_of([1])
    [sample] = rollout.samples
    assert await hints.prompt(rollout, sample, "this") is await hints.prompt(rollout, sample, "this")
    assert await hints.prompt(rollout, sample, "this") == [*hint_ids("See this"), 100]
    assert threads == [threading.get_ident()]
    long = "x" * MAX_INLINE_CHARS
    assert await hints.prompt(rollout, sample, long) == [*hint_ids(f"See {long}"), 100]
    assert threads[1] != threading.get_ident()
