"""The requests of the traffic benchmark: real lengths, groups that share a prompt, conversations with tools.

Imports nothing but the standard library, so that vLLM's environment can use it.
"""

from __future__ import annotations

import heapq
import itertools
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
STEADY_AFTER = 4
"""Traffic is steady after so many of the longest completions, if the first ones begin at different times."""


class Turn(NamedTuple):
    """One request: new tokens after those of the conversation so far, and how many tokens to sample."""

    tokens: list[int]
    completion: int


Conversation = list[Turn]


def sampled_tokens(turns: Conversation) -> int:
    return sum(turn.completion for turn in turns)


class UnderWay(NamedTuple):
    """A conversation that runs at one moment of steady traffic."""

    number: int
    turns: Conversation
    sampled: int
    """Tokens of its completions so far."""

    def rest(self, rng: random.Random, vocab: int) -> Conversation:
        """Return what is left of it; its first turn has random tokens in the place of those that are sampled."""
        tokens: list[int] = []
        left = self.sampled
        for number, turn in enumerate(self.turns):
            tokens += turn.tokens
            sampled = min(left, turn.completion)
            tokens += [rng.randrange(3, vocab) for _ in range(sampled)]
            if left < turn.completion:
                return [Turn(tokens, turn.completion - left), *self.turns[number + 1 :]]
            left -= sampled
        raise ValueError("the conversation has ended")


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

    def under_way(self, conversations: Iterator[Conversation], running: int) -> list[UnderWay]:
        """Return what runs once traffic is steady, if so many conversations run at once and sample a token in each
        step; long ones are more likely to. Later ones are left in the iterator."""
        rng, steps = random.Random(0), STEADY_AFTER * self.max_tokens
        numbered = enumerate(conversations)
        ends = [
            (rng.randint(1, sampled_tokens(turns)), number, turns)
            for number, turns in itertools.islice(numbered, running)
        ]
        heapq.heapify(ends)
        while ends[0][0] <= steps:
            number, turns = next(numbered)
            heapq.heapreplace(ends, (ends[0][0] + sampled_tokens(turns), number, turns))
        return [UnderWay(number, turns, sampled_tokens(turns) - end + steps) for end, number, turns in ends]

    def steady_conversations(self, vocab: int, running: int) -> Iterator[Conversation]:
        """Yield what is left of those that run at one moment of steady traffic, and then conversations without end."""
        conversations, rng = self.conversations(vocab), random.Random(1)
        for each in self.under_way(conversations, running):
            yield each.rest(rng, vocab)
        yield from conversations


TRAFFIC = {
    "gsm8k": Traffic("gsm8k", max_tokens=512),
    "gsm8k, no updates": Traffic("gsm8k", max_tokens=512, updates=False),
    "gsm8k, seeded": Traffic("gsm8k", max_tokens=512, seeded=True),
    "reasoning": Traffic("reasoning", max_tokens=4096),
    "tools": Traffic("tools", max_tokens=512),
}
