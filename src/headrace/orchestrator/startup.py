"""Notices at the start of a run: resolved settings of each environment, and tasks that changed since the last start."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.config.orchestrator import EnvConfig, OrchestratorConfig, TrainEnvConfig
from headrace.environments.base import Environment
from headrace.observe.status import Status
from headrace.orchestrator.signals import Kind
from headrace.rollout.fingerprint import BY_POSITION, fingerprint
from headrace.rollout.types import Task
from headrace.transport.journal import Journal

Environments = dict[tuple[Kind, str], tuple[EnvConfig, Environment, list[Task]]]
"""By kind and name."""

CONSEQUENCES = {
    Kind.TRAIN: BY_POSITION,
    Kind.EVAL: "Evaluations from here on cannot be compared with earlier ones. If this is not intended, restore the "
    "old data",
}


def startup_lines(config: OrchestratorConfig, tasks: Mapping[tuple[Kind, str], int]) -> list[str]:
    """Return a line for each environment. `tasks` is the number of tasks by kind and name."""
    weights = {env.name: draw_weight(config, env, tasks[Kind.TRAIN, env.name]) for env in config.train.env}
    lines = [
        _training_line(config, env, tasks[Kind.TRAIN, env.name], weights[env.name] / sum(weights.values()))
        for env in config.train.env
    ]
    defaults = config.eval
    for entry in defaults.env:
        total = tasks[Kind.EVAL, entry.name]
        used = min(total, entry.num_examples or defaults.num_examples or total)
        episodes, interval = entry.group_size or defaults.group_size, entry.interval or defaults.interval
        each = "1 episode" if episodes == 1 else f"{episodes} episodes"
        when = "every step" if interval == 1 else f"every {interval} steps"
        lines.append(f"evaluation on {entry.name}: {used:,} tasks, {each} each, {when}")
    return lines


def draw_weight(config: OrchestratorConfig, env: TrainEnvConfig, tasks: int) -> float:
    """Return an environment's `ratio` if any environment has one (1 for the others), else its number of tasks."""
    by_ratio = any(other.ratio is not None for other in config.train.env)
    return (env.ratio or 1.0) if by_ratio else float(tasks)


def _training_line(config: OrchestratorConfig, env: TrainEnvConfig, tasks: int, share: float) -> str:
    algo, curriculum = config.algo_of(env), config.curriculum_of(env)
    parts = [
        f"{tasks:,} tasks",
        f"{share:.0%} of the draws",
        f"groups of {env.group_size or config.group_size}",
        f"algorithm {algo.type}",
        f"sampler {curriculum.sampler.type if curriculum.sampler else 'shuffled'}",
    ]
    if curriculum.gate is not None and curriculum.gate.type != "none":
        parts.append(f"gate {curriculum.gate.type}")
    filters = [*config.pre_batch_filters, *config.post_batch_filters]
    parts.append(f"filters {', '.join(f.label for f in filters if f.enforce) or 'none'}")
    teacher = algo.sampling_source or getattr(algo, "teacher", None)
    if isinstance(teacher, str):
        parts.append(f"teacher the {teacher}")
    elif teacher is not None:
        parts.append(f"teacher {teacher.name} at {', '.join(teacher.base_url)}")
    return f"training on {env.name}: {'; '.join(parts)}"


def notify_changed_tasks(environments: Environments, journal: Journal, status: Status) -> None:
    """Notify once for each environment whose tasks differ from the last start: its draws are positions in them.

    The run continues, since a data set may have been fixed on purpose. The journal records the current tasks.
    """
    for (kind, name), (_, _, tasks) in environments.items():
        now = fingerprint(task.data for task in tasks)
        before = journal.exchange_data(kind, name, now)
        if before is not None and (change := before.change_to(now)):
            status.notify(
                f"the tasks of the {kind} environment {name!r} have changed since the run last started: {change}. "
                f"{CONSEQUENCES[kind]}"
            )
