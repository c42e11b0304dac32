"""MaxRL against GRPO: pass@1, pass@k and the share of tasks that are never solved (arXiv 2602.02710).

Two kinds of words look alike to the start: those to repeat, which half of its samples get right, and those to reverse,
where one in eleven is right. MaxRL divides by the group's success rate, so that what is rarely solved counts more; GRPO
learns most from what is solved every other time.
"""

from __future__ import annotations

import numpy as np
from benchmarks.science.frame import Claim, Experiment
from benchmarks.science.miniature import Played, Setting

FILES = ("examples/reverse-text/rl.toml", "benchmarks/science/words.toml")


def measure(played: Played) -> dict[str, float]:
    rewards = np.array([[rollout.reward for rollout in group] for group in played])
    is_hard = np.array([group[0].metrics["reversed"] > 0 for group in played])
    return {
        "pass@1": rewards.mean(),
        "pass@8": (rewards.max(1) > 0).mean(),
        "never solved": (rewards.max(1) == 0).mean(),
        "pass@1 of hard words": rewards[is_hard].mean(),
    }


EXPERIMENT = Experiment(
    "MaxRL against GRPO: held-out pass@8",
    {"GRPO": Setting(FILES), "MaxRL": Setting(FILES, {"orchestrator.algo.type": "max_rl"})},
    measure,
    (
        Claim("pass@8", "MaxRL", "GRPO"),
        Claim("never solved", "MaxRL", "GRPO", sign=-1),
        Claim("pass@1 of hard words", "MaxRL", "GRPO"),
        Claim("pass@1", "MaxRL", "GRPO", margin=0.05),
    ),
    plotted="pass@8",
)
