"""The objective `soft_tokens`: the rewards of `token_grpo` for a policy that is trained with soft thoughts.

While the model thinks, the input embedding of each token is the expected one plus noise, and the log-density of the
noise takes the place of the token's logprob (arXiv 2509.19170; `headrace.inference.latents` has the formulas). Tokens
after the thoughts are sampled and trained as usual. The trained model is used with ordinary tokens, so that any engine
serves it.

The advantage is the reward minus the group's mean; that minus the mean of the others (RLOO) is n / (n - 1) times as
large in a group of n.
"""

from __future__ import annotations

from typing import Any, ClassVar

from headrace.environments.hackable.objectives.latent_neuralese import on_policy
from headrace.environments.hackable.objectives.token_grpo import TokenGrpo
from headrace.environments.hackable.registry import register_objective


@register_objective("soft_tokens")
class SoftTokens(TokenGrpo):
    """The rewards of `token_grpo`, for thoughts that are noisy expected embeddings."""

    settings: ClassVar[dict[str, Any]] = on_policy("soft")
