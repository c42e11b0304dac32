"""`headrace audit`: recompute what the files of a run say from each other, running or ended, and report differences."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import closing

from headrace.errors import BadInput, Failure
from headrace.launch.own_code import add_code_folders_of
from headrace.launch.saved_config import read_rl_run
from headrace.orchestrator.audit import find_violations
from headrace.tools.audit.files import find_batch_violations, find_damaged_files, find_rollout_violations
from headrace.tools.audit.replay import replay_credit, replay_draws
from headrace.tools.audit.report import Report
from headrace.transport.checkpoint_files import find_damage_of_all
from headrace.transport.journal import Journal
from headrace.transport.rollout_files import RolloutFiles
from headrace.transport.run_dir import RolloutKind, RunDir


def audit_run(run: RunDir) -> Report:
    """Audit an RL run; raise `BadInput` if its journal cannot be read at all."""
    if not run.journal.is_file():
        raise BadInput("no journal in it: not an RL run, or one that has not begun", key="RUN", value=run.root)
    with closing(Journal(run.journal, read_only=True)) as journal:
        if damage := journal.find_damage():
            return Report({}, damage, ["everything else: the journal is damaged"])
        report = Report(journal.states())
        damaged = find_damaged_files(run, journal)
        report.problems += damaged.values()
        _collect(report, find_violations(run, journal))
        _collect(report, find_rollout_violations(run, journal, damaged))
        _collect(report, find_batch_violations(run, damaged))
        _collect(report, map(str, find_damage_of_all(run.checkpoints)))
        _name_unchecked(run, journal, report)
        if not run.config.is_file():
            report.unchecked.append(f"credit, states and draws: there is no {run.config.name}")
            return report
        add_code_folders_of(run)
        config = read_rl_run(run.root).orchestrator
        if any(path.parent == run.rollouts for path in damaged):
            report.unchecked.append("credit and states: rollout files are damaged or missing")
        else:
            asyncio.run(replay_credit(config, journal, RolloutFiles(run.rollouts), report))
        replay_draws(config, journal, report)
    return report


def _collect(report: Report, problems: Iterable[str]) -> None:
    """Add problems until a file cannot be read, which is the last one."""
    try:
        for problem in problems:
            report.problems.append(problem)
    except Failure as error:
        report.problems.append(str(error))


def _name_unchecked(run: RunDir, journal: Journal, report: Report) -> None:
    """Name what an older version did not record, and what the run itself has deleted."""
    if not journal.has_checksums:
        report.unchecked.append("rows of the journal: an older version wrote it, without checksums")
    last, files = journal.last_step(), RolloutKind.TRAIN.files(run.rollouts)
    if deleted := min([last, *(step - 1 for step in files)]):
        report.unchecked.append(f"rollouts of steps 1 to {deleted}: the run keeps only the newest")
    recorded = {run.root / name for name in journal.files()}
    if any(path not in recorded for step, path in files.items() if step <= last):
        report.unchecked.append("dropped rollouts, and digests of rollout files: an older version wrote some of them")
    if covered := min([run.latest_checkpoint_step(), *(step - 1 for step in run.batches.steps())]):
        report.unchecked.append(f"batches of steps 1 to {covered}: they are deleted, since a checkpoint covers them")
