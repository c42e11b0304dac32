"""The invariants of algorithms, one function each: those of every algorithm, and those that an algorithm promises.

A check reads the results of all cases, or runs some again: in another order, with other rewards, with members missing,
with a failing model.
"""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence

import numpy as np

from headrace.algorithms.base import Algorithm
from headrace.config.algorithms import AlgorithmConfig
from headrace.tools.check_algorithm.fixtures import (
    HUGE,
    HUGE_REWARDS,
    TWINS,
    Case,
    FailingModel,
    Fixtures,
    make_fixtures,
)
from headrace.tools.check_algorithm.golden import worked_numbers
from headrace.tools.check_algorithm.results import (
    ROUNDING,
    CheckResult,
    ConformanceReport,
    Verdict,
    alignment_problems,
    close,
    credit,
    differing_path,
    differing_stream,
    invented_logprobs,
    mean,
    routing_problem,
    sampled_advantages,
)
from headrace.tools.check_algorithm.runner import (
    COMPONENTS,
    AlgorithmRunner,
    CaseResult,
    HookFailed,
    is_aligned,
    make_factory,
)

Check = Callable[[AlgorithmRunner], Awaitable[Verdict]]
SHIFTS = (0.25, -3.0)
NOISE = 1e-6
"""Smaller credit is the rounding error of a subtraction."""
NO_CREDIT = "the algorithm gives no credit"
NOT_REPEATABLE = "the algorithm is not repeatable"


async def every_group(runner: AlgorithmRunner) -> Verdict:
    problems: list[str] = []
    huge: list[str] = []
    for failure in runner.failures:
        (huge if failure is runner.alone[HUGE_REWARDS] else problems).append(str(failure))
    for result in runner.results():
        (huge if result.case.name == HUGE_REWARDS else problems).extend(_infinite_values(result))
    if huge and not problems:
        return Verdict("noted", f"except for rewards as large as {HUGE:g}: {huge[0]}")
    return _verdict(problems + huge)


async def alignment(runner: AlgorithmRunner) -> Verdict:
    return _verdict([problem for result in runner.results() for problem in alignment_problems(result)])


async def read_only(runner: AlgorithmRunner) -> Verdict:
    problems = []
    for result in runner.results():
        before, after = result.case, result.credited
        path = differing_path(before.task, after.task, "task")
        if path := path or differing_path(before.rollouts, after.rollouts, "rollouts"):
            problems.append(f"{before.name!r}: {path} was changed")
    return _verdict(problems)


async def routing(runner: AlgorithmRunner) -> Verdict:
    async with runner.session() as session:
        component = session.algorithm.action_loss_type
    if component not in COMPONENTS:
        return Verdict("fails", f"action_loss_type is {component!r}: it must be one of {', '.join(COMPONENTS)}")
    problems = [
        f"{result.case.name!r}: {problem}"
        for result in runner.results()
        for sample, written in result.shipped_samples()
        if is_aligned(sample) and (problem := routing_problem(sample, written, component))
    ]
    return _verdict(problems)


async def repeatable(runner: AlgorithmRunner) -> Verdict:
    if isinstance(runner.together, HookFailed) or isinstance(runner.repeated, HookFailed):
        return Verdict("does not apply", "the batch failed")
    problems = []
    for first, second in zip(runner.together, runner.repeated, strict=True):
        if name := differing_stream(first.streams, second.streams, exactly=True):
            problems.append(f"{first.case.name!r}: another instance wrote other {name}")
        elif first.drops != second.drops:
            problems.append(f"{first.case.name!r}: another instance dropped other rollouts")
    return _verdict(problems)


async def order(runner: AlgorithmRunner) -> Verdict:
    if (await repeatable(runner)).kind != "holds":
        return Verdict("does not apply", NOT_REPEATABLE)
    if runner.kind.keeps_state():
        return Verdict("does not apply", "its state depends on the order of rollouts")
    problems = []
    for case in runner.plain_cases:
        indices = list(range(len(case.rollouts)))
        for permuted in (indices[::-1], random.Random(case.name).sample(indices, len(indices))):
            (result,) = await runner.run([case.members(permuted)])
            expected = [runner.result_alone(case).streams[index] for index in permuted]
            if name := differing_stream(expected, result.streams):
                problems.append(f"{case.name!r}: members in another order have other {name}")
    return _promise_verdict(runner, "order", problems)


async def equal_rewards(runner: AlgorithmRunner) -> Verdict:
    if not runner.promises.reward_alone:
        return Verdict("does not apply", "equal rewards may have unequal credit")
    if not _credited_cases(runner):
        return Verdict("does not apply", NO_CREDIT)
    problems = []
    for case in _equal_reward_cases(runner):
        sizes = np.abs(np.concatenate(credit(runner.result_alone(case))))
        # The twins are identical: if their credit sums to zero, each has zero.
        must_be_zero = case.name == TWINS and "zero_sum" in runner.promises.kept
        noise = sizes[(sizes > 0) & (must_be_zero | (sizes < NOISE))]
        if len(noise):
            problems.append(f"{case.name!r} leave {noise.max():.1g}; headrace.rollout.credit.center leaves 0")
    return _verdict(problems)


async def shift(runner: AlgorithmRunner) -> Verdict:
    async def changed(case: Case) -> str:
        before = credit(runner.result_alone(case))
        for by in SHIFTS:
            (result,) = await runner.run([case.shifted(by)])
            for old, new in zip(before, credit(result), strict=True):
                if old.shape != new.shape or not close(old, new):
                    return f"{case.name!r}: with {by:+g} on every reward, {mean(old):.6g} becomes {mean(new):.6g}"
        return ""

    # Equal rewards may round at one size and not at another; a failure of a hook is reported by another check.
    return await _check_promise(runner, "shift", changed, [] if runner.failures else _equal_reward_cases(runner))


async def zero_sum(runner: AlgorithmRunner) -> Verdict:
    over_tokens = runner.promises.length_weighted

    async def remainder(case: Case) -> str:
        weights = [rollout.trained_tokens if over_tokens else 1 for rollout in case.rollouts]
        shares = [w * mean(values) for w, values in zip(weights, credit(runner.result_alone(case)), strict=True)]
        if abs(math.fsum(shares)) <= ROUNDING * max(1.0, *map(abs, shares)):
            return ""
        return f"{case.name!r}: credit sums to {math.fsum(shares):.6g}{' over its tokens' if over_tokens else ''}"

    return await _check_promise(runner, "zero_sum", remainder)


async def signs(runner: AlgorithmRunner) -> Verdict:
    async def flipped(case: Case) -> str:
        result = runner.result_alone(case)
        sides = [sampled_advantages(case.rollouts, after) for after in (result.after_group, result.after_batch)]
        for number, (base, final) in enumerate(zip(*sides, strict=True)):
            if base.shape == final.shape and np.any(np.where(base >= 0, final < 0, final > 0)):
                return f"{case.name!r}: score_batch flips the sign of a token of rollout {number}"
        return ""

    changed = any(
        differing_stream(p.after_group, p.after_batch, exactly=True, only="advantages") for p in runner.results()
    )
    if not changed and "signs" not in runner.promises.kept and "signs" not in runner.promises.reasons:
        return Verdict("does not apply", "score_batch changes no credit")
    return await _check_promise(runner, "signs", flipped)


async def filters(runner: AlgorithmRunner) -> Verdict:
    if runner.kind.score_batch is Algorithm.score_batch:
        return Verdict("does not apply", "it has no score_batch, the only hook after filters")
    problems = []
    aligned = (await alignment(runner)).kind == "holds"  # else the alignment check has reported it
    for kept, left in ((slice(None, None, 2), "every other member"), (slice(-1, None), "one member")):
        async with runner.session() as session:
            credited = [await session.credit(case) for case in runner.sound_cases]
            batch = [result.members(range(len(result.after_group))[kept]) for result in credited]
            try:
                await session.ship(batch)
            except HookFailed as failure:
                problems.append(f"with {left} of each group left: {failure}")
                continue
        details = [detail for result in batch for detail in _infinite_values(result)]
        details += [detail for result in batch for detail in alignment_problems(result) if aligned]
        problems += [f"with {left} of each group left: {detail}" for detail in details]
    return _verdict(problems)


async def state(runner: AlgorithmRunner) -> Verdict:
    if not runner.kind.keeps_state():
        batch = await _repeatable_batch(runner)
        return _verdict(await _hidden_state(runner, batch)) if batch else Verdict("does not apply", NOT_REPEATABLE)
    half = len(runner.sound_cases) // 2
    async with runner.session() as first, runner.session() as second:
        batch = [await first.credit(case) for case in runner.sound_cases[:half]]
        halfway = await first.state()
        await second.load_state(halfway)
        problems = []
        for case in runner.sound_cases[half:]:
            here, there = await first.credit(case), await second.credit(case)
            batch.append(here)
            if name := differing_stream(here.streams, there.streams, exactly=True):
                problems.append(f"{case.name!r}: after load_state, it has other {name}")
        credited = await first.state()
        if credited != await second.state():
            problems.append("after load_state and the same groups, the state differs")
        await first.ship(batch)
        if credited != await first.state():
            problems.append("score_batch changes the state; only score_group may")
    return _verdict(problems)


async def failing_model(runner: AlgorithmRunner) -> Verdict:
    if not runner.model_requests:
        return Verdict("does not apply", "it sends no request to another model")
    problems = []
    healthy = await _repeatable_batch(runner)
    for each, when in ((1, "always"), (2, "every other time")):
        try:
            batch = await runner.run(runner.sound_cases, FailingModel(each))
        except HookFailed as failure:
            problems.append(f"with a model that fails {when}: {failure}")
        else:
            details = [detail for result in batch for detail in alignment_problems(result)]
            pairs = zip(batch, healthy, strict=True) if healthy else ()
            details += [detail for pair in pairs for detail in invented_logprobs(*pair)]
            problems += [f"with a model that fails {when}: {detail}" for detail in details]
    return _verdict(problems)


CHECKS: tuple[tuple[str, str, Check], ...] = (
    ("every group", "any group is credited, with finite numbers", every_group),
    ("alignment", "one value per token, 0 on prompts, none missing", alignment),
    ("read only", "tasks, rewards and tokens are not changed", read_only),
    ("routing", "sampled tokens go to the declared loss", routing),
    ("repeatable", "two new instances write the same bits", repeatable),
    ("order", "credit does not depend on the order of members", order),
    ("equal rewards", "equal rewards leave no rounding error as credit", equal_rewards),
    ("shift", "a constant on all rewards changes no credit", shift),
    ("zero sum", "the credit of a group sums to zero", zero_sum),
    ("signs", "score_batch flips no sign of the group's credit", signs),
    ("filters", "score_batch handles groups with filtered members", filters),
    ("state", "everything it remembers is in state(), as JSON", state),
    ("failing model", "costs drops or a fallback, never an exception", failing_model),
)
"""Name, description and function of each check."""


async def check_algorithm(config: AlgorithmConfig, fixtures: Fixtures | None = None) -> ConformanceReport:
    """Run worked numbers and all invariants; raises `BadInput` if the config does not name an algorithm."""
    fixtures = fixtures or make_fixtures()
    try:
        worked = CheckResult("worked numbers", "match numbers worked by hand", await worked_numbers(config, fixtures))
        runner = await AlgorithmRunner.create(config, fixtures)
    except HookFailed as failure:
        failed = CheckResult("every group", CHECKS[0][1], Verdict("fails", str(failure)))
        return ConformanceReport(make_factory(config).name, 0, [failed])
    results = []
    for name, description, check in CHECKS:
        if not runner.sound_cases and check is not every_group:
            verdict = Verdict("does not apply", "no group could be credited")
        else:
            try:
                verdict = await check(runner)
            except HookFailed as failure:
                verdict = Verdict("fails", str(failure))
        results.append(CheckResult(name, description, verdict))
    return ConformanceReport(runner.factory.name, len(runner.cases), [worked, *results])


async def _repeatable_batch(runner: AlgorithmRunner) -> list[CaseResult]:
    """Return the results of all sound cases in one batch, or an empty list if they are not repeatable."""
    if isinstance(runner.together, HookFailed) or (await repeatable(runner)).kind != "holds":
        return []
    return runner.together


async def _check_promise(
    runner: AlgorithmRunner, name: str, problem_of: Callable[[Case], Awaitable[str]], more: Sequence[Case] = ()
) -> Verdict:
    """Check a promise on the plain cases with credit and on `more`."""
    if name in runner.promises.reasons:
        return Verdict("does not apply", runner.promises.reasons[name])
    cases = _credited_cases(runner)
    if not cases:
        return Verdict("does not apply", NO_CREDIT)
    problems = [problem for case in (*cases, *more) if (problem := await problem_of(case))]
    return _promise_verdict(runner, name, problems)


def _promise_verdict(runner: AlgorithmRunner, name: str, problems: Sequence[str]) -> Verdict:
    """Return a failure only if the algorithm promises the invariant; otherwise note whether it holds."""
    if name in runner.promises.kept:
        return _verdict(problems)
    return Verdict("noted", f"does not hold and is not promised: {problems[0]}" if problems else "holds, not promised")


def _credited_cases(runner: AlgorithmRunner) -> list[Case]:
    """Return the plain cases in which any token has credit."""
    return [case for case in runner.plain_cases if any(map(len, credit(runner.result_alone(case))))]


def _equal_reward_cases(runner: AlgorithmRunner) -> list[Case]:
    return [case for case in runner.sound_cases if len({rollout.reward for rollout in case.rollouts}) == 1]


def _infinite_values(result: CaseResult) -> Iterator[str]:
    for number, streams in enumerate(result.streams):
        for name, values in (stream for sample in streams for stream in sample.items()):
            if not np.isfinite(values).all():
                bad = values[~np.isfinite(values)].flat[0]
                yield f"{result.case.name!r}: rollout {number} has {bad} in its {name}"


def _verdict(problems: Sequence[str]) -> Verdict:
    if not problems:
        return Verdict("holds")
    distinct = list(dict.fromkeys(problems))
    more = f" (and {len(distinct) - 1} more)" if len(distinct) > 1 else ""
    return Verdict("fails", distinct[0] + more)


async def _hidden_state(runner: AlgorithmRunner, together: Sequence[CaseResult]) -> list[str]:
    """Return signs that an algorithm without `state` remembers earlier groups, which a restart would lose.

    `together` are the results of all sound cases in one batch.
    """
    alone = [runner.result_alone(case) for case in runner.sound_cases]
    async with runner.session() as session:
        concurrent = await session.credit_concurrently(runner.sound_cases)
    problems = [
        f"{expected.case.name!r}: credited {when} other groups, it has other {name}"
        for results, when in ((together, "after"), (concurrent, "at the same time as"))
        for expected, result in zip(alone, results, strict=True)
        if (name := differing_stream(expected.after_group, result.after_group, exactly=True))
    ]
    # Use task keys that no instance has seen, to detect state of the class; if credit depends on the key, keep it.
    cases = runner.sound_cases
    renamed = await runner.run([case.with_task_suffix("renamed") for case in cases])
    if not any(differing_stream(a.streams, b.streams, exactly=True) for a, b in zip(together, renamed, strict=True)):
        cases = [case.with_task_suffix("unseen") for case in cases]
    async with runner.session() as session:
        for batch in ([case.mirrored() for case in cases], cases):
            credited = [await session.credit(case) for case in batch]
            await session.ship(credited)
    for before, after in zip(together, credited, strict=True):
        if name := differing_stream(before.streams, after.streams, exactly=True):
            problems.append(f"{before.case.name!r}: after another group of its task, it has other {name}")
    return problems
