"""A linear length penalty on GRPO: on every rollout, on correct ones only (`gate_by_correctness`), and none.

One-digit sums from a start whose thoughts are one to six lines long, whatever the sum: most tokens buy nothing.
"""

from __future__ import annotations

import numpy as np
from benchmarks.science.frame import Claim, Experiment
from benchmarks.science.miniature import Played, Setting

FILES = ("benchmarks/science/sums.toml",)
PENALTY = {"orchestrator.algo.length_penalty.type": "linear", "orchestrator.algo.length_penalty.coef": 1.0}
GATE = {"orchestrator.algo.length_penalty.gate_by_correctness": "true"}


def measure(played: Played) -> dict[str, float]:
    rollouts = [rollout for group in played for rollout in group]
    return {
        "accuracy": np.mean([rollout.reward for rollout in rollouts]),
        "tokens": np.mean([rollout.completion_tokens for rollout in rollouts]),
    }


EXPERIMENT = Experiment(
    "A linear length penalty: tokens of a reply",
    {"none": Setting(FILES), "ungated": Setting(FILES, PENALTY), "gated": Setting(FILES, PENALTY | GATE)},
    measure,
    (
        Claim("tokens", "gated", "none", sign=-1),
        Claim("accuracy", "gated", "none", margin=0.05),
        Claim("tokens", "ungated", "none", sign=-1),
        Claim("accuracy", "ungated", "none", margin=0.05),
        Claim("accuracy", "gated", "ungated"),
        Claim("tokens", "gated", "ungated"),
    ),
    plotted="tokens",
)
