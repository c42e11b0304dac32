"""Does an algorithm without a `state` keep nothing? What it has seen before must not show in what it writes.

A run restarts, and credits groups at the same time and in any order: whatever is remembered elsewhere is lost, or
mixed up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.tools.check_algorithm.cases import Case
from headrace.tools.check_algorithm.comparing import unlike
from headrace.tools.check_algorithm.playing import Played
from headrace.tools.check_algorithm.trial import Trial


async def traces_of_memory(trial: Trial, together: Sequence[Played]) -> list[str]:
    """`together` is the one batch of all sound cases."""
    alone = [trial.played_alone(case) for case in trial.sound_cases]
    found = _unlike_by_group(alone, together, "credited after other groups")
    async with trial.session() as session:
        at_once = await session.credit_at_once(trial.sound_cases)
    found += _unlike_by_group(alone, at_once, "credited at the same time as other groups")
    again = await _after_mirrored(trial, await _unseen(trial, together))
    for before, after in zip(together, again, strict=True):
        if name := unlike(before.written, after.written, exactly=True):
            found.append(f"{before.case.name!r}: after another group of its task, it has other {name}")
    return found


def _unlike_by_group(expected: Iterable[Played], seen: Iterable[Played], when: str) -> list[str]:
    pairs = zip(expected, seen, strict=True)
    return [
        f"{one.case.name!r}: {when}, it has other {name}"
        for one, other in pairs
        if (name := unlike(one.by_group, other.by_group, exactly=True))
    ]


async def _unseen(trial: Trial, together: Sequence[Played]) -> list[Case]:
    """The cases under names of tasks that no instance has met, so that what a class remembers shows too.

    Under their own names if names have a part in the credit, as the seed of a generator, say.
    """
    renamed = await trial.play([_renamed(case, "by another name") for case in trial.sound_cases])
    pairs = zip(together, renamed, strict=True)
    if any(unlike(one.written, other.written, exactly=True) for one, other in pairs):
        return trial.sound_cases
    return [_renamed(case, "unseen") for case in trial.sound_cases]


def _renamed(case: Case, how: str) -> Case:
    return case.of_task(f"{case.task.key}, {how}")


async def _after_mirrored(trial: Trial, cases: Sequence[Case]) -> list[Played]:
    async with trial.session() as session:
        for batch in ([case.mirrored() for case in cases], cases):
            credited = [await session.credit(case) for case in batch]
            await session.ship(credited)
    return credited
