"""Zero-advantage filter: a rollout from which there is nothing to learn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from headrace.config.orchestrator import FILTERS, FilterConfig
from headrace.rollout.types import Rollout

_OTHER_COMPONENTS = ("ce_weights", "ref_kl_weights", "k2_weights", "k3_weights")


@FILTERS.register
class ZeroAdvantageConfig(FilterConfig):
    """Nothing to learn from: every advantage is 0."""

    READS_ADVANTAGES = True

    type: Literal["zero_advantage"] = "zero_advantage"
    enforce: bool = False
    """Drop rollouts without any advantage; false: only count them. In `post_batch_filters` the default is true."""

    def make_test(self, vocab_size: int) -> Callable[[Rollout], bool]:
        return has_no_advantage


def has_no_advantage(rollout: Rollout) -> bool:
    """Return whether a rollout has rl credit and all of it is 0. Rollouts trained by other losses never match."""
    if any(np.any(s.streams[name]) for s in rollout.samples for name in _OTHER_COMPONENTS if name in s.streams):
        return False
    credit = [s.streams["advantages"][s.rl_members] for s in rollout.samples if "advantages" in s.streams]
    return any(len(values) for values in credit) and not any(np.count_nonzero(values) for values in credit)
