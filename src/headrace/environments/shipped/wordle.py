"""Find a word of five letters in six guesses.

The feedback for each letter is G if it is in its place, Y if it is elsewhere in the word, else X.

A guess that is not a word uses up a turn. Left out: other lengths, and the rule that hints must be used.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.environments import arguments
from headrace.environments.base import Context
from headrace.environments.chat import Chat
from headrace.environments.shipped.common import DrawnEnvironment, draw_tasks, replies, word_list
from headrace.rollout.types import Message, Rollout, Task

LETTERS = 5
SOLVED = "G" * LETTERS
PARTIAL_REWARD = 0.2
"""Reward of a last guess with all letters in place; a letter that is elsewhere counts half."""
FORMAT_REWARD = 0.1
"""Reward if every guess was a word."""
RULES = """\
Guess a word of five letters. After each guess you are told about each of its letters:
G: it is in this place of the word
Y: it is in the word, but in another place
X: it is not in the word, or not once more
You have {guesses} guesses. Write one guess between <guess> and </guess>."""


@dataclass(eq=False)
class Wordle(DrawnEnvironment):
    """A word of five letters per task; a `terse` prompt has no rules, and a terse reply is the guess alone."""

    max_guesses: int = 6

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.check_whole("max_guesses", self.max_guesses, 1)

    def tasks(self) -> list[dict[str, Any]]:
        return list(draw_tasks(lambda rng: {"word": rng.choice(secret_words())}, self.split, self.num_tasks, self.seed))

    async def run(self, task: Task, context: Context) -> list[Rollout]:
        rules = "?" * LETTERS if self.terse else RULES.format(guesses=self.max_guesses)
        chat = Chat(context, rules, max_turns=self.max_guesses)
        marks, invalid = "", 0
        while reply := await chat.reply():
            guess = self.read(reply.text, "guess").lower()
            problem = self._problem(guess)
            marks = "" if problem else feedback(guess, task.data["word"])
            invalid += bool(problem)
            if marks == SOLVED:
                chat.stop("solved")
            elif left := self.max_guesses - len(chat.turns):
                report = f"{' '.join(guess)}\n{' '.join(marks)}\n{left} {'guesses' if left > 1 else 'guess'} left."
                chat.say(problem or (marks if self.terse else report))
        guesses = len(chat.turns)
        rewards = {
            "solved": float(marks == SOLVED),
            "partial": PARTIAL_REWARD * (marks.count("G") + marks.count("Y") / 2) / LETTERS,
            "format": FORMAT_REWARD * (1 - invalid / guesses),
        }
        return [chat.rollout(rewards, {"turns": guesses, "invalid": invalid})]

    def gold(self, task: Task, messages: Sequence[Message]) -> str:
        """Return a word that is consistent with the feedback so far; the last guess is the secret."""
        secret, guesses = task.data["word"], replies(messages)
        if len(guesses) + 1 >= self.max_guesses:
            return self.write("guess", secret)
        words = [self.read(guess, "guess").lower() for guess in guesses]
        hints = {word: feedback(word, secret) for word in words if not self._problem(word)}
        fitting = [word for word in secret_words() if all(feedback(own, word) == hint for own, hint in hints.items())]
        return self.write("guess", random.Random(f"{task.key}-{len(guesses)}").choice(fitting))

    def mistake(self, task: Task, messages: Sequence[Message], rng: random.Random) -> str:
        """Return any word but the secret."""
        while (word := rng.choice(secret_words())) == task.data["word"]:
            pass
        return self.write("guess", word)

    def _problem(self, guess: str) -> str:
        """Return the feedback to an invalid guess, "" for a valid one. Only well-formed guesses are repeated."""
        if len(guess) != LETTERS or not (guess.isascii() and guess.isalpha()):
            return "?" if self.terse else "One guess, a word of five letters, belongs between <guess> and </guess>."
        if guess not in accepted_words():
            return "?" if self.terse else f"{guess} is not a known word."
        return ""


def feedback(guess: str, secret: str) -> str:
    """Return G, Y or X for each letter; Y only as often as the secret has the letter beyond those in their place."""
    elsewhere = [wanted for letter, wanted in zip(guess, secret, strict=True) if letter != wanted]
    marks = ""
    for letter, wanted in zip(guess, secret, strict=True):
        if letter == wanted:
            marks += "G"
        elif letter in elsewhere:
            elsewhere.remove(letter)
            marks += "Y"
        else:
            marks += "X"
    return marks


def secret_words() -> tuple[str, ...]:
    """Return the secrets: common words in their basic form."""
    return word_list("answers")


@functools.cache
def accepted_words() -> frozenset[str]:
    """Return the words that may be guessed."""
    return frozenset((*secret_words(), *word_list("guesses")))
