"""The shipped losses as functions of their inputs and settings."""

from collections.abc import Callable

import headrace.runfile  # noqa: F401 (registers the losses)
from headrace.trainer.loss import LossOutputs
from headrace.trainer.losses import policy_loss


def as_function(kind: str) -> Callable[..., LossOutputs]:
    return lambda inputs, **settings: policy_loss(kind, **settings)(inputs)


default_loss = as_function("default")
ipo_loss = as_function("ipo")
ppo_clip_loss = as_function("ppo_clip")
gspo_loss = as_function("gspo")
cispo_loss = as_function("cispo")
icepop_loss = as_function("icepop")
reinforce_loss = as_function("reinforce")
