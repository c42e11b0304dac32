r"""Rewards for completions in the strict format: whether they keep to it, are right, are brief, use tokens well.

A reward is called with a flat batch of whole groups: prompts, completions, answers and infos side by side. A malformed
completion has no thinking length: it earns nothing by being short, and tells nothing about how long others should be.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

from headrace.environments.arguments import BadArgument, check_flag, check_whole
from headrace.environments.hackable.correctness import Correctness
from headrace.environments.hackable.registry import register_reward
from headrace.environments.hackable.samples import format_of, key_of
from headrace.environments.hackable.thinking import length_in, thinking_lengths
from headrace.environments.hackable.zero_shot import ZeroShot, read_zero_shot
from headrace.environments.rewards.base import warn_of_count

Texts = Sequence[str]
Infos = Sequence[Mapping[str, Any]]


@register_reward
def format_tag_reward(prompts: Texts, completions: Texts, answers: Texts, infos: Infos) -> list[float]:
    """1.0 for the strict format with an answer in its box, else 0.0."""
    return [
        float(format_of(info).parse(completion) is not None)
        for completion, info in zip(completions, infos, strict=True)
    ]


@register_reward("gsm8k_correctness_reward")
class CorrectnessReward:
    r"""1.0 if what is boxed is the reference, in whatever form, else 0.0.

    `timeout` is in seconds, for algebra; with `symbolic` false there is none.
    """

    bounded = True

    def __init__(self, timeout: float = 5.0, processes: int = 2, symbolic: bool = True) -> None:
        self._correctness = Correctness(timeout, processes, symbolic)

    async def __call__(self, prompts: Texts, completions: Texts, answers: Texts, infos: Infos) -> list[float]:
        asked = (self._correctness.is_right(*pair) for pair in zip(completions, answers, strict=True))
        return [float(right) for right in await asyncio.gather(*asked)]

    @property
    def counts(self) -> dict[str, int]:
        return self._correctness.counts

    async def close(self) -> None:
        await self._correctness.close()


@register_reward("length_penalty_reward")
class LengthPenaltyReward:
    """How much shorter than its group's mean a completion thinks: max(0, 1 - L / mean L), L in tokens or in words.

    Malformed completions score 0 and are left out of the mean; with `count_malformed` they count in it, with L = 0.
    Where the mean is 0, all score 0. A group is `group_size` completions, or those in a row whose prompts are equal.
    Tokens are those of `tokenizer_name`, a directory, one in `cache_dir`, or a model on the hub; without it words are
    counted.
    """

    def __init__(
        self,
        tokenizer_name: str | None = None,
        group_size: int | None = None,
        cache_dir: str | None = None,
        count_malformed: bool = False,
    ) -> None:
        if group_size is not None:
            check_whole("group_size", group_size, 1)
        check_flag("count_malformed", count_malformed)
        self._group_size = group_size
        self._count_malformed = count_malformed
        self._length = length_in(tokenizer_name, cache_dir)

    def __call__(self, prompts: Texts, completions: Texts, answers: Texts, infos: Infos) -> list[float]:
        lengths = thinking_lengths(completions, infos, self._length)
        batch = groups(prompts, self._group_size)
        return [score for group in batch for score in brevity(lengths[group], self._count_malformed)]


def groups(prompts: Texts, group_size: int | None) -> list[slice]:
    """Where each group of a flat batch is."""
    if group_size is not None:
        return [slice(start, start + group_size) for start in range(0, len(prompts), group_size)]
    sizes = [len(list(equal)) for _, equal in groupby(prompts)]
    return [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def brevity(lengths: Sequence[int | None], count_malformed: bool = False) -> list[float]:
    """Return max(0, 1 - L / mean L) of one group. None: malformed, which scores 0 whether the mean counts it or not."""
    known = [length or 0 for length in lengths if length is not None or count_malformed]
    mean = sum(known) / len(known) if known else 0.0
    return [max(0.0, 1 - length / mean) if length is not None and mean else 0.0 for length in lengths]


@register_reward("token_utilisation_reward")
class TokenUtilisationReward:
    """Thinking longer than the base model did costs where that was right, and pays where it buys a solution.

    With u = (L - L_base) / max(L_base, 1), clipped to [-1, 1]: `-beta * max(u, 0)` where the base model was right,
    `+beta * max(u, 0)` where it was wrong and this completion is right, else 0; and 0 for what is malformed. The base
    model's record is in `zero_shot_path`; an example without one scores 0, and is counted.
    """

    bounded = True

    def __init__(
        self,
        zero_shot_path: str | Path,
        tokenizer_name: str,
        beta: float = 0.1,
        cache_dir: str | None = None,
        timeout: float = 5.0,
        processes: int = 2,
        symbolic: bool = True,
    ) -> None:
        if isinstance(beta, bool) or not isinstance(beta, int | float) or not 0 <= beta < float("inf"):
            raise BadArgument("expected a number that is not negative", key="beta", value=beta)
        self._records = read_zero_shot(zero_shot_path)
        self._beta = beta
        self._length = length_in(tokenizer_name, cache_dir)
        self._correctness = Correctness(timeout, processes, symbolic)
        self._counts: Counter[str] = Counter()

    async def __call__(self, prompts: Texts, completions: Texts, answers: Texts, infos: Infos) -> list[float]:
        lengths = thinking_lengths(completions, infos, self._length)
        records = [self._records.get(key_of(*entry)) for entry in zip(prompts, answers, infos, strict=True)]
        self._count_missing(records.count(None))
        asked = (self._score(*each) for each in zip(completions, answers, lengths, records, strict=True))
        return list(await asyncio.gather(*asked))

    @property
    def counts(self) -> dict[str, int]:
        return {**self._correctness.counts, **self._counts}

    async def close(self) -> None:
        await self._correctness.close()

    async def _score(self, completion: str, answer: str, length: int | None, record: ZeroShot | None) -> float:
        if record is None or length is None:
            return 0.0
        more = self._beta * max(0.0, utilisation(length, record.thinking_tokens))
        if not more or not (record.correct or await self._correctness.is_right(completion, answer)):
            return 0.0
        return -more if record.correct else more

    def _count_missing(self, missing: int) -> None:
        for _ in range(missing):
            self._counts["without_record"] += 1
            warn_of_count("token_utilisation_reward", "completions without a zero-shot record", self._counts.total())


def utilisation(length: float, base: float) -> float:
    """How much longer than the base model's thoughts, in units of these, from -1 to 1."""
    return max(-1.0, min(1.0, (length - base) / max(base, 1)))
