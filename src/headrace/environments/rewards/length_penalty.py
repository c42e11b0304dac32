"""Reward for thinking shorter than the group's mean.

A malformed completion has no thinking length: it earns nothing by being short, and does not change the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby

from headrace.environments.arguments import check_flag, check_whole
from headrace.environments.rewards.base import Data, group_reward
from headrace.environments.rewards.registry import register_reward
from headrace.environments.rewards.thinking import length_in, thinking_lengths


@register_reward("length_penalty_reward")
@group_reward
class LengthPenalty:
    """max(0, 1 - L / mean L) within the group, L being the thinking length in tokens or words.

    Malformed completions score 0 and are left out of the mean; with `count_malformed` they count in it, with L = 0.
    Where the mean is 0, all score 0. A group is `group_size` completions, or consecutive ones with equal prompts.
    Tokens are those of `tokenizer_name`, a directory, one in `cache_dir`, or a model on the hub; unset, words are
    counted.
    """

    name = "length_penalty"

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

    def __call__(self, texts: Sequence[str], data: Sequence[Data]) -> list[float]:
        lengths = thinking_lengths(texts, data, self._length)
        if self._group_size is not None:
            sizes = [self._group_size] * -(-len(texts) // self._group_size)
        else:
            sizes = [len(list(equal)) for _, equal in groupby(data, key=lambda row: row.get("prompt", row))]
        groups = [lengths[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
        return [score for group in groups for score in brevity(group, self._count_malformed)]


def brevity(lengths: Sequence[int | None], count_malformed: bool = False) -> list[float]:
    """Return max(0, 1 - L / mean L) of one group. None: malformed, which scores 0 whether the mean counts it or not."""
    counted = [length or 0 for length in lengths if length is not None or count_malformed]
    mean = sum(counted) / len(counted) if counted else 0.0
    return [max(0.0, 1 - length / mean) if length is not None and mean else 0.0 for length in lengths]
