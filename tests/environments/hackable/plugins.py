"""Plugins of a user's own, named by import path."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

from headrace.environments.hackable import Objective, TrainingSample

NUMBER = 3


def numbers(count: int = 2, seed: int = 0) -> Iterator[TrainingSample]:
    for number in range(seed, seed + count):
        yield TrainingSample(f"Write {number}.", str(number))


class Words:
    """An iterable, and no generator."""

    def __init__(self, words: list[str]) -> None:
        self._words = words

    def __iter__(self) -> Iterator[str]:
        return iter(self._words)


def shouting(prompts, completions, answers, infos, weight: float = 1.0) -> list[float]:
    return [weight * completion.isupper() for completion in completions]


async def polite(prompts, completions, answers, infos, **kwargs) -> list[float]:
    return [float(kwargs.get("word", "please") in completion) for completion in completions]


class Longest:
    def __init__(self, limit: int) -> None:
        self._limit = limit

    def __call__(self, prompts, completions, answers, infos) -> list[float]:
        return [min(1.0, len(completion) / self._limit) for completion in completions]


class NotAReward:
    pass


class Shout(Objective):
    def reward_names(self) -> list[str]:
        return ["tests.environments.hackable.plugins:shouting"]

    def combine_rewards(self, scores, samples) -> list[float]:
        return [2 * score for score in scores["tests.environments.hackable.plugins:shouting"]]

    def extra_reward(self, samples, completions) -> list[float]:
        return [0.25 * completion.endswith("!") for completion in completions]


def fussy(prompts, completions, answers, infos) -> list[float]:
    """Fails in the way that one of the completions names."""
    if "raise" in completions:
        raise KeyError("no such entry")
    while "hang" in completions:
        time.sleep(0.01)
    scores = [math.nan if completion == "nan" else 1.0 for completion in completions]
    return scores[1:] if "fewer" in completions else scores


class Fussy(Objective):
    def reward_names(self) -> list[str]:
        return ["tests.environments.hackable.plugins:fussy"]

    def combine_rewards(self, scores, samples) -> list[float]:
        return list(scores["tests.environments.hackable.plugins:fussy"])
