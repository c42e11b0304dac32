"""Row assignment of the KV window, by hand and in random traffic."""

import random

import pytest

from headrace.inference.embedded.batch import MIN_ROW_TOKENS, ROW_INCREMENT, KVWindow
from headrace.inference.embedded.request import Request
from headrace.inference.schema import SamplingParams


def request_of(tokens: int) -> Request:
    return Request(
        [5] * tokens,
        SamplingParams(),
        max_new_tokens=1000,
        eos_token_ids=(),
        shared_random=random.Random(0),
        cache_salt=None,
    )


def test_rows_are_filled_once_and_kept() -> None:
    window = KVWindow(1 << 20)
    first, second = request_of(3), request_of(MIN_ROW_TOKENS)
    [bucket] = window.arrange([first, second])
    assert (bucket.length, bucket.requests) == (MIN_ROW_TOKENS, [first, second])
    assert [(fill.row, fill.request) for fill in bucket.fills] == [(0, first), (1, second)]
    [bucket] = window.arrange([second, first])
    assert (bucket.requests, bucket.fills, bucket.copies) == ([first, second], [], [])


@pytest.mark.parametrize(("tokens", "length"), [(1, 128), (128, 128), (129, 256), (256, 256), (257, 512), (1000, 1024)])
def test_row_lengths_are_powers_of_two(tokens: int, length: int) -> None:
    [bucket] = KVWindow(1 << 20).arrange([request_of(tokens)])
    assert bucket.length == length


def test_the_last_rows_fill_the_gaps_of_requests_that_leave() -> None:
    window = KVWindow(1 << 20)
    requests = [request_of(3) for _ in range(5)]
    window.arrange(requests)
    added = request_of(4)
    [bucket] = window.arrange([requests[1], requests[3], requests[4], added])
    assert bucket.requests == [requests[3], requests[1], requests[4], added]
    assert bucket.copies == [(3, 0), (4, 2)]
    assert [(fill.row, fill.request) for fill in bucket.fills] == [(3, added)]


def test_a_request_that_outgrows_its_bucket_moves_to_a_longer_one() -> None:
    window = KVWindow(1 << 20)
    growing, other = request_of(MIN_ROW_TOKENS), request_of(7)
    window.arrange([growing, other])
    growing.tokens.append(5)
    buckets = window.arrange([growing, other])
    assert [(bucket.length, bucket.requests) for bucket in buckets] == [(128, [other]), (256, [growing])]
    assert buckets[0].copies == [(1, 0)]
    assert [fill.row for fill in buckets[1].fills] == [0]


def test_a_row_is_filled_again_after_a_reset() -> None:
    window = KVWindow(1 << 20)
    request = request_of(7)
    window.arrange([request])
    request.reset_computed()
    [bucket] = window.arrange([request])
    assert [fill.request for fill in bucket.fills] == [request]


@pytest.mark.parametrize("seed", range(3))
def test_in_random_traffic_every_row_is_its_requests_own(seed: int) -> None:
    """The rows themselves are kept here: (request, resets) as it was when the row was filled."""
    rng = random.Random(seed)
    window = KVWindow(1 << 20)
    rows: dict[int, dict[int, tuple[Request, int]]] = {}
    requests = [request_of(rng.choice([5, 120, 250])) for _ in range(12)]
    for _ in range(400):
        wanted = rng.sample(requests, rng.randint(0, len(requests)))
        for request in wanted:
            request.tokens.append(5)
            if rng.random() < 0.02:
                request.reset_computed()
        buckets = window.arrange(wanted)
        assert sorted(map(id, wanted)) == sorted(id(request) for bucket in buckets for request in bucket.requests)
        for bucket in buckets:
            stored = rows.setdefault(bucket.length, {})
            stored.update({target: stored[source] for source, target in bucket.copies})
            stored.update({fill.row: (fill.request, fill.request.resets) for fill in bucket.fills})
            for row, request in enumerate(bucket.requests):
                assert stored[row] == (request, request.resets)
                assert len(request.tokens) <= bucket.length


def test_requests_beyond_the_budget_get_a_row_once_there_is_one() -> None:
    window = KVWindow(ROW_INCREMENT * MIN_ROW_TOKENS)
    requests = [request_of(20) for _ in range(ROW_INCREMENT + 2)]
    [bucket] = window.arrange(requests)
    assert bucket.requests == requests[:ROW_INCREMENT]
    [bucket] = window.arrange(requests[1:])
    assert set(bucket.requests) == {*requests[1 : ROW_INCREMENT + 1]}


def test_an_empty_bucket_is_dropped() -> None:
    window = KVWindow(ROW_INCREMENT * 1024)
    window.arrange([request_of(1000)])
    assert window.arrange([]) == []
    [bucket] = window.arrange([request_of(20)])
    assert (bucket.length, bucket.rows) == (MIN_ROW_TOKENS, ROW_INCREMENT)
