"""Drafts: which tokens are guessed, when, and which of them are right."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from headrace.inference.backend import EngineError
from headrace.inference.embedded import drafts
from headrace.inference.embedded.block_manager import BlockManager
from headrace.inference.embedded.cuda.launched_step import NOT_DRAFTED, right_rows
from headrace.inference.embedded.drafts import Drafter, PromptIndex, Text
from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.request import Request
from headrace.inference.embedded.scheduler import Scheduler
from headrace.inference.schema import SamplingParams

PROMPT = [1, 2, 3, 4]
MAX_ROWS = 100


def make_request(tokens: Sequence[int], prompt: Sequence[int] = PROMPT, **params: Any) -> Request:
    """A running request that has sampled `tokens`."""
    request = Request(
        list(prompt),
        SamplingParams(**params),
        max_new_tokens=100,
        eos_token_ids=[],
        shared_random=random.Random(0),
        cache_salt=None,
    )
    for token in tokens:
        request.append(token, -1.0)
    return request


def index_of(*texts: Sequence[int]) -> PromptIndex:
    index = PromptIndex([Text([*PROMPT, *text], len(PROMPT)) for text in texts])
    assert index.index_finished(1000) == 1000 - sum(len(PROMPT) + len(text) for text in texts)
    return index


def test_a_draft_is_what_followed_the_same_tokens() -> None:
    index = index_of([10, 11, 12, 13, 14, 15])
    assert index.draft([99, 11, 12], 2) == [13, 14]
    assert index.draft([99, 11, 12], 8) == [13, 14, 15]
    assert index.draft([1, 2], 2) == [3, 4]
    assert index.draft([10, 99], 8) == []
    assert index.draft([14, 15], 8) == []  # nothing followed
    assert index.draft([7], 8) == []


def test_a_longer_common_context_is_preferred_and_then_the_last_text() -> None:
    index = index_of([5, 10, 11, 12, 13, 14, 50], [6, 10, 11, 12, 13, 14, 60], [7, 10, 11, 12, 13, 14, 70])
    assert index.draft([5, 10, 11, 12, 13, 14], 1) == [50]
    assert index.draft([6, 10, 11, 12, 13, 14], 1) == [60]
    assert index.draft([8, 10, 11, 12, 13, 14], 1) == [70]


def test_finished_texts_are_indexed_within_a_budget() -> None:
    index = PromptIndex([Text([*PROMPT, number, number, number], len(PROMPT)) for number in (10, 20)])
    assert index.index_finished(5) == -2
    assert index.draft([10, 10], 1) == [10] and index.draft([20, 20], 1) == []
    assert index.index_finished(5) == -2
    assert index.draft([20, 20], 1) == [20]


def drafted(drafter: Drafter, requests: list[Request], max_rows: int = MAX_ROWS) -> dict[Request, list[int]]:
    """The drafts of requests whose next draft is as long as any."""
    while not drafter.prepare(requests, MAX_ROWS):
        pass
    drafter.index_sampled(requests)
    for _ in range(3):
        drafts = drafter.draft(requests, max_rows)
        drafter.observe({request: len(drafts.get(request, ())) + 1 for request in requests}, drafts)
    return drafter.draft(requests, max_rows)


def test_the_prompt_and_the_requests_own_tokens_are_drafts() -> None:
    drafter = Drafter(4)
    request = make_request([20, 21, 22, 23, 20, 21, 22])
    assert drafted(drafter, [request]) == {request: [23, 20, 21, 22]}
    copying = make_request([1, 2, 3])
    assert drafted(drafter, [copying])[copying][0] == 4


def test_drafts_come_from_finished_and_running_requests_with_the_same_prompt() -> None:
    drafter = Drafter(4)
    drafter.add_finished(make_request([10, 11, 12, 13]))
    running, other, stranger = (
        make_request([20, 21, 22, 23]),
        make_request([10, 11, 12]),
        make_request([10, 11, 12], prompt=[9, 9, 9, 9]),
    )
    assert drafted(drafter, [running, other, stranger]) == {other: [13]}
    other.append(20, -1.0)
    other.append(21, -1.0)
    other.append(22, -1.0)
    assert drafted(drafter, [running, other, stranger]) == {other: [23]}


def test_a_draft_leaves_room_for_the_last_token_and_for_other_rows() -> None:
    drafter = Drafter(8)
    drafter.add_finished(make_request(range(10, 40)))
    request = make_request([10, 11, 12])
    request.max_length = len(request.tokens) + 3
    assert drafted(drafter, [request]) == {request: [13, 14]}
    requests = [make_request([10, 11, 12]) for _ in range(3)]
    assert {len(draft) for draft in drafted(drafter, requests, 13).values()} == {3}
    assert drafted(drafter, requests, 5) == {}


@pytest.mark.parametrize(
    ("count", "params", "is_drafting"),
    [
        (0, {}, False),
        (1, {}, True),
        (drafts.MAX_REQUESTS, {"seed": 1}, True),
        (drafts.MAX_REQUESTS + 1, {}, False),
        (2, {"top_p": 0.5}, False),
    ],
)
def test_there_are_drafts_while_few_plain_requests_run(count: int, params: Any, is_drafting: bool) -> None:
    running = [make_request([], **params) for _ in range(count)]
    assert Drafter(8).prepare(running, MAX_ROWS) == is_drafting
    assert not Drafter(0).prepare(running, MAX_ROWS)


def test_drafts_that_gain_little_pause_and_are_tried_again() -> None:
    drafter, running = Drafter(8), [make_request([])]
    for _ in range(1000):
        drafter.observe({running[0]: 3}, {})
    assert drafter.prepare(running, MAX_ROWS)
    steps = 0
    while drafter.prepare(running, MAX_ROWS):
        drafter.observe({running[0]: 1}, {})
        steps += 1
    assert 10 < steps < 50
    pause = 1
    while not drafter.prepare(running, MAX_ROWS):
        pause += 1
    assert pause == drafts.PAUSE_STEPS


def test_there_are_no_drafts_where_a_step_has_no_room_for_one_of_each_request() -> None:
    running = [make_request([]) for _ in range(5)]
    assert not Drafter(8).prepare(running, 9)
    assert Drafter(8).prepare(running, 10)


def test_running_requests_are_indexed_within_a_budget_and_stay_so_while_a_few_more_run() -> None:
    drafter = Drafter(8)
    size = drafts.INDEXED_PER_STEP // 4
    running = [make_request(range(100, 100 + size)) for _ in range(10)]
    assert [drafter.prepare(running, MAX_ROWS) for _ in range(3)] == [False, False, True]
    more = [make_request([]) for _ in range(drafts.MAX_INDEXED_REQUESTS)]
    assert not drafter.prepare([*running, *more], MAX_ROWS)
    assert len(drafter._drafting) == 10
    assert not drafter.prepare([*running, *more, *more], MAX_ROWS)
    assert not drafter._drafting


def test_a_request_that_failed_while_its_next_token_was_sampled_leaves_no_placeholder_in_drafts() -> None:
    drafter = Drafter(4)
    failing, other = make_request([10, 11, 12]), make_request([10, 11])
    assert drafted(drafter, [failing, other])[other] == [12]
    failing.append_pending()
    failing.fail(EngineError("cancelled"))
    assert failing.tokens[-1] == 12
    assert drafted(drafter, [other]) == {other: [12]}


def test_requests_with_another_salt_have_no_drafts_from_each_other() -> None:
    drafter = Drafter(4)
    own, other = make_request([10, 11, 12, 13]), make_request([10, 11])
    own.cache_salt = "own"
    drafter.add_finished(own)
    assert drafted(drafter, [other]) == {}


def test_only_the_last_requests_with_a_prompt_are_kept() -> None:
    drafter = Drafter(4)
    for token in range(10, 10 + drafts.MAX_KEPT_TEXTS + 1):
        drafter.add_finished(make_request([token] * 3))
    first, second = (make_request([token] * 2) for token in (10, 11))
    assert drafted(drafter, [first, second]) == {second: [11]}


def test_an_index_ends_with_its_requests_and_is_replaced_when_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "MAX_INDEXED_TEXTS", 2)
    drafter = Drafter(4)
    running = [make_request([10, 11, 12, 10, 11]) for _ in range(3)]
    assert [*drafted(drafter, running).values()] == [[12, 10, 11]] * 3
    assert len(set(map(id, drafter._drafting.values()))) == 2
    for request in running[:2]:
        request.is_done = True
    assert drafter.prepare(running[2:], MAX_ROWS) and [*drafter._drafting] == running[2:]
    running[2].is_done = True
    assert drafter.prepare([make_request([], prompt=[9])], MAX_ROWS) and len(drafter._indexes) == 1


def test_the_oldest_finished_requests_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "MAX_KEPT_TOKENS", 60)
    drafter = Drafter(4)
    for first in range(5):
        drafter.add_finished(make_request(range(20), prompt=[first] * 4))
    old, new = (make_request([0, 1, 2], prompt=[first] * 4) for first in (0, 4))
    assert drafted(drafter, [old, new]) == {new: [3, 4, 5, 6]}


@pytest.mark.parametrize(
    ("drafted", "sampled", "expected"),
    [
        ([NOT_DRAFTED, 5, 6], [5, 6, 7], [0, 1, 2]),
        ([NOT_DRAFTED, 5, 6], [5, 9, 7], [0, 1]),
        ([NOT_DRAFTED, 5, 6], [9, 6, 7], [0]),
        ([NOT_DRAFTED, 5, NOT_DRAFTED, NOT_DRAFTED, 8], [4, 6, 1, 8, 2], [0, 2, 3, 4]),
    ],
)
def test_rows_are_right_until_a_draft_differs(drafted: list[int], sampled: list[int], expected: list[int]) -> None:
    assert [*right_rows(drafted, sampled)] == expected


def test_an_engine_without_a_gpu_says_that_it_drafts_nothing(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    Engine(model.cpu(), max_model_len=64)
    assert not caplog.records
    Engine(model.cpu(), max_model_len=64, speculative_tokens=8)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "speculative_tokens = 8" in record.getMessage()


def test_a_draft_takes_no_block_that_running_requests_may_need() -> None:
    settings = {"max_running": 8, "max_prefill_tokens": 64, "max_scored_tokens": 64}
    scheduler = Scheduler(BlockManager(5), prefix_cache=True, **settings)
    request = make_request(range(10))
    scheduler.running.append(request)
    request.blocks = [scheduler.blocks.allocate()]
    assert scheduler.reserve_draft(request, 2) == 2 and len(request.blocks) == 1
    assert scheduler.reserve_draft(request, 40) == 34 and len(request.blocks) == 3
    assert scheduler.blocks.num_free == 1
