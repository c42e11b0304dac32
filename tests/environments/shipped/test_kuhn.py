"""Kuhn's poker, solved: values worked by hand, and its known equilibria."""

import pytest

from headrace.environments.shipped import kuhn_poker as kuhn
from headrace.environments.shipped.kuhn_poker import (
    INFORMATION_SETS,
    best_responses,
    equilibrium,
    exploitability,
    value,
)


def always(bets: float) -> dict[str, float]:
    return dict.fromkeys(INFORMATION_SETS, bets)


@pytest.mark.parametrize(
    ("history", "higher", "lower"), [("pp", 1, -1), ("bp", 1, 1), ("pbp", -1, -1), ("bb", 2, -2), ("pbb", 2, -2)]
)
def test_what_seat_0_wins_with_the_higher_and_with_the_lower_card(history: str, higher: int, lower: int):
    assert kuhn.is_over(history)
    assert (kuhn.winnings("KJ", history), kuhn.winnings("QK", history)) == (higher, lower)


def test_there_are_six_deals_and_twelve_information_sets():
    assert sorted(kuhn.DEALS) == ["JK", "JQ", "KJ", "KQ", "QJ", "QK"]
    assert len(set(INFORMATION_SETS)) == 12
    assert not any(kuhn.is_over(name[1:]) for name in INFORMATION_SETS)


@pytest.mark.parametrize("alpha", [0.0, 0.1, 1 / 3])
def test_an_equilibrium_cannot_be_exploited_and_is_worth_a_eighteenth(alpha: float):
    assert exploitability(equilibrium(alpha)) == pytest.approx(0, abs=1e-12)
    assert value(equilibrium(alpha), equilibrium()) == pytest.approx(-1 / 18)
    assert best_responses(equilibrium(alpha)) == pytest.approx((-1 / 18, 1 / 18))


def test_outside_the_family_it_can_be_exploited():
    assert exploitability({**equilibrium(), "J": 0.5}) > 0.01
    assert exploitability({**equilibrium(), "Qb": 1.0}) > 0.01


def test_always_passing_loses_a_chip_to_always_betting():
    assert best_responses(always(0.0)) == (1, 1)
    assert exploitability(always(0.0)) == 1


def test_who_always_bets_is_called_with_the_king_and_left_alone_with_the_jack():
    # From either seat: the king wins 2, the queen as often 2 as it loses 2, and the jack folds for 1.
    assert best_responses(always(1.0)) == pytest.approx((1 / 3, 1 / 3))


def test_random_play_is_worth_its_known_exploitability():
    # Seat 0 bets: with the king for 3/2, with the queen for 1/2, with the jack for -1/2. Seat 1 calls or bets: with the
    # king for 2 or 3/2, with the queen for 0 or 1/2; with the jack it folds for -1 or bets for -1/2.
    assert best_responses(always(0.5)) == pytest.approx((1 / 2, 5 / 12))
    assert exploitability(always(0.5)) == pytest.approx(11 / 24)
