"""A filter that is the user's own function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from headrace.algorithms.user_function import load_function
from headrace.config.orchestrator import FILTERS, FilterConfig
from headrace.rollout.types import Rollout


@FILTERS.register
class CustomFilterConfig(FilterConfig):
    """A test of your own: a function that takes a rollout, and `kwargs`, and returns whether to drop it."""

    type: Literal["custom"] = "custom"
    import_path: str
    """`package.module:function`."""
    name: str = ""
    """How it appears in metrics; unset: the function's name."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for your function, beside the rollout."""

    @property
    def label(self) -> str:
        return self.name

    def make_test(self, vocab_size: int) -> Callable[[Rollout], bool]:
        return load_function(self.import_path, self.kwargs, "filter")

    @model_validator(mode="after")
    def _name_is_function(self) -> Self:
        if not self.name:
            object.__setattr__(self, "name", self.import_path.rpartition(":")[2])
        return self
