"""One line per environment when a run begins: what it trains or evaluates with, as resolved from the configuration."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.config.model_reference import FrozenModelConfig
from headrace.config.orchestrator import EvalEnvConfig, OrchestratorConfig, TrainEnvConfig
from headrace.orchestrator.signals import Kind


def startup_lines(config: OrchestratorConfig, tasks: Mapping[tuple[Kind, str], int]) -> list[str]:
    """Return a line for each environment. `tasks` is how many each has, by slot and name."""
    weights = {env.name: draw_weight(config, env, tasks[Kind.TRAIN, env.name]) for env in config.train.env}
    return [
        *(
            _of_training(config, env, tasks[Kind.TRAIN, env.name], weights[env.name] / sum(weights.values()))
            for env in config.train.env
        ),
        *(_of_evaluation(config, env, tasks[Kind.EVAL, env.name]) for env in config.eval.env),
    ]


def draw_weight(config: OrchestratorConfig, env: TrainEnvConfig, tasks: int) -> float:
    """Return an environment's `ratio` where any has one (1 for the others), else its number of tasks."""
    by_ratio = any(other.ratio is not None for other in config.train.env)
    return (env.ratio or 1.0) if by_ratio else float(tasks)


def _of_training(config: OrchestratorConfig, env: TrainEnvConfig, tasks: int, share: float) -> str:
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
    if teacher is not None:
        parts.append(f"teacher {_model(teacher)}")
    return f"training on {env.name}: {'; '.join(parts)}"


def _model(model: FrozenModelConfig | str) -> str:
    return f"the {model}" if isinstance(model, str) else f"{model.name} at {', '.join(model.base_url)}"


def _of_evaluation(config: OrchestratorConfig, env: EvalEnvConfig, tasks: int) -> str:
    defaults = config.eval
    used = min(tasks, env.num_examples or defaults.num_examples or tasks)
    episodes, interval = env.group_size or defaults.group_size, env.interval or defaults.interval
    each = "1 episode" if episodes == 1 else f"{episodes} episodes"
    when = "every step" if interval == 1 else f"every {interval} steps"
    return f"evaluation on {env.name}: {used:,} tasks, {each} each, {when}"
