"""`[orchestrator.algo.length_penalty]`: the base of the penalties in `headrace.algorithms.length_penalties`."""

from __future__ import annotations

from typing import ClassVar

from headrace.config.registry import Alternative, Registry

LENGTH_PENALTIES: Registry[LengthPenaltyConfig] = Registry("length penalty")


class LengthPenaltyConfig(Alternative):
    """A term of a group's credit that makes long rollouts worth less."""

    REGISTRY = LENGTH_PENALTIES
    OWN_BASELINE: ClassVar[bool] = False
    """Is defined over the plain mean of the group, and cannot be combined with a length-weighted baseline."""
    SHIFT_REASON: ClassVar[str] = ""
    """Why credit changes when a constant is added to all rewards; empty: it does not."""

    type: str

    @property
    def needs_seq_len(self) -> bool:
        """Whether lengths are measured in units of `seq_len`."""
        return False
