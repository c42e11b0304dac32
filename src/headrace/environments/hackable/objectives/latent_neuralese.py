"""The objective `latent_neuralese`: the rewards of `token_grpo` for a policy that thinks in latent space.

While the model thinks, the input embedding of each token is a blend, by trained gates, of the token's embedding and the
expected one (arXiv 2505.18454; `headrace.inference.latents` has the formulas). Tokens stay discrete, so that rewards
and formats are those of any other run. Per token, with advantages divided by the standard deviation of the group:

    loss = -(A * log pi(y) - beta * k3),  beta = 0.005, k3 against the initial model without latents

There is no ratio, so training is strictly on-policy. The loss is a mean over the tokens of a step, as in every run, and
not over completions first.
"""

from __future__ import annotations

from typing import Any, ClassVar

from headrace.environments.hackable.objectives.token_grpo import TokenGrpo
from headrace.environments.hackable.registry import register_objective


def on_policy(latents: str) -> dict[str, Any]:
    """Return the sections of a run file for thoughts of this type: without a ratio, and so without stale rollouts."""
    return {
        "model": {"latents": {"type": latents}},
        "orchestrator": {"max_async_level": 0},
        "trainer": {"loss": {"type": "reinforce"}},
    }


@register_objective("latent_neuralese")
class LatentNeuralese(TokenGrpo):
    """The rewards of `token_grpo`, for thoughts that blend tokens with expected embeddings."""

    algorithm: ClassVar[str | dict[str, Any]] = {
        "type": "grpo",
        "normalize": "std",
        "kl": {"coef": 0.005, "estimator": "k3"},
    }
    settings: ClassVar[dict[str, Any]] = on_policy("hybrid")
