"""One algorithm checked: worked numbers, then every invariant."""

from __future__ import annotations

from headrace.config.algorithms import AlgorithmConfig
from headrace.tools.check_algorithm.golden import worked_numbers
from headrace.tools.check_algorithm.invariants import CHECKS, Check
from headrace.tools.check_algorithm.playing import HookFailed
from headrace.tools.check_algorithm.report import Report, Row, Verdict
from headrace.tools.check_algorithm.stage import Stage, make_stage
from headrace.tools.check_algorithm.trial import Trial, subject_of

WORKED = "small groups come to numbers worked by hand"


async def check_algorithm(config: AlgorithmConfig, stage: Stage | None = None) -> Report:
    """Raises `BadInput` for what is no algorithm; all else that is wrong with it is in the report."""
    stage = stage or make_stage()
    try:
        numbers = await worked_numbers(config, stage)
        trial = await Trial.of(config, stage)
    except HookFailed as failure:
        return Report(subject_of(config).name, 0, [Row("every group", CHECKS[0][1], Verdict("fails", str(failure)))])
    rows = [Row(name, says, await _verdict(check, trial)) for name, says, check in CHECKS]
    return Report(trial.subject.name, len(trial.cases), [Row("worked numbers", WORKED, numbers), *rows])


async def _verdict(check: Check, trial: Trial) -> Verdict:
    if not trial.sound_cases and check is not CHECKS[0][2]:
        return Verdict("does not apply", "no group could be credited")
    try:
        return await check(trial)
    except HookFailed as failure:
        return Verdict("fails", str(failure))
