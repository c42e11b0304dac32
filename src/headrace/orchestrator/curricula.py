"""Construct the sampler and the gate of a `curriculum` section."""

from __future__ import annotations

from collections.abc import Sequence

from headrace import imports
from headrace.algorithms.user_function import check_kwargs
from headrace.config.curriculum import (
    AdvantageRangeConfig,
    CurriculumConfig,
    DifficultyPoolConfig,
    ImportedGateConfig,
    ImportedSamplerConfig,
    InOrderConfig,
)
from headrace.errors import BadInput
from headrace.orchestrator.curriculum import DifficultyPool, InOrder, TaskSampler
from headrace.orchestrator.gate import AdvantageRange, Gate
from headrace.rollout.types import Task


def make_sampler(config: CurriculumConfig, tasks: Sequence[Task]) -> TaskSampler | None:
    """Return the configured sampler; None for the default (`Shuffled`)."""
    match config.sampler:
        case DifficultyPoolConfig(hard_max=hard_max, normal_max=normal_max, weights=weights):
            return DifficultyPool(tasks, hard_max, normal_max, weights.model_dump())
        case InOrderConfig():
            return InOrder(tasks)
        case ImportedSamplerConfig() as own:
            return _imported_sampler(own)(tasks, **own.kwargs)
        case _:
            return None


def make_gate(config: CurriculumConfig) -> Gate | None:
    """Return the configured gate; None if every group passes."""
    match config.gate:
        case AdvantageRangeConfig(reject_min=least, reject_max=most):
            return AdvantageRange(least, most)
        case ImportedGateConfig() as own:
            return _imported_gate(own)(**own.kwargs)
        case _:
            return None


def check_imports(config: CurriculumConfig) -> None:
    """Raise `BadInput` if a custom sampler or gate cannot be imported or does not accept its kwargs; call neither."""
    if isinstance(config.sampler, ImportedSamplerConfig):
        _imported_sampler(config.sampler)
    if isinstance(config.gate, ImportedGateConfig):
        _imported_gate(config.gate)


def _imported_sampler(config: ImportedSamplerConfig) -> type[TaskSampler]:
    kind = imports.load(config.type, "sampler.type")
    if not (isinstance(kind, type) and issubclass(kind, TaskSampler)):
        raise BadInput(
            "not a subclass of headrace.orchestrator.curriculum.TaskSampler", key="sampler.type", value=config.type
        )
    check_kwargs(kind, ([],), config.kwargs, "sampler.type", config.type)
    return kind


def _imported_gate(config: ImportedGateConfig) -> type[Gate]:
    kind = imports.load(config.type, "gate.type")
    if not (isinstance(kind, type) and issubclass(kind, Gate)):
        raise BadInput("not a subclass of headrace.orchestrator.gate.Gate", key="gate.type", value=config.type)
    check_kwargs(kind, (), config.kwargs, "gate.type", config.type)
    return kind
