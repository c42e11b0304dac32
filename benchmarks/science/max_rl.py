"""MaxRL against GRPO: pass@1, pass@k and the share of tasks that are never solved (arXiv 2602.02710).

Exact reversals of words of 4 to 8 letters; at the start 28% of the samples of four letters are right and 3% of those
of eight. MaxRL divides by the group's success rate, so that words that are rarely solved count more.
"""

from __future__ import annotations

import numpy as np
from benchmarks.science.frame import Claim, Experiment
from benchmarks.science.miniature import Played, Setting

FILES = ("examples/reverse-text/rl.toml", "benchmarks/science/words.toml")
LONG_LETTERS = 7
"""Words from this length on are the hard ones."""


def measure(played: Played) -> dict[str, float]:
    rewards = np.array([[rollout.reward for rollout in group] for group in played])
    letters = np.array([len(group[0].messages[0]["content"]) for group in played])
    return {
        "pass@1": rewards.mean(),
        "pass@8": (rewards.max(1) > 0).mean(),
        "never solved": (rewards.max(1) == 0).mean(),
        "pass@1 of long words": rewards[letters >= LONG_LETTERS].mean(),
    }


EXPERIMENT = Experiment(
    "MaxRL against GRPO: held-out pass@8",
    {"GRPO": Setting(FILES), "MaxRL": Setting(FILES, {"orchestrator.algo.type": "max_rl"})},
    measure,
    (
        Claim("pass@8", "MaxRL", "GRPO"),
        Claim("never solved", "MaxRL", "GRPO", sign=-1),
        Claim("pass@1 of long words", "MaxRL", "GRPO"),
        Claim("pass@1", "MaxRL", "GRPO", margin=0.05),
    ),
    plotted="pass@8",
)
