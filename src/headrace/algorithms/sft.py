"""SFT inside a run: a frozen teacher plays the episodes, and the policy learns to say the same.

    loss = -log p(token)    on every token that the teacher sampled

There is nothing to credit: rewards are logged, and no algorithm reads them. Who plays is `sampling.source`, so the
teacher is the orchestrator's to ask, and not this algorithm's.
"""

from __future__ import annotations

from headrace.algorithms.base import Algorithm


class Sft(Algorithm):
    action_loss_type = "ce"
    model_role = "teacher"
