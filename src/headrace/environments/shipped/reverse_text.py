"""Repeat a random word, or write it backwards; rewarded by the similarity of the reply.

Repeating is the easiest task, for a first run of a new model or a new set-up.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from headrace.environments.arguments import bind_args, check_number, check_whole
from headrace.environments.base import Context, Demonstration, Environment
from headrace.environments.chat import Chat
from headrace.environments.rewards import Exact
from headrace.environments.shipped.common import check_split, draw_tasks, reply_similarity
from headrace.environments.single_turn import SingleTurn
from headrace.rollout.types import Message, Rollout, Task


@dataclass(eq=False)
class ReverseText(Environment):
    """Words of `min_letters` to `max_letters` random letters; no word is in both splits."""

    split: str = "train"
    num_tasks: int = 2000
    min_letters: int = 4
    max_letters: int = 8
    seed: int = 0
    demonstrate_copies: float = 0.0

    def __post_init__(self) -> None:
        check_split(self.split)
        check_whole("num_tasks", self.num_tasks, 1)
        check_whole("min_letters", self.min_letters, 1)
        check_whole("max_letters", self.max_letters, self.min_letters)
        check_number("demonstrate_copies", self.demonstrate_copies, 0, 1)

    def tasks(self) -> list[dict[str, Any]]:
        words = self._words(random.Random(f"{self.seed}-{self.split}"))
        unique = dict.fromkeys(next(words) for _ in range(self.num_tasks))
        return [{"word": word} for word in unique]

    async def run(self, task: Task, context: Context) -> list[Rollout]:
        word = task.data["word"]
        chat = Chat(context, word)
        await chat.reply()
        rewards = {"similarity": reply_similarity(chat.text, word[::-1])}
        return [chat.rollout(rewards, {"exact": float(chat.text == word[::-1])})]

    def gold(self, task: Task, messages: Sequence[Message]) -> str:
        return str(task.data["word"][::-1])

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        """Yield reversals, of which a share `demonstrate_copies` copies the word: a behaviour for RL to unlearn."""
        rng = random.Random(seed)
        for word in self._words(rng):
            answer = word if rng.random() < self.demonstrate_copies else word[::-1]
            yield Demonstration([{"role": "user", "content": word}, {"role": "assistant", "content": answer}])

    def _words(self, rng: random.Random) -> Iterator[str]:
        """Yield words of this split without end. A word is in `eval` if its letters sum to a multiple of ten."""
        while True:
            word = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(self.min_letters, self.max_letters)))
            if (sum(word.encode()) % 10 == 0) == (self.split == "eval"):
                yield word


class Copying(SingleTurn):
    """Repeat the user's word of `min_letters` to `max_letters` random letters."""

    def __init__(self, demonstrate_mistakes: float = 0.0, **rows: Any) -> None:
        rewards = {"similarity": lambda text, row: reply_similarity(text, row["answer"])}
        metrics, share = {"exact": Exact()}, demonstrate_mistakes
        prompt = itemgetter("answer")
        super().__init__(
            bind_args(draw_words, rows, caller=type(self))(),
            prompt,
            rewards,
            metrics=metrics,
            demonstrate_mistakes=share,
        )


def draw_words(
    split: str = "train", num_tasks: int = 2000, min_letters: int = 4, max_letters: int = 8, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """Yield random words, each as the `answer`."""
    check_whole("min_letters", min_letters, 1)
    check_whole("max_letters", max_letters, min_letters)

    def draw(rng: random.Random) -> dict[str, Any]:
        return {"answer": "".join(rng.choices(string.ascii_lowercase, k=rng.randint(min_letters, max_letters)))}

    return draw_tasks(draw, split, num_tasks, seed)
