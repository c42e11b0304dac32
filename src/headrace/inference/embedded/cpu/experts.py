"""Experts whose results do not depend on the other tokens of a step.

A CPU rounds a product with a single row differently from one with several, so a token that is alone at one of its
experts would be computed differently than with another token beside it, and a seeded request would sample other tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace.inference.experts import find_routers


def compute_lone_tokens_twice(model: Any) -> None:
    """Make every expert of a model compute at least two rows, or none."""
    if find_routers(model):
        for name, module in model.named_modules():
            if name.endswith(".experts") and not isinstance(module.forward, partial):  # another engine may share it
                module.forward = partial(_forward, module.forward)


def _forward(forward: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """`hidden`: [tokens, width]; `chosen`: [tokens, experts per token]."""
    is_lone = torch.bincount(chosen.flatten()) == 1
    again = is_lone[chosen].any(-1).nonzero().flatten()
    result: Tensor = forward(*(torch.cat([rows, rows[again]]) for rows in (hidden, chosen, weights)))
    return result[: len(hidden)]
