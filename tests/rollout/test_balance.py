"""Numbers over workers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.rollout.packing import LOAD_TOLERANCE, spread
from tests.rollout.strategies import FIXED


def shares(costs: list[int], workers: int) -> list[list[int]]:
    """The costs that each worker gets, in its order."""
    return [[costs[item] for item in share] for share in spread(costs, workers)]


def loads(costs: list[int], workers: int) -> list[int]:
    return [sum(share) for share in shares(costs, workers)]


def rounds(costs: list[int], workers: int) -> list[list[int]]:
    """The costliest item of every worker, then the next ones."""
    ordered = sorted(costs, reverse=True)
    return [ordered[start : start + workers] for start in range(0, len(costs), workers)]


@st.composite
def costs_and_workers(draw: st.DrawFn) -> tuple[list[int], int]:
    workers, items = draw(st.integers(1, 6)), draw(st.integers(0, 7))
    return draw(st.lists(st.integers(0, 1000), min_size=workers * items, max_size=workers * items)), workers


@FIXED
@given(costs_and_workers())
def test_every_worker_gets_the_same_number_and_every_item_goes_to_one(drawn: tuple[list[int], int]):
    costs, workers = drawn
    dealt = spread(costs, workers)
    assert sorted(item for share in dealt for item in share) == list(range(len(costs)))
    assert [len(share) for share in dealt] == [len(costs) // workers] * workers


@FIXED
@given(costs_and_workers())
def test_every_worker_starts_with_its_costliest_item(drawn: tuple[list[int], int]):
    for share in shares(*drawn):
        assert share == sorted(share, reverse=True)


@FIXED
@given(costs_and_workers())
def test_loads_differ_by_no_more_than_the_items_of_one_round(drawn: tuple[list[int], int]):
    # Joining the heaviest with the lightest leaves no more than the larger of the two differences; exchanges only help.
    costs, workers = drawn
    within_rounds = [row[0] - row[-1] for row in rounds(costs, workers)]
    assert max(loads(costs, workers)) - min(loads(costs, workers)) <= max(within_rounds, default=0)


@FIXED
@given(costs_and_workers(), st.randoms(use_true_random=False))
def test_the_order_of_the_items_changes_nobodys_load(drawn: tuple[list[int], int], random):
    costs, workers = drawn
    shuffled = random.sample(costs, len(costs))
    assert shares(shuffled, workers) == shares(costs, workers)


def test_the_heaviest_share_joins_the_lightest():
    # rounds (8, 7) and (6, 5): 8 with 5, 7 with 6
    assert shares([5, 8, 6, 7], 2) == [[8, 5], [7, 6]]
    assert spread([5, 8, 6, 7], 2) == [[1, 0], [3, 2]]


def test_the_rounds_that_differ_most_are_joined_first():
    # (30, 20), (9, 1), (8, 6): 30+1 and 20+9, then 31+6 and 29+8; from the left it would be 36 and 38
    assert shares([30, 20, 9, 8, 6, 1], 2) == [[30, 6, 1], [20, 9, 8]]


def test_the_heaviest_worker_exchanges_items_of_one_round():
    # (8, 6, 5), (5, 4, 3), (3, 1, 1): 11, 10, 10 after one join; then 5+5+3, 8+3+1, 6+4+1: loads 13, 12, 11.
    # A 5 for the 4 of the same round makes them equal.
    assert sorted(shares([8, 6, 5, 5, 4, 3, 3, 1, 1], 3)) == [[5, 4, 3], [6, 5, 1], [8, 3, 1]]


def test_an_exchange_crosses_rounds_when_loads_are_far_apart():
    # (10, 4), (4, 4), (2, 0): 10+0+4 and 4+2+4; no exchange within a round helps, but a 4 for the 2 does
    assert sorted(shares([10, 4, 4, 4, 2, 0], 2)) == [[4, 4, 4], [10, 2, 0]]


def test_of_two_exchanges_that_gain_as_much_the_one_that_lengthens_rounds_less_is_made():
    # (13, 8), (5, 5), (1, 1), (0, 0): 19 and 14. A 1 for a 0, or a 5 for a 1: 18 and 15 either way. The first leaves
    # rounds of 13 + 5 + 1 + 1 = 20, the second 13 + 5 + 5 + 0 = 23.
    assert shares([13, 8, 5, 5, 1, 1, 0, 0], 2) == [[13, 5, 0, 0], [8, 5, 1, 1]]


def test_no_item_leaves_its_round_while_loads_are_close():
    # Workers that wait for each other after every item then wait as little as they can.
    costs = np.random.default_rng(0).integers(1000, 2000, 512).tolist()
    dealt = shares(costs, 32)
    assert max(map(sum, dealt)) <= sum(costs) / 32 * (1 + LOAD_TOLERANCE)
    assert [max(items) for items in zip(*dealt, strict=True)] == [row[0] for row in rounds(costs, 32)]


@pytest.mark.parametrize(
    "draw",
    [
        lambda rng: rng.exponential(1e9, 512),
        lambda rng: rng.lognormal(20, 0.8, 512),
        lambda rng: rng.uniform(0, 1e9, 512),
        lambda rng: rng.permutation([1e9, 1e6] * 256),
    ],
    ids=["exponential", "lognormal", "uniform", "two sizes"],
)
def test_512_unequal_items_over_32_workers_are_within_one_percent_of_the_mean(draw):
    costs = draw(np.random.default_rng(3)).astype(int).tolist()
    assert max(loads(costs, 32)) <= 1.01 * sum(costs) / 32


def test_costs_beyond_what_a_float_counts_exactly_still_spread():
    assert shares([2**70, 2**70, 3 * 2**69, 2**69], 2) == [[3 * 2**69, 2**69], [2**70, 2**70]]


def test_one_worker_gets_everything():
    assert shares([1, 3, 2], 1) == [[3, 2, 1]]


def test_a_number_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"\b5\b.*\b2\b"):
        spread([1, 2, 3, 4, 5], 2)
