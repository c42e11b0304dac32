"""Stale rollouts, with and without a correction of the loss: without, learning should collapse first.

A batch is sampled with the weights of 0, 1, 4 or 8 updates before. `naive` is REINFORCE, which ignores the age of its
tokens: its gradient on a token with a negative advantage does not fade while the token's probability goes to 0, so that
8 updates ask 8 times for the same change. `clipped` (`ppo_clip`) stops at a change of 20% from the sampling policy.
`default` is the default loss, which masks tokens by the change of their probability and leaves ratios unclipped.

Advantages are divided by the group's standard deviation, and the learning rate is twice that of the other experiments:
the weaker the updates, the less age matters.
"""

from __future__ import annotations

from benchmarks.science.distillation import GRPO, measure
from benchmarks.science.frame import Claim, Experiment
from benchmarks.science.miniature import Setting

LOSSES = {"clipped": "ppo_clip", "default": "default", "naive": "reinforce"}
AGES = (0, 1, 4, 8)
KEYS = {
    "max_steps": 60,
    "orchestrator.algo.normalize": "std",
    "orchestrator.eval.interval": 10,
    "orchestrator.eval.group_size": 2,
    "trainer.optim.lr": 2e-3,
}

EXPERIMENT = Experiment(
    "Stale rollouts: held-out reward",
    {
        f"{name} {age}": Setting(GRPO, KEYS | {"trainer.loss.type": loss}, staleness=age)
        for age in AGES
        for name, loss in LOSSES.items()
    },
    measure,
    (
        Claim("reward", "clipped 8", "naive 8"),
        Claim("reward", "clipped 4", "naive 4"),
        Claim("reward", "clipped 1", "naive 1"),
        Claim("reward", "clipped 0", "naive 0"),
        Claim("reward", "default 8", "naive 8"),
        Claim("reward", "naive 0", "naive 8"),
        Claim("reward", "clipped 8", "clipped 0", margin=0.05),
    ),
    plotted="reward",
)
