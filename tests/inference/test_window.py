"""Who has which row of the window, by hand and in random traffic."""

import random

import pytest

from headrace.inference.embedded.request import Request
from headrace.inference.embedded.window import MORE_ROWS, SHORTEST, Window
from headrace.inference.schema import SamplingParams


def request_of(tokens: int) -> Request:
    return Request(
        [5] * tokens,
        SamplingParams(),
        max_new=1000,
        eos_token_ids=(),
        shared_random=random.Random(0),
        cache_salt=None,
    )


def test_rows_are_filled_once_and_kept() -> None:
    window = Window(1 << 20)
    first, second = request_of(3), request_of(SHORTEST)
    [room] = window.arrange([first, second])
    assert (room.length, room.requests) == (SHORTEST, [first, second])
    assert [(filling.row, filling.request) for filling in room.fillings] == [(0, first), (1, second)]
    [room] = window.arrange([second, first])
    assert (room.requests, room.fillings, room.copies) == ([first, second], [], [])


@pytest.mark.parametrize(("tokens", "length"), [(1, 128), (128, 128), (129, 256), (256, 256), (257, 512), (1000, 1024)])
def test_rooms_are_powers_of_two(tokens: int, length: int) -> None:
    [room] = Window(1 << 20).arrange([request_of(tokens)])
    assert room.length == length


def test_the_last_rows_close_the_gaps_of_those_that_leave() -> None:
    window = Window(1 << 20)
    requests = [request_of(3) for _ in range(5)]
    window.arrange(requests)
    newcomer = request_of(4)
    [room] = window.arrange([requests[1], requests[3], requests[4], newcomer])
    assert room.requests == [requests[3], requests[1], requests[4], newcomer]
    assert room.copies == [(3, 0), (4, 2)]
    assert [(filling.row, filling.request) for filling in room.fillings] == [(3, newcomer)]


def test_whoever_outgrows_a_room_is_filled_anew_in_a_longer_one() -> None:
    window = Window(1 << 20)
    growing, other = request_of(SHORTEST), request_of(7)
    window.arrange([growing, other])
    growing.tokens.append(5)
    rooms = window.arrange([growing, other])
    assert [(room.length, room.requests) for room in rooms] == [(128, [other]), (256, [growing])]
    assert rooms[0].copies == [(1, 0)]
    assert [filling.row for filling in rooms[1].fillings] == [0]


def test_whoever_has_lost_its_blocks_is_filled_anew() -> None:
    window = Window(1 << 20)
    request = request_of(7)
    window.arrange([request])
    request.lose_blocks()
    [room] = window.arrange([request])
    assert [filling.request for filling in room.fillings] == [request]


@pytest.mark.parametrize("seed", range(3))
def test_in_random_traffic_every_row_holds_what_its_request_has(seed: int) -> None:
    """The rows themselves are kept here: (request, losses) as it was when the row was filled."""
    rng = random.Random(seed)
    window = Window(1 << 20)
    rows: dict[int, dict[int, tuple[Request, int]]] = {}
    requests = [request_of(rng.choice([5, 120, 250])) for _ in range(12)]
    for _ in range(400):
        wanted = rng.sample(requests, rng.randint(0, len(requests)))
        for request in wanted:
            request.tokens.append(5)
            if rng.random() < 0.02:
                request.lose_blocks()
        rooms = window.arrange(wanted)
        assert sorted(map(id, wanted)) == sorted(id(request) for room in rooms for request in room.requests)
        for room in rooms:
            stored = rows.setdefault(room.length, {})
            stored.update({target: stored[source] for source, target in room.copies})
            stored.update({filling.row: (filling.request, filling.request.losses) for filling in room.fillings})
            for row, request in enumerate(room.requests):
                assert stored[row] == (request, request.losses)
                assert len(request.tokens) <= room.length


def test_whoever_finds_no_row_within_the_budget_goes_without_until_there_is_one() -> None:
    window = Window(MORE_ROWS * SHORTEST)
    requests = [request_of(20) for _ in range(MORE_ROWS + 2)]
    [room] = window.arrange(requests)
    assert room.requests == requests[:MORE_ROWS]
    [room] = window.arrange(requests[1:])
    assert set(room.requests) == {*requests[1 : MORE_ROWS + 1]}


def test_a_room_that_nobody_is_in_is_given_back() -> None:
    window = Window(MORE_ROWS * 1024)
    window.arrange([request_of(1000)])
    assert window.arrange([]) == []
    [room] = window.arrange([request_of(20)])
    assert (room.length, room.rows) == (SHORTEST, MORE_ROWS)
