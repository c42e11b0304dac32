"""What the engines are asked for: prompts of random tokens, and how many tokens to sample after each."""

from __future__ import annotations

import random
from typing import NamedTuple


class Job(NamedTuple):
    """One request."""

    prompt: list[int]
    completion: int


class Load(NamedTuple):
    """Many requests, of which so many run at a time."""

    name: str
    requests: int
    concurrent: int
    prompts: tuple[int, int]
    """Shortest and longest; anything between is as likely."""
    completions: tuple[int, int]
    group: int = 1
    """Requests that share a prompt."""

    @property
    def longest(self) -> int:
        return self.prompts[1] + self.completions[1]

    def jobs(self, vocab: int, seed: int) -> list[Job]:
        """The same for every engine; another seed gives other prompts, which nobody can remember."""
        rng = random.Random(seed)
        jobs = []
        for _ in range(self.requests // self.group):
            prompt = [rng.randrange(vocab) for _ in range(rng.randint(*self.prompts))]
            jobs += [Job(prompt, rng.randint(*self.completions)) for _ in range(self.group)]
        return jobs


def loads(concurrent: int, waves: int, prompt: int, completion: int) -> list[Load]:
    """Equal lengths, lengths spread over a factor of eight with the same means, and groups of eight."""

    def spread(mean: int) -> tuple[int, int]:
        return max(2, mean * 2 // 9), mean * 16 // 9

    requests = waves * concurrent
    return [
        Load("equal", requests, concurrent, (prompt, prompt), (completion, completion)),
        Load("mixed", 2 * requests, concurrent, spread(prompt), spread(completion)),
        Load("groups of 8", requests, concurrent, (prompt, prompt), (completion, completion), group=8),
    ]
