"""Kuhn poker (H. W. Kuhn, 1950), solved exactly: rules, equilibria, and the exploitability of a strategy.

Two players put in one chip each and get one of three cards. The player to act passes or bets one more chip: without a
bet a pass is a check, after a bet it is a fold, and a bet is a call. Without a fold, the higher card wins the pot.

A history is the sequence of actions, `p` or `b` each. A strategy gives for every information set, a card and a history
(`Q`, `Kb`, `Jpb`), the probability of a bet; one table has the strategies of both seats. Everything is small enough to
be enumerated: 6 deals, 12 information sets, 64 pure strategies of a seat.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import permutations, product

CARDS = "JQK"
PASS, BET = "p", "b"
DEALS = tuple("".join(pair) for pair in permutations(CARDS, 2))
"""The card of seat 0, then that of seat 1."""
DECISIONS = ("", "p", "b", "pb")
"""Histories after which a player acts: seat 0 first and last, seat 1 between."""
INFORMATION_SETS = tuple(card + history for history in DECISIONS for card in CARDS)

Strategy = Mapping[str, float]
"""By information set, the probability of a bet."""


def seat_to_act(history: str) -> int:
    return len(history) % 2


def is_over(history: str) -> bool:
    return history not in DECISIONS


def winnings(deal: str, history: str) -> int:
    """Return what seat 0 wins, in chips; seat 1 wins the negative of it."""
    if history.endswith(BET + PASS):  # the last player has folded
        return 1 if seat_to_act(history) == 0 else -1
    stake = 2 if BET in history else 1
    return stake if CARDS.index(deal[0]) > CARDS.index(deal[1]) else -stake


def value(first: Strategy, second: Strategy) -> float:
    """Return what seat 0 wins on average, playing `first` against `second`."""
    return sum(_value(deal, "", (first, second)) for deal in DEALS) / len(DEALS)


def best_responses(strategy: Strategy) -> tuple[float, float]:
    """Return what a best response wins against a strategy: from seat 0, and from seat 1."""
    from_first = max(value(pure, strategy) for pure in _pure_strategies(0))
    from_second = max(-value(strategy, pure) for pure in _pure_strategies(1))
    return from_first, from_second


def exploitability(strategy: Strategy) -> float:
    """Return the chips per game that a best response wins, averaged over both seats; 0 at equilibrium."""
    return sum(best_responses(strategy)) / 2


def equilibrium(alpha: float = 1 / 3) -> dict[str, float]:
    """Return an equilibrium. Seat 0 bluffs with probability `alpha`, any from 0 to 1/3; that of seat 1 is unique."""
    always_same = {"Jb": 0.0, "Kb": 1.0, "Jpb": 0.0, "Kpb": 1.0, "Q": 0.0, "Qp": 0.0, "Kp": 1.0}
    return {**always_same, "J": alpha, "K": 3 * alpha, "Qpb": alpha + 1 / 3, "Jp": 1 / 3, "Qb": 1 / 3}


def _value(deal: str, history: str, strategies: tuple[Strategy, Strategy]) -> float:
    if is_over(history):
        return winnings(deal, history)
    seat = seat_to_act(history)
    bets = strategies[seat][deal[seat] + history]
    return (1 - bets) * _value(deal, history + PASS, strategies) + bets * _value(deal, history + BET, strategies)


def _pure_strategies(seat: int) -> Iterator[dict[str, float]]:
    own = [card + history for history in DECISIONS for card in CARDS if seat_to_act(history) == seat]
    for choices in product((0.0, 1.0), repeat=len(own)):
        yield dict(zip(own, choices, strict=True))
