"""Why a published version did not become an engine's weights: for those who call engines, without torch."""

from __future__ import annotations

from headrace.errors import Failure

NAMED = 3
"""How many tensors an error message names."""


class WeightsError(Failure):
    """The directory cannot become the engine's weights. The model is as it was."""


class WeightsUnreachable(WeightsError):
    """The version did not come over: its trainer is gone, silent or has moved on, or the bytes are not those it sent.

    The model is as it was, and another try may succeed.
    """


def some(names: list[str]) -> str:
    """The first few, and how many there are beside them."""
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")
