"""Custom: a function of the user computes the credit of a group's rollouts.

    A = function(group)

It takes the views of the group, with rewards, messages, turns and samples, and returns one entry per rollout, in their
order: a number for all completion tokens, or one number per completion token, samples end to end.

Left out on purpose: requests to other models and state. They need a subclass of `headrace.algorithms.base.Algorithm`,
which a run file names by its import path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Literal

from pydantic import Field

from headrace.algorithms.base import Algorithm, MakeContext, RolloutView, as_finite_array
from headrace.config.algorithms import ALGORITHMS, INVARIANTS, AdvantageConfig, Promises
from headrace.config.model import ModelReference
from headrace.errors import BadInput
from headrace.imports import load_class, load_function, name_of


@ALGORITHMS.register
class CustomAlgoConfig(AdvantageConfig):
    """A function of the group that gives each rollout's advantage, or one per token."""

    CREDIT = "the return value of a function of yours"
    READS_TASKS = True

    type: Literal["custom"] = "custom"
    import_path: str
    """`package.module:function`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for your function, beside the group."""

    def make(self, context: MakeContext) -> Custom:
        return Custom(load_function(self.import_path, self.kwargs, "algorithm"))

    def check_imports(self) -> None:
        load_function(self.import_path, self.kwargs, "algorithm")


@ALGORITHMS.register
class ImportedAlgoConfig(AdvantageConfig):
    """An algorithm of your own: a subclass of `headrace.algorithms.base.Algorithm`."""

    ON_POLICY = False  # it may be, but only the class itself can tell
    READS_TASKS = True

    type: str
    """`package.module:Class`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """What it is constructed with."""
    teacher: ModelReference | None = None
    """The model of a class that declares a `model_role`: `policy`, or a frozen model."""
    max_concurrent: int = Field(32, ge=1)
    """Requests to the teacher at once."""

    def make(self, context: MakeContext) -> Algorithm:
        self.check_imports()
        algorithm = _load_class(self)(**self.kwargs)
        algorithm.max_concurrent = self.max_concurrent
        if (frozen := context.reference(self.teacher)) is not None:
            algorithm.teacher = frozen
        return algorithm

    def check_imports(self) -> None:
        role = self.model_role
        if role and self.teacher is None:
            fix = 'Set teacher = "policy", or teacher.name, and teacher.base_url to where it is served.'
            raise BadInput(f"the class needs a model as its {role}", key="teacher", fix=fix)
        if self.teacher is not None and not role:
            fix = 'Leave teacher out, or declare model_role = "teacher" in the class.'
            raise BadInput("the class declares no model_role, so that it has no teacher", key="teacher", fix=fix)
        if self.kl is not None and (component := _load_class(self).action_loss_type) != "rl":
            fact = f"the class trains sampled tokens with {component}, and the penalty is a part of rl"
            raise BadInput(fact, key="kl", fix='Leave kl out, or declare action_loss_type = "rl" in the class.')

    @property
    def model_role(self) -> str:
        """The role that the class declares for its teacher; empty: it has none."""
        return _load_class(self).model_role

    def promises(self, algorithm: Algorithm) -> Promises:
        """Return what the user's class declares in `promises`."""
        if unknown := [name for name in algorithm.promises if name not in INVARIANTS]:
            key, fix = f"{type(algorithm).__name__}.promises", f"Known: {', '.join(INVARIANTS)}."
            raise BadInput("unknown promise", key=key, value=unknown[0], fix=fix)
        return Promises(frozenset({*algorithm.promises, *algorithm.modulates}))


def _load_class(config: ImportedAlgoConfig) -> type[Algorithm]:
    return load_class(config.type, Algorithm, (), config.kwargs, "algorithm")


class Custom(Algorithm):
    def __init__(self, function: Callable[[Sequence[RolloutView]], Any]) -> None:
        self._function = function

    async def score_group(self, group: Sequence[RolloutView]) -> None:
        returned = self._function(group)
        is_ordered = isinstance(returned, Iterable) and not isinstance(returned, Mapping | Set | str | bytes)
        entries = list(returned) if is_ordered else None
        if entries is None or len(entries) != len(group):
            what = f"a {type(returned).__name__}" if entries is None else f"{len(entries)} entries"
            raise ValueError(
                f"{name_of(self._function)} returned {what} for a group of {len(group)} rollouts: "
                "it must return one entry for each, a number or one number per completion token"
            )
        for rollout, entry in zip(group, entries, strict=True):
            credit = as_finite_array(entry, self._function)
            try:
                rollout.assign_advantages(credit)
            except ValueError as error:
                raise ValueError(f"{name_of(self._function)} returned {error}") from error
