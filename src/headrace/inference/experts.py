"""The experts of a model, for engine and trainer: where its layers choose them, and results that no batch changes.

In the families of transformers a layer with experts has a module `experts`, and beside it a router: a module with
`top_k` and `num_experts` that ranks the experts of each token with `torch.topk`, and returns its logits, gates and the
chosen experts. A router that does not is left alone; nothing else depends on the family.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Router(NamedTuple):
    """The router of one decoder layer."""

    layer: int
    """Number of the decoder layer."""
    module: Any


def find_routers(model: Any) -> list[Router]:
    """Return the routers of a model, in the order of its layers; empty if there are none, or others than known."""
    routers = []
    for name, module in model.named_modules():
        siblings = dict(module.named_children())
        numbers = [int(part) for part in name.split(".") if part.isdigit()]
        if "experts" in siblings and numbers:
            routers += [Router(numbers[0], each) for each in siblings.values() if hasattr(each, "top_k")]
    return routers if all(_has_expected_output(router.module) for router in routers) else []


@torch.no_grad()
def _has_expected_output(router: Any) -> bool:
    """Return whether a router returns logits, gates and chosen experts. It is called, since nothing declares that."""
    weight, experts = getattr(router, "weight", None), getattr(router, "num_experts", None)
    if weight is None or experts is None:
        return False
    hidden, bias = weight.new_zeros(1, weight.shape[-1]), weight.new_zeros(experts)
    try:
        output = router(hidden)
    except TypeError:  # some take the bias of their choice, others the tokens
        try:
            output = router(hidden, bias)
        except (IndexError, RuntimeError, TypeError):
            return False
    shapes = {part.is_floating_point(): part.shape for part in output if part.shape[-1] in (experts, router.top_k)}
    return isinstance(output, tuple) and len(output) == 3 and shapes.get(False) == (1, router.top_k)


def chosen_experts(output: tuple[Tensor, ...]) -> Tensor:
    """Return the experts in a router's output: [tokens, experts per token]."""
    return next(part for part in output if not part.is_floating_point())


def compute_lone_tokens_twice(model: Any) -> None:
    """Make every expert of a model compute at least two rows, or none."""
    if find_routers(model):
        for name, module in model.named_modules():
            if name.endswith(".experts") and not isinstance(module.forward, partial):  # another engine may share it
                module.forward = partial(_forward_lone_tokens_twice, module.forward)


def _forward_lone_tokens_twice(forward: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Call an experts' `forward` with a second copy of each token that is alone at an expert.

    `hidden`: [tokens, width]; `chosen`: [tokens, experts per token].
    """
    is_lone = torch.bincount(chosen.flatten()) == 1
    again = is_lone[chosen].any(-1).nonzero().flatten()
    result: Tensor = forward(*(torch.cat([rows, rows[again]]) for rows in (hidden, chosen, weights)))
    return result[: len(hidden)]
