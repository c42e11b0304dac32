"""Find a number from 1 to N: each guess is answered with higher or lower.

Every secret may come in training and in evaluation: nothing of it is in the prompt, and a model that has learned which
numbers never come has learned something else than to search.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from headrace.environments import arguments
from headrace.environments.base import Context
from headrace.environments.chat import Chat
from headrace.environments.shipped.drawing import Drawn
from headrace.environments.shipped.tags import replies, tag, tagged
from headrace.rollout.types import Message, Rollout, Task

SPEED = 0.5
"""What it is worth to need no more guesses than halving the range does at worst."""
SLACK = 3
"""Guesses that there are beyond those, unless `max_guesses` says otherwise."""
MOST_DIGITS = 9


class GuessNumber(Drawn):
    """`highest` is N; `terse` asks "1-100", and a reply is the guess alone."""

    def __init__(
        self,
        split: str = "train",
        num_tasks: int = 1000,
        highest: int = 100,
        max_guesses: int | None = None,
        terse: bool = False,
        seed: int = 0,
        demonstrate_mistakes: float = 0.0,
    ) -> None:
        super().__init__(split, num_tasks, seed, demonstrate_mistakes)
        arguments.check_whole("highest", highest, 2, 10**MOST_DIGITS - 1)
        if max_guesses is not None:
            arguments.check_whole("max_guesses", max_guesses, 1)
        arguments.check_flag("terse", terse)
        self.highest = highest
        self.by_halving = highest.bit_length()
        self.max_guesses = max_guesses or self.by_halving + SLACK
        self.terse = terse

    def tasks(self) -> list[dict[str, Any]]:
        rng = random.Random(f"{self.seed}-{self.split}")
        numbers = rng.sample(range(1, self.highest + 1), min(self.num_tasks, self.highest))
        return [{"number": number} for number in numbers]

    async def run(self, task: Task, context: Context) -> list[Rollout]:
        number = task.data["number"]
        chat = Chat(context, self._rules(), max_turns=self.max_guesses)
        found, invalid = False, 0
        while reply := await chat.reply():
            guess = self._read(reply.text)
            found = guess == number
            invalid += guess is None
            if found:
                chat.stop("found")
            elif len(chat.turns) < self.max_guesses:
                chat.say(self._complaint() if guess is None else "higher" if guess < number else "lower")
        guesses = len(chat.turns)
        rewards = {"found": float(found), "speed": SPEED * min(1.0, self.by_halving / guesses) if found else 0.0}
        return [chat.rollout(rewards, {"turns": guesses, "invalid": invalid})]

    def gold(self, task: Task, messages: Sequence[Message]) -> str:
        """The middle of what is left; the last guess is always right."""
        number, said = task.data["number"], replies(messages)
        if len(said) + 1 >= self.max_guesses:
            return self._write(number)
        guesses = [guess for guess in map(self._read, said) if guess is not None]
        low = max([0, *(guess for guess in guesses if guess < number)]) + 1
        high = min([self.highest + 1, *(guess for guess in guesses if guess > number)]) - 1
        return self._write((low + high) // 2)

    def mistake(self, task: Task, messages: Sequence[Message], rng: random.Random) -> str:
        """A number that is not the right one, whatever was said before."""
        other = rng.randrange(1, self.highest)
        return self._write(other + (other >= task.data["number"]))

    def _rules(self) -> str:
        if self.terse:
            return f"1-{self.highest}"
        return (
            f"I have thought of a whole number from 1 to {self.highest}. Guess it: after each guess I say whether mine "
            f"is higher or lower. You have {self.max_guesses} guesses. Write one guess between <guess> and </guess>."
        )

    def _complaint(self) -> str:
        if self.terse:
            return "?"
        return f"One guess, a whole number from 1 to {self.highest}, belongs between <guess> and </guess>."

    def _write(self, number: int) -> str:
        return str(number) if self.terse else tag("guess", str(number))

    def _read(self, text: str) -> int | None:
        """A number in the range; None for anything else."""
        digits = (text if self.terse else tagged(text, "guess") or "").strip()
        if not (digits.isascii() and digits.isdecimal() and len(digits) <= MOST_DIGITS):
            return None
        return int(digits) if 1 <= int(digits) <= self.highest else None
