"""What must hold of every algorithm, and what only of those that promise it: one function for each.

A check looks at what the algorithm left behind on all cases, or plays some again: in another order, with other rewards,
with members missing, with a model that fails. Whatever a hook raises meanwhile is for the caller.
"""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence

import numpy as np

from headrace.algorithms.base import Algorithm
from headrace.algorithms.declaration import ORDER, SHIFT, SIGNS, ZERO_SUM
from headrace.tools.check_algorithm.cases import HUGE, HUGE_REWARDS, TWINS, Case
from headrace.tools.check_algorithm.comparing import (
    ROUNDING,
    close,
    credit,
    difference,
    final_credit,
    group_credit,
    mean,
    named_streams,
    unlike,
)
from headrace.tools.check_algorithm.memory import traces_of_memory
from headrace.tools.check_algorithm.playing import COMPONENTS, HookFailed, Played, is_aligned
from headrace.tools.check_algorithm.report import Verdict
from headrace.tools.check_algorithm.shipping import invented_scores, misfits, misrouted
from headrace.tools.check_algorithm.stage import Failing
from headrace.tools.check_algorithm.trial import Trial

Check = Callable[[Trial], Awaitable[Verdict]]
SHIFTS = (0.25, -3.0)
NOISE = 1e-6
"""Credit below that is what a subtraction has left over."""
NO_CREDIT = "it gives no credit"
NOT_REPEATABLE = "it is not repeatable"


async def every_group(trial: Trial) -> Verdict:
    found = [str(failure) for failure in trial.failures if failure is not trial.alone[HUGE_REWARDS]]
    huge = [str(failure) for failure in trial.failures if failure is trial.alone[HUGE_REWARDS]]
    for played in trial.played():
        (huge if played.case.name == HUGE_REWARDS else found).extend(_infinite(played))
    if huge and not found:
        return Verdict("noted", f"but for rewards as large as {HUGE:g}: {huge[0]}")
    return _judged(found + huge)


async def alignment(trial: Trial) -> Verdict:
    return _judged([problem for played in trial.played() for problem in misfits(played)])


async def read_only(trial: Trial) -> Verdict:
    found = []
    for played in trial.played():
        was, now = played.case, played.credited
        place = difference(was.task, now.task, "task") or difference(was.rollouts, now.rollouts, "rollouts")
        if place:
            found.append(f"{was.name!r}: {place} is not what it was")
    return _judged(found)


async def routing(trial: Trial) -> Verdict:
    async with trial.session() as session:
        component = session.algorithm.action_loss_type
    if component not in COMPONENTS:
        return Verdict("fails", f"action_loss_type is {component!r}: it must be one of {', '.join(COMPONENTS)}")
    found = [
        f"{played.case.name!r}: {problem}"
        for played in trial.played()
        for sample, written in played.shipped_samples()
        if is_aligned(sample) and (problem := misrouted(sample, written, component))
    ]
    return _judged(found)


async def repeatable(trial: Trial) -> Verdict:
    if isinstance(trial.together, HookFailed) or isinstance(trial.again, HookFailed):
        return Verdict("does not apply", "the batch failed")
    found = []
    for first, second in zip(trial.together, trial.again, strict=True):
        if name := unlike(first.written, second.written, exactly=True):
            found.append(f"{first.case.name!r}: another instance gave other {name}")
        elif first.drops != second.drops:
            found.append(f"{first.case.name!r}: another instance dropped others")
    return _judged(found)


async def order(trial: Trial) -> Verdict:
    if (await repeatable(trial)).kind != "holds":
        return Verdict("does not apply", NOT_REPEATABLE)
    if trial.kind.keeps_state():
        return Verdict("does not apply", "it learns from each rollout, in their order")
    found = []
    for case in trial.plain_cases:
        places = list(range(len(case.rollouts)))
        for moved in (places[::-1], random.Random(case.name).sample(places, len(places))):
            (again,) = await trial.play([case.members(moved)])
            expected = [trial.played_alone(case).written[place] for place in moved]
            if name := unlike(expected, again.written):
                found.append(f"{case.name!r}: members in another order have other {name}")
    return _judged_as_promised(trial, ORDER, found)


async def equal_rewards(trial: Trial) -> Verdict:
    if not trial.promises.reward_alone:
        return Verdict("does not apply", "equal rewards may have unequal credit here")
    if not _credited(trial):
        return Verdict("does not apply", NO_CREDIT)
    found = []
    for case in _of_equal_rewards(trial):
        sizes = np.abs(np.concatenate(credit(trial.played_alone(case))))
        # Nothing tells twins apart: if their credit sums to zero, each has none.
        none = case.name == TWINS and ZERO_SUM in trial.promises.kept
        noise = sizes[(sizes > 0) & (none | (sizes < NOISE))]
        if len(noise):
            found.append(f"{case.name!r} leave {noise.max():.1g}; headrace.rollout.credit.center leaves 0")
    return _judged(found)


async def shift(trial: Trial) -> Verdict:
    async def changed(case: Case) -> str:
        before = credit(trial.played_alone(case))
        for by in SHIFTS:
            (played,) = await trial.play([case.shifted(by)])
            for old, new in zip(before, credit(played), strict=True):
                if old.shape != new.shape or not close(old, new):
                    return f"{case.name!r}: with {by:+g} on every reward, {mean(old):.6g} becomes {mean(new):.6g}"
        return ""

    # Equal rewards of one size may round, and of another not; who fails on some of them has failed already.
    return await _promised(trial, SHIFT, changed, [] if trial.failures else _of_equal_rewards(trial))


async def zero_sum(trial: Trial) -> Verdict:
    over_tokens = trial.promises.length_weighted

    async def remainder(case: Case) -> str:
        weights = [rollout.completion_tokens if over_tokens else 1 for rollout in case.rollouts]
        shares = [w * mean(values) for w, values in zip(weights, credit(trial.played_alone(case)), strict=True)]
        if abs(math.fsum(shares)) <= ROUNDING * max(1.0, *map(abs, shares)):
            return ""
        return f"{case.name!r}: it sums to {math.fsum(shares):.6g}{' over its tokens' if over_tokens else ''}"

    return await _promised(trial, ZERO_SUM, remainder)


async def signs(trial: Trial) -> Verdict:
    async def turned(case: Case) -> str:
        played = trial.played_alone(case)
        for number, (base, final) in enumerate(zip(group_credit(played), final_credit(played), strict=True)):
            if base.shape == final.shape and np.any(np.where(base >= 0, final < 0, final > 0)):
                return f"{case.name!r}: score_batch turns the sign of a token of rollout {number}"
        return ""

    changed = any(unlike(p.by_group, p.by_algorithm, exactly=True, only="advantages") for p in trial.played())
    if not changed and SIGNS not in trial.promises.kept and SIGNS not in trial.promises.reasons:
        return Verdict("does not apply", "score_batch changes no credit")
    return await _promised(trial, SIGNS, turned)


async def filters(trial: Trial) -> Verdict:
    if trial.kind.score_batch is Algorithm.score_batch:
        return Verdict("does not apply", "it has no score_batch, which alone sees it")
    found = []
    fits = (await alignment(trial)).kind == "holds"  # else it has been told
    for kept, left in ((slice(None, None, 2), "every other member"), (slice(-1, None), "one member")):
        async with trial.session() as session:
            credited = [await session.credit(case) for case in trial.sound_cases]
            batch = [played.members(range(len(played.by_group))[kept]) for played in credited]
            try:
                await session.ship(batch)
            except HookFailed as failure:
                found.append(f"with {left} of each group left: {failure}")
                continue
        problems = [problem for played in batch for problem in _infinite(played)]
        problems += [problem for played in batch for problem in misfits(played) if fits]
        found += [f"with {left} of each group left: {problem}" for problem in problems]
    return _judged(found)


async def state(trial: Trial) -> Verdict:
    if not trial.kind.keeps_state():
        batch = await _repeatable_batch(trial)
        return _judged(await traces_of_memory(trial, batch)) if batch else Verdict("does not apply", NOT_REPEATABLE)
    half = len(trial.sound_cases) // 2
    async with trial.session() as first, trial.session() as second:
        batch = [await first.credit(case) for case in trial.sound_cases[:half]]
        halfway = await first.state()
        await second.load_state(halfway)
        found = []
        for case in trial.sound_cases[half:]:
            here, there = await first.credit(case), await second.credit(case)
            batch.append(here)
            if name := unlike(here.written, there.written, exactly=True):
                found.append(f"{case.name!r}: once the state is loaded, it has other {name}")
        credited = await first.state()
        if credited != await second.state():
            found.append("a state that is loaded goes on to another")
        await first.ship(batch)
        if credited != await first.state():
            found.append("score_batch changes the state, which score_group alone may")
    return _judged(found)


async def failing_model(trial: Trial) -> Verdict:
    if not trial.asked:
        return Verdict("does not apply", "it asks no other model")
    found = []
    healthy = await _repeatable_batch(trial)
    for each, when in ((1, "always"), (2, "every other time")):
        try:
            batch = await trial.play(trial.sound_cases, Failing(each))
        except HookFailed as failure:
            found.append(f"a model that fails {when}: {failure}")
        else:
            problems = [problem for played in batch for problem in misfits(played)]
            pairs = zip(batch, healthy, strict=True) if healthy else ()
            problems += [problem for pair in pairs for problem in invented_scores(*pair)]
            found += [f"a model that fails {when}: {problem}" for problem in problems]
    return _judged(found)


CHECKS: tuple[tuple[str, str, Check], ...] = (
    ("every group", "any group is credited, with finite numbers", every_group),
    ("alignment", "one value per token, 0 on prompts, none missing", alignment),
    ("read only", "tasks, rewards and tokens stay as they are", read_only),
    ("routing", "sampled tokens go to the loss that it declares", routing),
    ("repeatable", "two fresh instances give the same bits", repeatable),
    ("order", "members in another order have the same credit", order),
    ("equal rewards", "they leave no rounding error behind as credit", equal_rewards),
    ("shift", "a constant on all rewards changes no credit", shift),
    ("zero sum", "the credit of a group sums to zero", zero_sum),
    ("signs", "the batch stage turns no sign of the group's credit", signs),
    ("filters", "members that filters took away are not missed", filters),
    ("state", "all that it remembers is in state(), as JSON", state),
    ("failing model", "costs drops or a fallback, never an exception", failing_model),
)
"""By name, with what each says in a line."""


async def _repeatable_batch(trial: Trial) -> list[Played]:
    """All sound cases in one batch; none if that does not come out alike each time."""
    if isinstance(trial.together, HookFailed) or (await repeatable(trial)).kind != "holds":
        return []
    return trial.together


async def _promised(
    trial: Trial, name: str, problem_of: Callable[[Case], Awaitable[str]], more: Sequence[Case] = ()
) -> Verdict:
    """Tried on the plain cases with credit, and on `more`."""
    if name in trial.promises.reasons:
        return Verdict("does not apply", trial.promises.reasons[name])
    cases = _credited(trial)
    if not cases:
        return Verdict("does not apply", NO_CREDIT)
    found = [problem for case in (*cases, *more) if (problem := await problem_of(case))]
    return _judged_as_promised(trial, name, found)


def _judged_as_promised(trial: Trial, name: str, found: Sequence[str]) -> Verdict:
    """A failure where it was promised; else it is told how it is."""
    if name in trial.promises.kept:
        return _judged(found)
    return Verdict("noted", f"not promised, and not so: {found[0]}" if found else "it is so, though not promised")


def _credited(trial: Trial) -> list[Case]:
    """The plain cases in which anybody has any credit."""
    return [case for case in trial.plain_cases if any(map(len, credit(trial.played_alone(case))))]


def _of_equal_rewards(trial: Trial) -> list[Case]:
    return [case for case in trial.sound_cases if len({rollout.reward for rollout in case.rollouts}) == 1]


def _infinite(played: Played) -> Iterator[str]:
    for number, name, values in named_streams(played):
        if not np.isfinite(values).all():
            bad = values[~np.isfinite(values)].flat[0]
            yield f"{played.case.name!r}: rollout {number} has {bad} in its {name}"


def _judged(found: Sequence[str]) -> Verdict:
    if not found:
        return Verdict("holds")
    distinct = list(dict.fromkeys(found))
    more = f" (and {len(distinct) - 1} more)" if len(distinct) > 1 else ""
    return Verdict("fails", distinct[0] + more)
