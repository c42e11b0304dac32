"""Kuhn poker (H. W. Kuhn, 1950) for two agents: one policy in both seats, or in one of them against a fixed player.

Two players put in one chip each and get one of three cards. The player to act passes or bets one more chip: without a
bet a pass is a check, after a bet it is a fold, and a bet is a call. Without a fold, the higher card wins the pot.

A history is the sequence of actions, `p` or `b` each. A strategy gives for every information set, a card and a history
(`Q`, `Kb`, `Jpb`), the probability of a bet; one table has the strategies of both seats. Everything is small enough to
be enumerated, so that equilibria and the exploitability of a strategy are exact: 6 deals, 12 information sets, 64 pure
strategies of a seat. Both splits have the same deals.

A rollout is one seat's side of a deal; its reward is the chips that it won, so that the rewards of a deal sum to zero.
A reply that names no legal action ends the game: it loses the maximum, two chips, to the other seat. A seat that has
not acted by then has no rollout.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from typing import Any

from headrace.environments import arguments
from headrace.environments.base import Context, Environment
from headrace.environments.chat import Chat
from headrace.environments.shipped.common import check_split, extract_tagged, tag
from headrace.rollout.types import Message, Rollout, Task

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
    """Return the chips that seat 0 wins; seat 1 wins the negative of that."""
    if history.endswith(BET + PASS):  # the last player has folded
        return 1 if seat_to_act(history) == 0 else -1
    stake = 2 if BET in history else 1
    return stake if CARDS.index(deal[0]) > CARDS.index(deal[1]) else -stake


def value(first: Strategy, second: Strategy) -> float:
    """Return the chips that seat 0 wins on average, playing `first` against `second`."""
    return sum(_value(deal, "", (first, second)) for deal in DEALS) / len(DEALS)


def best_responses(strategy: Strategy) -> tuple[float, float]:
    """Return the chips that a best response wins on average against a strategy: from seat 0, and from seat 1."""
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


SELF = "self"
OPPONENTS: dict[str, Strategy] = {"random": dict.fromkeys(INFORMATION_SETS, 0.5), "nash": equilibrium()}
FORFEIT_CHIPS = 2
"""Chips that an illegal action loses: the most that a legal one can lose."""
NAMES = {"J": "jack", "Q": "queen", "K": "king"}
RULES = (
    "You play poker with three cards: jack, queen and king. The king is the highest, the jack the lowest. You and your "
    "opponent have put one chip each into the pot and got one card each. If nobody folds, the higher card wins the pot."
)


@dataclass(eq=False)
class KuhnPoker(Environment):
    """Games against an `opponent`: `self`, or a fixed player: `random` bets half of the time, `nash` is an equilibrium.

    Against a fixed player each deal is played `rounds` times from either seat; the opponent's random numbers are part
    of the task. A `terse` prompt is "Q", "Qp" or "Qb", and a terse reply is "p" or "b", for the smallest models.
    Demonstrations with `demonstrate_mistakes = 0.5` are random legal play.
    """

    split: str = "train"
    opponent: str = SELF
    rounds: int = 16
    terse: bool = False
    seed: int = 0
    demonstrate_mistakes: float = 0.0

    def __post_init__(self) -> None:
        check_split(self.split)
        arguments.check_choice("opponent", self.opponent, (SELF, *OPPONENTS))
        arguments.check_whole("rounds", self.rounds, 1)
        arguments.check_flag("terse", self.terse)
        arguments.check_mistakes(self.demonstrate_mistakes)
        self.fixed_player = OPPONENTS.get(self.opponent)
        self._information_sets = {_user_texts(self.situation(name)): name for name in INFORMATION_SETS}

    def tasks(self) -> list[dict[str, Any]]:
        """Return the six deals; against a fixed player, from each seat, with random numbers for its two decisions."""
        if self.fixed_player is None:
            return [{"deal": deal} for deal in DEALS]
        rng = random.Random(f"{self.seed}-{self.split}")
        tasks = [
            {"deal": deal, "seat": seat, "round": number, "luck": [rng.random(), rng.random()]}
            for number in range(self.rounds)
            for deal in DEALS
            for seat in (0, 1)
        ]
        rng.shuffle(tasks)  # so that the first few tasks cover all kinds
        return tasks

    async def run(self, task: Task, context: Context) -> list[Rollout]:
        deal: str = task.data["deal"]
        seats = (0, 1) if self.fixed_player is None else (task.data["seat"],)
        chats: dict[int, Chat] = {}
        history, offender = "", None
        while not is_over(history) and offender is None:
            seat = seat_to_act(history)
            if seat in seats:
                action = await self._ask(chats, deal[seat], history, context)
            else:
                action = self._opponent_action(task, deal[seat] + history)
            if action is None:
                offender = seat
            else:
                history += action
        won = winnings(deal, history) if offender is None else FORFEIT_CHIPS * (-1 if offender == 0 else 1)
        return [
            chat.rollout({"chips": float(-won if seat else won)}, {"illegal": float(seat == offender)})
            for seat, chat in chats.items()
        ]

    async def _ask(self, chats: dict[int, Chat], card: str, history: str, context: Context) -> str | None:
        """Return the policy's action; None if it is not legal."""
        seat = seat_to_act(history)
        if seat in chats:
            chats[seat].say(self._state(history))
        else:
            chats[seat] = Chat(context, self._question(card, history), agent=f"player_{seat}")
        reply = await chats[seat].reply()
        if reply is None or reply.truncated:
            return None
        named = reply.text.strip() if self.terse else (extract_tagged(reply.text, "action") or "").strip().lower()
        return next((action for action, name in self._names(history).items() if name == named), None)

    def _opponent_action(self, task: Task, information_set: str) -> str:
        assert self.fixed_player is not None
        luck = task.data["luck"][len(information_set) // 3]  # only a second decision has a history of two
        return BET if luck < self.fixed_player[information_set] else PASS

    def situation(self, information_set: str) -> list[Message]:
        """Return the conversation in which the policy acts at an information set."""
        card, history = information_set[0], information_set[1:]
        question = {"role": "user", "content": self._question(card, history[: seat_to_act(history)])}
        if len(history) < 2:
            return [question]
        reply = {"role": "assistant", "content": self.write(history[0], "")}
        return [question, reply, {"role": "user", "content": self._state(history)}]

    def write(self, action: str, history: str) -> str:
        """Return a reply that names this action."""
        name = self._names(history)[action]
        return name if self.terse else tag("action", name)

    def gold(self, task: Task, messages: Sequence[Message]) -> str:
        """Return the likelier action of an equilibrium; against a fixed player, the one that wins most of this task."""
        name = self._information_sets[_user_texts(messages)]
        return self.write(self._best(task, name), name[1:])

    def mistake(self, task: Task, messages: Sequence[Message], rng: random.Random) -> str:
        """Return the other legal action."""
        name = self._information_sets[_user_texts(messages)]
        return self.write(PASS if self._best(task, name) == BET else BET, name[1:])

    def _best(self, task: Task, information_set: str) -> str:
        if self.fixed_player is None:
            return BET if equilibrium()[information_set] >= 0.5 else PASS
        return max((PASS, BET), key=lambda action: self._max_winnings(task, information_set[1:] + action))

    def _max_winnings(self, task: Task, history: str) -> int:
        """Return the most that can be won from here against an opponent whose random numbers are known."""
        deal, own = task.data["deal"], task.data["seat"]
        if is_over(history):
            return winnings(deal, history) * (-1 if own else 1)
        seat = seat_to_act(history)
        actions = (PASS, BET) if seat == own else (self._opponent_action(task, deal[seat] + history),)
        return max(self._max_winnings(task, history + action) for action in actions)

    def _question(self, card: str, history: str) -> str:
        if self.terse:
            return card + history
        return f"{RULES} You hold the {NAMES[card]}. {self._state(history)}"

    def _state(self, history: str) -> str:
        """Return the opponent's last action and the legal actions, in words."""
        if self.terse:
            return history[-1:]
        done = f"Your opponent {'bets' if history[-1] == BET else 'checks'}." if history else "You begin."
        return f"{done} Write {self.write(PASS, history)}, or {self.write(BET, history)} for one more chip."

    def _names(self, history: str) -> dict[str, str]:
        """Return the names of passing and betting after this history."""
        if self.terse:
            return {PASS: PASS, BET: BET}
        return {PASS: "fold", BET: "call"} if history.endswith(BET) else {PASS: "check", BET: "bet"}


def _user_texts(messages: Sequence[Message]) -> tuple[str, ...]:
    return tuple(message["content"] for message in messages if message["role"] == "user")
