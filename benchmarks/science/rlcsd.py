"""RLCSD against GRPO on knights and knaves: credit for tokens instead of one number for an answer (arXiv 2606.11709).

GRPO blames all tokens of an answer for one wrong role; RLCSD contrasts them under right and wrong hints from the same
group, and so changes the credit of the tokens that decide. Seeds 1 to 8 did not decide
(+.032, -.009 to +.073), so that 32 fresh ones do.
"""

from __future__ import annotations

import numpy as np
from benchmarks.science.frame import Claim, Experiment
from benchmarks.science.miniature import Played, Setting

EXAMPLE, PUZZLES = "examples/knights-knaves", "benchmarks/science/puzzles.toml"


def measure(played: Played) -> dict[str, float]:
    return {"solved": np.mean([rollout.metrics["solved"] for group in played for rollout in group])}


EXPERIMENT = Experiment(
    "RLCSD against GRPO on knights and knaves: held-out puzzles solved",
    {
        "GRPO": Setting((f"{EXAMPLE}/grpo.toml", PUZZLES)),
        "RLCSD": Setting((f"{EXAMPLE}/grpo.toml", f"{EXAMPLE}/rlcsd.toml", PUZZLES)),
    },
    measure,
    (Claim("solved", "RLCSD", "GRPO"),),
    plotted="solved",
    seeds=tuple(range(11, 43)),
)
