"""Thoughts in latent space against thoughts in tokens (arXiv 2505.18454), and what zeroing the latents costs.

The start writes a sum with its result and boxes what it wrote. Half of its samples are right, but nine in ten of its
likeliest results are: a sampled token holds one draw, and the latent beside it the distribution that it was drawn from,
sharpened. So a model that reads latents can box the likeliest result where a wrong one was drawn.

The paper's gates keep .997 of a token's embedding and do not move in 30 steps here, so that hardly anything of a latent
is read (`latent`). With `open gates` they keep .3 at the start.
"""

from __future__ import annotations

from benchmarks.science.frame import Claim, Experiment, Run
from benchmarks.science.length_penalty import measure
from benchmarks.science.miniature import Setting

FILES = ("benchmarks/science/sums.toml", "benchmarks/science/latent.toml")
LATENTS = {"model.latents.type": "hybrid", "model.latents.gates_lr": 1e-3, "model.latents.retention_lr": 1e-2}
COST = "accuracy lost without latents"


def cost_of_zeroing(run: Run, all_runs: dict[str, Run]) -> dict[str, float]:
    """Return how much accuracy the final model loses if its latents are zeroed; a model without latents, nothing."""
    curves = run["curves"]
    return {COST: curves["accuracy"][-1][1] - curves.get("accuracy without latents", curves["accuracy"])[-1][1]}


EXPERIMENT = Experiment(
    "Latent against token thinking: accuracy",
    {
        "tokens": Setting(FILES),
        "latent": Setting(FILES, LATENTS),
        "open gates": Setting(FILES, LATENTS, retention=0.3),
    },
    measure,
    (
        Claim(COST, "open gates", "tokens"),
        Claim("accuracy", "open gates", "tokens"),
        Claim("accuracy", "latent", "tokens", margin=0.05),
        Claim(COST, "latent", "tokens"),
    ),
    plotted="accuracy",
    derive=cost_of_zeroing,
)
