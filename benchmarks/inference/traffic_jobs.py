"""The requests of the traffic benchmark: real lengths, groups that share a prompt, conversations with tools.

Imports nothing but the standard library, so that vLLM's environment can use it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LENGTHS = Path(__file__).parents[1] / "data/traffic_lengths.json"
"""Tokens of prompts and completions: GSM8K as a 0.5B model answered it in training, and long reasoning."""
GROUP = 8
TURNS = (3, 8)
TURN_PROMPT = (150, 400)
TURN_COMPLETION = (20, 90)
TURN_RESULT = (20, 200)


class Turn(NamedTuple):
    """One request: new tokens after those of the conversation so far, and how many tokens to sample."""

    tokens: list[int]
    completion: int


Conversation = list[Turn]


class Traffic(NamedTuple):
    """A kind of traffic, scaled by `scale` for small models and CPUs."""

    lengths: str
    max_tokens: int
    seeded: bool = False
    """Whether every request has a seed."""
    updates: bool = True
    """Whether weights are updated meanwhile."""
    scale: float = 1.0

    def conversations(self, vocab: int, seed: int = 0) -> Iterator[Conversation]:
        """Yield conversations without end, the same for every engine."""
        rng = random.Random(seed)

        def tokens(count: int) -> list[int]:
            return [rng.randrange(3, vocab) for _ in range(max(1, int(self.scale * count)))]

        def completion(count: int) -> int:
            return max(1, int(self.scale * count))

        if self.lengths == "tools":
            while True:
                prompt = tokens(rng.randint(*TURN_PROMPT))
                for _ in range(GROUP):
                    turns = [Turn(prompt, completion(rng.randint(*TURN_COMPLETION)))]
                    for _ in range(rng.randint(*TURNS) - 1):
                        result = tokens(rng.randint(*TURN_RESULT))
                        turns.append(Turn(result, completion(rng.randint(*TURN_COMPLETION))))
                    yield turns
        lengths = json.loads(LENGTHS.read_text())[self.lengths]
        while True:
            prompt = tokens(rng.choice(lengths["prompt_tokens"]))
            for _ in range(GROUP):
                yield [Turn(prompt, min(self.max_tokens, completion(rng.choice(lengths["completion_tokens"]))))]


TRAFFIC = {
    "gsm8k": Traffic("gsm8k", max_tokens=512),
    "gsm8k, no updates": Traffic("gsm8k", max_tokens=512, updates=False),
    "gsm8k, seeded": Traffic("gsm8k", max_tokens=512, seeded=True),
    "reasoning": Traffic("reasoning", max_tokens=4096),
    "tools": Traffic("tools", max_tokens=512),
}
