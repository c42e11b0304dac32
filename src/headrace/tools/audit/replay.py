"""What a run computed, computed again from what it saved: credit, states of algorithms, and draws."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from headrace.algorithms.base import Algorithm, MakeContext
from headrace.config.orchestrator import OrchestratorConfig
from headrace.environments.base import tasks_of
from headrace.environments.registry import load_environment
from headrace.errors import Failure
from headrace.orchestrator.audit import find_state_violations
from headrace.orchestrator.crediting import frozen_model
from headrace.orchestrator.source import MAX_FAILED_EPISODES, TrainTasks, choose_environment
from headrace.orchestrator.wiring import settings_digest, train_tasks
from headrace.rollout.digest import fingerprint
from headrace.rollout.types import Task
from headrace.tools.audit.report import Report, shortened
from headrace.tools.rescore.options import check_rescorable
from headrace.tools.rescore.rescoring import rescore_run
from headrace.transport.journal import Journal
from headrace.transport.journal_entries import Draw, Lesson
from headrace.transport.rollout_files import RolloutFiles

TRAIN = "train"
"""The slot of training environments in the journal."""


async def replay_credit(config: OrchestratorConfig, journal: Journal, files: RolloutFiles, report: Report) -> None:
    """Credit the saved rollouts again with the algorithm of each environment, and replay the algorithms' states."""
    assert config.seq_len is not None
    replayable: dict[str, Algorithm] = {}
    for env in config.train.env:
        algo = config.algo_of(env)
        try:
            algorithm: Algorithm = algo.make(MakeContext(config.seq_len, frozen_model))
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
        epochs, other = journal.epochs(), _other_settings(config, journal)
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


def replay_draws(config: OrchestratorConfig, journal: Journal, report: Report) -> None:
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
    return {epoch for epoch, settings in journal.settings().items() if settings not in (None, digest)}


def compare_draws(
    entries: Sequence[TrainTasks], seed: int, journal: Journal, report: Report, other: Collection[int] = ()
) -> None:
    """Compare the journal's draws with those that the environments and the seed give; not those of `other` epochs."""
    epochs, lessons = journal.epochs(), list(journal.lessons())
    draws = [draw for draw, *_ in journal.draws() if epochs[draw.id][0] not in other]
    failed = {entry.env: sum(lesson.failed for lesson in lessons if lesson.env == entry.env) for entry in entries}
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
        observed = [lesson for lesson in lessons if lesson.env == entry.env and lesson.rewards]
        found = list(_redraw(entry, seed, own, observed, epochs))
        unknown += sum(key is None for _, key in found)
        report.problems += shortened(
            f"draw {draw.id} has task {draw.task_key}, but the seed and the rewards before it give {key}"
            for draw, key in found
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
    lessons: Sequence[Lesson],
    epochs: dict[int, tuple[int | None, int]],
) -> Iterator[tuple[Draw, str | None]]:
    """Yield the draws of an environment with the key of the task that its sampler gives, None if that is unknown."""
    sampler = entry.make_sampler(seed)
    learns = entry.sampler is not None and entry.sampler.learns()
    for draw in draws:
        drawn_in, _ = epochs[draw.id]
        if learns and draw.observed is not None and drawn_in is not None:
            for lesson in lessons[sampler.observed : draw.observed]:
                if epochs[lesson.draw][1] <= drawn_in:  # else it has taken the place of one that a kill has undone
                    sampler.observe(lesson.task_key, lesson.rewards)
        known = not learns or sampler.observed == draw.observed
        yield draw, sampler.draw(draw.position).key if known else None
