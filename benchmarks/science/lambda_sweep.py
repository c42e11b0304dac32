"""The weight lambda of the brevity reward in `token_grpo`: shorter thoughts at equal accuracy.

    reward  = correct + lambda * correct * brevity + format
    brevity = max(0, 1 - tokens of thought / their mean over the group)

The sums and the start of `length_penalty`.
"""

from __future__ import annotations

from benchmarks.science.frame import Claim, Experiment
from benchmarks.science.length_penalty import measure
from benchmarks.science.miniature import Setting

FILES = ("benchmarks/science/sums.toml", "benchmarks/science/brevity.toml")
LAMBDAS = (0.0, 0.25, 1.0)
KEY = "orchestrator.train.env.0.args.objective_kwargs.length_penalty_lambda"

EXPERIMENT = Experiment(
    "The weight of brevity: tokens of a reply",
    {f"lambda {weight:g}": Setting(FILES, {KEY: weight}) for weight in LAMBDAS},
    measure,
    (
        Claim("tokens", "lambda 1", "lambda 0", sign=-1),
        Claim("accuracy", "lambda 1", "lambda 0", margin=0.05),
        Claim("tokens", "lambda 0.25", "lambda 0", sign=-1),
        Claim("tokens", "lambda 1", "lambda 0.25", sign=-1),
        Claim("accuracy", "lambda 0.25", "lambda 0", margin=0.05),
    ),
    plotted="tokens",
)
