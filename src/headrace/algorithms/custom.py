"""Custom: a function of your own says what each rollout of a group is credited with.

    A = function(group)

It gets the group's views, with rewards, messages, turns and samples, and gives one entry for each, in their order: a
number for all completion tokens, or a number for each of them, the rollout's samples end to end.

Left out on purpose: calls to other models and a state from group to group. They need an algorithm, a subclass of
`headrace.algorithms.base.Algorithm`, which a run file names by its import path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from headrace.algorithms.base import Algorithm, RolloutView
from headrace.algorithms.user_function import name_of, numbers


class Custom(Algorithm):
    def __init__(self, function: Callable[[Sequence[RolloutView]], Any]) -> None:
        self._function = function

    async def score_group(self, group: Sequence[RolloutView]) -> None:
        for rollout, entry in zip(group, self._entries(group), strict=True):
            credit = numbers(entry, self._function)
            try:
                rollout.assign_advantages(credit)
            except ValueError as error:
                raise ValueError(f"{name_of(self._function)} gave {error}") from error

    def _entries(self, group: Sequence[RolloutView]) -> list[Any]:
        given = self._function(group)
        in_order = isinstance(given, Iterable) and not isinstance(given, Mapping | Set | str | bytes)
        entries = list(given) if in_order else None
        if entries is None or len(entries) != len(group):
            what = f"a {type(given).__name__}" if entries is None else f"{len(entries)} entries"
            raise ValueError(
                f"{name_of(self._function)} gave {what} for a group of {len(group)} rollouts: "
                "it must give one entry for each, a number or one number per completion token"
            )
        return entries
