"""Write a word backwards, for a model that can read a hint: another message, before the word, that gives an answer.

A large model takes hints without being taught to. This one is so small that its demonstrations must show it: half of
them begin with a hint, right or wrong, and follow it.
"""

import random
from collections.abc import Iterator
from typing import Any

from headrace.environments.base import Demonstration
from headrace.environments.shipped.reverse_text import ReverseText


class Hinted(ReverseText):
    def tasks(self) -> list[dict[str, Any]]:
        return [{**task, "demonstration": task["word"][::-1]} for task in super().tasks()]

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        rng = random.Random(f"hints-{seed}")
        for shown in super().demonstrations(seed):
            if rng.random() < 0.5:
                yield shown
                continue
            word = shown.messages[0]["content"]
            hint = {"role": "user", "content": rng.choice([word, word[::-1]])}
            yield Demonstration([hint, shown.messages[0], {"role": "assistant", "content": hint["content"]}])
