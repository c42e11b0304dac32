"""`pre_batch_filters` and `post_batch_filters`: the base of the filters in `headrace.orchestrator.filters`."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from headrace.config.registry import Alternative, Registry
from headrace.rollout.types import Rollout

FILTERS: Registry[FilterConfig] = Registry("filter")


class FilterConfig(Alternative):
    """A test of a rollout that keeps it out of a batch, or only counts it."""

    REGISTRY = FILTERS
    READS_ADVANTAGES: ClassVar[bool] = False
    """Tests the credit of a rollout. In `post_batch_filters` such a filter is enforced unless `enforce` is set."""

    type: str
    enforce: bool = False
    """Drop what is found; false: only count it."""

    @property
    def label(self) -> str:
        """Its name in metrics."""
        return self.type

    def make_test(self, vocab_size: int) -> Callable[[Rollout], bool]:
        """Return the function that says whether a rollout is to be dropped."""
        raise NotImplementedError
