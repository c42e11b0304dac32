"""Games in Gymnasium's form that know nothing of it, with what reads and writes them; and a player."""

from __future__ import annotations

import random
import threading
from typing import Any


class Count:
    """Count up to a number that the seed says: one point for each right step, and the end."""

    def __init__(self, highest: int = 3) -> None:
        self.highest = highest
        self.closed = False
        self.threads: set[int] = set()
        made.append(self)

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self.now = seed % 2
        return f"You are at {self.now}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.threads.add(threading.get_ident())
        right = action == str(self.now + 1)
        self.now += right
        return f"You are at {self.now}.", float(right), self.now >= self.highest, False, {}

    def close(self) -> None:
        self.closed = True


made: list[Count] = []


class OldForm:
    def reset(self, seed: int) -> str:
        return "hello"


def double(text: str, game: Count) -> str:
    """An action that is said in half."""
    return str(2 * int(text))


def shout(observation: str, info: dict[str, Any], game: Count) -> str:
    return observation.upper()


def first_free(text: str, rng: random.Random) -> str:
    """A player of tic-tac-toe who takes the first square of those that are named last."""
    moves = text.rpartition("Available Moves: ")[2]
    return moves.split(",")[0].strip(" '")
