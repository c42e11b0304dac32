"""The numbers that rule the pipeline, as plain values."""

from __future__ import annotations

import msgspec


class Settings(msgspec.Struct):
    """What a run file says about steps, batches, ages and permits."""

    max_steps: int
    batch_size: int | None
    token_batch_size: int | None
    seq_len: int
    group_sizes: dict[str, int]
    max_inflight: int
    max_async_level: int = 1
    max_off_policy_steps: int = 8
    max_empty_batches: int | None = None
    tasks_per_minute: float | None = None
    scored_together: frozenset[str] = frozenset()
    """Environments that score groups: their groups start at once."""
    frozen: frozenset[str] = frozenset()
    """Environments that a frozen model plays: their rollouts never age."""

    @property
    def oldest_allowed(self) -> int:
        """Staleness that a rollout may have; at level 0 only the current policy will do."""
        return self.max_off_policy_steps if self.max_async_level else 0
