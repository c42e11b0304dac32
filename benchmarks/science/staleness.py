"""Stale rollouts, with and without a correction of the loss: without, learning should collapse first.

A batch is sampled with the weights of 0, 1, 4 or 8 updates before. `naive` is REINFORCE, which ignores the age of its
tokens; `corrected` is the default loss: importance ratios, and a mask on tokens whose probability has changed too much.
"""

from __future__ import annotations

from benchmarks.science.distillation import GRPO, measure
from benchmarks.science.frame import Claim, Experiment
from benchmarks.science.miniature import Setting

LOSSES = {"corrected": "default", "naive": "reinforce"}
AGES = (0, 1, 4, 8)
KEYS = {"orchestrator.eval.interval": 9, "orchestrator.eval.group_size": 2, "trainer.optim.lr": 2e-3}

EXPERIMENT = Experiment(
    "Stale rollouts: held-out reward",
    {
        f"{name} {age}": Setting(GRPO, KEYS | {"trainer.loss.type": loss}, staleness=age)
        for age in AGES
        for name, loss in LOSSES.items()
    },
    measure,
    (
        Claim("reward", "corrected 8", "naive 8"),
        Claim("reward", "corrected 4", "naive 4"),
        Claim("reward", "corrected 1", "naive 1"),
        Claim("reward", "corrected 0", "naive 0"),
        Claim("reward", "naive 0", "naive 8"),
        Claim("reward", "corrected 0", "corrected 8"),
    ),
    plotted="reward",
)
