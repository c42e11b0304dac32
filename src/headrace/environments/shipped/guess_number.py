"""Find a number from 1 to N; the feedback to a guess is "higher" or "lower".

Both splits have the same secrets: the prompt does not depend on them, and a model that has learned which numbers never
occur has not learned to search.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.environments import arguments
from headrace.environments.base import Context
from headrace.environments.chat import Chat
from headrace.environments.shipped.common import DrawnEnvironment, replies
from headrace.rollout.types import Message, Rollout, Task

SPEED_REWARD = 0.5
"""Reward for needing no more guesses than bisection does at worst."""
SLACK_GUESSES = 3
"""Guesses beyond those of bisection, unless `max_guesses` is set."""
MAX_DIGITS = 9


@dataclass(eq=False)
class GuessNumber(DrawnEnvironment):
    """Numbers from 1 to `highest`; a `terse` prompt is "1-100", and a terse reply is the guess alone."""

    highest: int = 100
    max_guesses: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.check_whole("highest", self.highest, 2, 10**MAX_DIGITS - 1)
        if self.max_guesses is not None:
            arguments.check_whole("max_guesses", self.max_guesses, 1)
        self.bisection_guesses = self.highest.bit_length()
        self.guesses = self.max_guesses or self.bisection_guesses + SLACK_GUESSES

    def tasks(self) -> list[dict[str, Any]]:
        rng = random.Random(f"{self.seed}-{self.split}")
        numbers = rng.sample(range(1, self.highest + 1), min(self.num_tasks, self.highest))
        return [{"number": number} for number in numbers]

    async def run(self, task: Task, context: Context) -> list[Rollout]:
        number = task.data["number"]
        chat = Chat(context, self._rules(), max_turns=self.guesses)
        usage = f"One guess, a whole number from 1 to {self.highest}, belongs between <guess> and </guess>."
        usage = "?" if self.terse else usage
        found, invalid = False, 0
        while reply := await chat.reply():
            guess = self._read(reply.text)
            found = guess == number
            invalid += guess is None
            if found:
                chat.stop("found")
            elif len(chat.turns) < self.guesses:
                chat.say(usage if guess is None else "higher" if guess < number else "lower")
        guesses = len(chat.turns)
        speed = min(1.0, self.bisection_guesses / guesses) if found else 0.0
        rewards = {"found": float(found), "speed": SPEED_REWARD * speed}
        return [chat.rollout(rewards, {"turns": guesses, "invalid": invalid})]

    def gold(self, task: Task, messages: Sequence[Message]) -> str:
        """Return the middle of the remaining range; the last guess is the number."""
        number, earlier = task.data["number"], replies(messages)
        if len(earlier) + 1 >= self.guesses:
            return self.write("guess", number)
        guesses = [guess for guess in map(self._read, earlier) if guess is not None]
        low = max([0, *(guess for guess in guesses if guess < number)]) + 1
        high = min([self.highest + 1, *(guess for guess in guesses if guess > number)]) - 1
        return self.write("guess", (low + high) // 2)

    def mistake(self, task: Task, messages: Sequence[Message], rng: random.Random) -> str:
        """Return any number but the right one."""
        other = rng.randrange(1, self.highest)
        return self.write("guess", other + (other >= task.data["number"]))

    def _rules(self) -> str:
        if self.terse:
            return f"1-{self.highest}"
        return (
            f"I have thought of a whole number from 1 to {self.highest}. Guess it: after each guess I say whether mine "
            f"is higher or lower. You have {self.guesses} guesses. Write one guess between <guess> and </guess>."
        )

    def _read(self, text: str) -> int | None:
        """Return the guess; None if it is not a number in the range."""
        digits = self.read(text, "guess")
        if not (digits.isascii() and digits.isdecimal() and len(digits) <= MAX_DIGITS):
            return None
        return int(digits) if 1 <= int(digits) <= self.highest else None
