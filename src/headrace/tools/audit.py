"""`headrace audit`: recompute what the files of a run say from each other, running or ended, and report differences.

Files are compared with the journal: digests, the rollouts of every draw, and the samples of every batch. Credit, states
of algorithms and draws are computed again from what was saved.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.algorithms.base import Algorithm, MakeContext
from headrace.config.orchestrator import OrchestratorConfig
from headrace.environments.base import tasks_of
from headrace.environments.registry import load_environment
from headrace.errors import BadInput, Failure
from headrace.launch.own_code import add_code_folders_of
from headrace.launch.saved_config import read_rl_run
from headrace.orchestrator.audit import find_state_violations, find_violations
from headrace.orchestrator.crediting import make_frozen_model
from headrace.orchestrator.source import MAX_FAILED_EPISODES, TrainTasks, choose_environment
from headrace.orchestrator.wiring import settings_digest, train_tasks
from headrace.rollout.digest import fingerprint
from headrace.rollout.types import ROUTES, TOKEN_ARRAYS, Sample, Task
from headrace.tools.rescore.options import check_rescorable
from headrace.tools.rescore.rescoring import rescore_run
from headrace.transport.checkpoint_files import find_damage_of_all
from headrace.transport.journal import Journal
from headrace.transport.journal_entries import NOT_TRAINABLE, Draw, DrawResult, FileRecord, Outcome
from headrace.transport.rollout_files import RolloutFiles, dropped_files, read_columns
from headrace.transport.run_dir import RolloutKind, RunDir


def audit_run(run: RunDir) -> AuditReport:
    """Audit an RL run; raise `BadInput` if its journal cannot be read at all."""
    if not run.journal.is_file():
        raise BadInput("no journal in it: not an RL run, or one that has not begun", key="RUN", value=run.root)
    with closing(Journal(run.journal, read_only=True)) as journal:
        if damage := journal.find_damage():
            return AuditReport({}, damage, ["everything else: the journal is damaged"])
        report = AuditReport(journal.count_states())
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


def _collect(report: AuditReport, problems: Iterable[str]) -> None:
    """Add problems until a file cannot be read, which is the last one."""
    try:
        for problem in problems:
            report.problems.append(problem)
    except Failure as error:
        report.problems.append(str(error))


def _name_unchecked(run: RunDir, journal: Journal, report: AuditReport) -> None:
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


MAX_REPORTED = 10
"""Problems of one kind that are listed; the others are counted."""


class AuditReport(msgspec.Struct):
    """Sentences about a run, and the number of its draws by state."""

    states: dict[str, int] = msgspec.field(default_factory=dict)
    problems: list[str] = msgspec.field(default_factory=list)
    unchecked: list[str] = msgspec.field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{count:8d} {state.replace(':', ': ')}" for state, count in sorted(self.states.items())]
        verdict = "everything adds up" if not self.problems else f"{len(self.problems)} problems:"
        lines += [verdict, *(f"  {problem}" for problem in self.problems)]
        return "\n".join([*lines, *(f"not checked: {what}" for what in self.unchecked)])


def shortened(problems: Iterable[str]) -> Iterator[str]:
    """Yield the first problems of one kind, then how many more there are."""
    remaining = iter(problems)
    yield from islice(remaining, MAX_REPORTED)
    if more := sum(1 for _ in remaining):
        yield f"and {more} more like the last"


_COLUMNS = ("draw_id", "agent", "reward", "credited", "drop_reason", "completion_tokens")

Rows = Sequence[dict[str, Any]]


def find_damaged_files(run: RunDir, journal: Journal) -> dict[Path, str]:
    """Return a sentence for each recorded file that differs from its record, or is missing.

    Missing batches are left out: the trainer deletes those that a checkpoint covers.
    """
    damaged = {}
    for name, record in journal.files().items():
        path = run.root / name
        if path.is_file():
            if FileRecord.of(run.root, path) != record:
                damaged[path] = f"{path} is damaged: its content does not match the digest in the journal"
        elif path.parent != run.batches.directory and name in journal.files():  # else the run has deleted it meanwhile
            damaged[path] = f"{path} is missing"
    return damaged


def find_rollout_violations(run: RunDir, journal: Journal, damaged: Mapping[Path, str]) -> Iterator[str]:
    """Yield a sentence for each draw whose saved rollouts are not those that the journal has."""
    last, outcomes = journal.last_step(), journal.outcomes()
    recorded = {run.root / name for name in journal.files()}
    old = {draw for draw, (drawn_in, _) in journal.epochs_by_draw().items() if drawn_in is None}
    saved = {step: [path] for step, path in RolloutKind.TRAIN.files(run.rollouts).items() if step <= last}
    for step in range(min(saved, default=last + 1), last + 1):  # the run deletes only the oldest
        if step not in saved:
            yield f"{RolloutKind.TRAIN.path(run.rollouts, step)} is missing"
    saved[last + 1] = [path for path in dropped_files(run.rollouts, last + 1) if path in recorded]
    for step, paths in saved.items():
        if damaged.keys() & set(paths):
            continue
        try:
            rows = [row for path in paths for row in read_columns(path, _COLUMNS)]
        except Failure as error:
            yield str(error)
            continue
        whole = recorded.issuperset(paths)
        left_out = old if whole else set()  # older versions lost some of the dropped rollouts
        rows = [row for row in rows if row["draw_id"] not in left_out]
        here = {outcome.draw: outcome for outcome in outcomes.get(step, []) if outcome.draw not in left_out}
        differing = _compare_rows(rows, here) if whole else _compare_kept_rows(rows, here)
        yield from shortened(f"rollouts of step {step}: {problem}" for problem in differing)


def _by_draw(rows: Rows) -> dict[int, list[dict[str, Any]]]:
    draws: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        draws.setdefault(row["draw_id"], []).append(row)
    return draws


def _compare_rows(rows: Rows, outcomes: Mapping[int, Outcome]) -> Iterator[str]:
    """Compare every rollout of a step with the outcomes of its draws."""
    saved = _by_draw(rows)
    for draw in sorted(saved.keys() | {draw for draw, outcome in outcomes.items() if outcome.rollouts}):
        if draw not in outcomes:
            yield f"draw {draw} has rollouts here, but the journal has no outcome of it in this step"
            continue
        outcome, own = outcomes[draw], saved.get(draw, [])
        drops = Counter(row["drop_reason"] for row in own if row["drop_reason"] not in (None, NOT_TRAINABLE))
        pairs = {
            "rollouts": (len(own), outcome.rollouts),
            "sampled tokens": (sum(row["completion_tokens"] for row in own), outcome.tokens),
            "dropped rollouts": (dict(drops), outcome.drops),
            "rewards": (_rewards(own), sorted(outcome.rewards)),
        }
        for name, (here, recorded) in pairs.items():
            if here != recorded:
                yield f"the {name} of draw {draw} are {here}, but {recorded} in the journal"


def _compare_kept_rows(rows: Rows, outcomes: Mapping[int, Outcome]) -> Iterator[str]:
    """Compare the shipped rollouts of a step; older versions saved dropped ones in the files of other steps."""
    saved = _by_draw([row for row in rows if row["drop_reason"] is None])
    shipped = {draw for draw, outcome in outcomes.items() if not outcome.reason}
    for draw in sorted(saved.keys() ^ shipped):
        yield f"draw {draw} " + ("is not shipped in the journal" if draw in saved else "has no shipped rollout here")
    for draw in sorted(saved.keys() & shipped):
        if Counter(_rewards(saved[draw])) - Counter(outcomes[draw].rewards):
            recorded = sorted(outcomes[draw].rewards)
            yield f"the rewards of draw {draw} are {_rewards(saved[draw])}, but {recorded} in the journal"


def _rewards(rows: Rows) -> list[tuple[str, float]]:
    """Return agent and reward of the credited rollouts."""
    return sorted((row["agent"], row["reward"]) for row in rows if row["credited"])


def find_batch_violations(run: RunDir, damaged: Mapping[Path, str]) -> Iterator[str]:
    """Yield a sentence for each batch on disk whose samples are not those of the step's rollouts."""
    files = RolloutFiles(run.rollouts)
    for step in sorted(set(run.batches.steps()) & set(files.steps())):
        path, rollouts = run.batches.path(step), RolloutKind.TRAIN.path(run.rollouts, step)
        if damaged.keys() & {path, rollouts}:
            continue
        try:
            shipped = [entry.sample for entry in run.batches.read(step).samples]
            kept = [saved.rollout for saved in files.read(step) if not saved.drop_reason]
        except FileNotFoundError:  # a checkpoint covers it by now
            continue
        except Failure as error:
            yield str(error)
            continue
        saved = [sample for rollout in kept for sample in rollout.samples]
        if len(shipped) != len(saved):
            yield f"{path} has {len(shipped)} samples, but {rollouts} has {len(saved)}"
            continue
        differing = ((number, _difference(*pair)) for number, pair in enumerate(zip(shipped, saved, strict=True)))
        yield from shortened(
            f"sample {number} of {path} has other {name} than in {rollouts}" for number, name in differing if name
        )


def _difference(one: Sample, other: Sample) -> str:
    """Return the name of a stream in which two samples differ; empty if they are equal. Routes are in batches only."""
    names = one.streams.keys() - {ROUTES}
    if names != other.streams.keys():
        return "streams"
    pairs = {name: (getattr(one, name), getattr(other, name)) for name in TOKEN_ARRAYS}
    pairs |= {name: (one.streams[name], other.streams[name]) for name in names}
    return next((name for name, arrays in pairs.items() if not np.array_equal(*arrays, equal_nan=True)), "")


TRAIN = "train"
"""The slot of training environments in the journal."""


async def replay_credit(config: OrchestratorConfig, journal: Journal, files: RolloutFiles, report: AuditReport) -> None:
    """Credit the saved rollouts again with the algorithm of each environment, and replay the algorithms' states."""
    assert config.seq_len is not None
    replayable: dict[str, Algorithm] = {}
    for env in config.train.env:
        algo = config.algo_of(env)
        try:
            algorithm: Algorithm = algo.make(MakeContext(config.seq_len, make_frozen_model))
            if algorithm.replayable:
                replayable[env.name] = algorithm
            elif algorithm.keeps_state():
                report.unchecked.append(
                    f"credit and states of {env.name}: the state of {algo.type} is not a function of agents and rewards"
                )
                continue
            if algorithm.model_role:
                report.unchecked.append(f"credit of {env.name}: {algo.type} asks a {algorithm.model_role}")
                continue
            check_rescorable(env.name, algo, algo, None)
            outcome = await rescore_run(config, files, files.steps(), env.name, lambda *_: None, journal=journal)
        except Failure as error:
            report.unchecked.append(f"credit of {env.name}: {error}")
            continue
        epochs, other = journal.epochs_by_draw(), _other_settings(config, journal)
        changed = {group: int(group.partition("-")[0]) for group in outcome.changed_groups}
        report.problems += shortened(
            f"the credit of group {group} differs by up to {outcome.changed_groups[group]:.3g} from what {algo.type} "
            "gives for its saved rewards, unless its code has changed"
            for group, draw in changed.items()
            if draw not in epochs or epochs[draw][1] not in other
        )
        if incomplete := outcome.left_out.get("incomplete"):
            report.unchecked.append(f"credit of {incomplete} rollouts of {env.name}: their groups are not saved whole")
    report.problems += shortened(await find_state_violations(journal, replayable))


def replay_draws(config: OrchestratorConfig, journal: Journal, report: AuditReport) -> None:
    """Draw every task again from the seed and from the rewards that its sampler had observed."""
    entries, recorded, other = [], journal.data(), _other_settings(config, journal)
    if other:
        report.unchecked.append(
            f"draws, and differing credit, of starts {', '.join(map(str, sorted(other)))}: the settings were others"
        )
    for env in config.train.env:
        try:
            tasks: list[Task] = tasks_of(load_environment(env.id, env.args), env.name)
        except Exception as error:  # user code, which may need data of the run's time
            report.unchecked.append(f"draws: environment {env.name} cannot be loaded: {error}")
            return
        if recorded.get((TRAIN, env.name)) != fingerprint(task.data for task in tasks):
            report.unchecked.append(f"draws: the tasks of {env.name} are not those of the run's last start")
            return
        entries.append(train_tasks(config, env, tasks))
    compare_draws(entries, config.seed, journal, report, other)


def _other_settings(config: OrchestratorConfig, journal: Journal) -> set[int]:
    """Return the epochs whose settings were not those of `config`."""
    digest = settings_digest(config)
    return {epoch for epoch, settings in journal.settings_by_epoch().items() if settings not in (None, digest)}


def compare_draws(
    entries: Sequence[TrainTasks], seed: int, journal: Journal, report: AuditReport, other: Collection[int] = ()
) -> None:
    """Compare the journal's draws with those that the environments and the seed give; not those of `other` epochs."""
    epochs, results = journal.epochs_by_draw(), list(journal.results())
    draws = [draw for draw, *_ in journal.draws() if epochs[draw.id][0] not in other]
    failed = {entry.env: sum(result.failed for result in results if result.env == entry.env) for entry in entries}
    if max(failed.values(), default=0) >= MAX_FAILED_EPISODES or {draw.env for draw in draws} - failed.keys():
        report.unchecked.append("which environment was drawn: failures may have paused one, or one was removed")
    else:
        weights = {entry.env: entry.weight for entry in entries}
        chosen = ((draw, choose_environment(seed, draw.id, weights)) for draw in draws)
        report.problems += shortened(
            f"draw {draw.id} is from {draw.env}, but the seed gives {env}" for draw, env in chosen if draw.env != env
        )
    unknown = 0
    for entry in entries:
        own = [draw for draw in draws if draw.env == entry.env]
        observed = [result for result in results if result.env == entry.env and result.rewards]
        redrawn = list(_redraw(entry, seed, own, observed, epochs))
        unknown += sum(key is None for _, key in redrawn)
        report.problems += shortened(
            f"draw {draw.id} has task {draw.task_key}, but the seed and the rewards before it give {key}"
            for draw, key in redrawn
            if key not in (None, draw.task_key)
        )
    if unknown:
        report.unchecked.append(
            f"the tasks of {unknown} draws: the rewards before them were lost by a kill, or unknown"
        )


def _redraw(
    entry: TrainTasks,
    seed: int,
    draws: Sequence[Draw],
    results: Sequence[DrawResult],
    epochs: dict[int, tuple[int | None, int]],
) -> Iterator[tuple[Draw, str | None]]:
    """Yield the draws of an environment with the key of the task that its sampler gives, None if that is unknown."""
    sampler = entry.make_sampler(seed)
    learns = entry.sampler is not None and entry.sampler.learns()
    for draw in draws:
        drawn_in, _ = epochs[draw.id]
        if learns and draw.observed is not None and drawn_in is not None:
            for result in results[sampler.observed : draw.observed]:
                if epochs[result.draw][1] <= drawn_in:  # else it has taken the place of one that a kill has undone
                    sampler.observe(result.task_key, result.rewards)
        is_determined = not learns or sampler.observed == draw.observed
        yield draw, sampler.draw(draw.position).key if is_determined else None
