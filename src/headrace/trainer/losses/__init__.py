"""Losses of the rl component: those that ship, and one of the user's own. Formulas: `headrace.trainer.loss`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from headrace.config.trainer import LOSSES
from headrace.imports import import_declarations

if TYPE_CHECKING:
    from headrace.trainer.loss import Loss


def policy_loss(kind: str, **settings: Any) -> Loss:
    """Make the loss of a `[trainer.loss]` section with this type and these keys."""
    import_declarations(sys.modules[__name__])
    return LOSSES.section(kind).model_validate({"type": kind, **settings}).make()
