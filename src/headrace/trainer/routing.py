"""Router replay and metrics of routers: which experts the trainer's layers choose, and which the engine chose.

A router ranks the experts of a token with `torch.topk`. Rounding alone can exchange two experts of almost equal rank,
so that trainer and engine compute different functions of the same weights. With recorded routes the trainer takes those
experts instead: inside of a router, the result of `torch.topk` is replaced, and the family's own code computes the
gates from its own logits at these experts. So gradients reach the router's weights as usual, for the experts taken.

A layer may run compiled, and again in the backward pass (activation checkpointing). Both read the routes of the last
forward pass: a backward pass follows its forward pass before there is another one. Statistics are written by an
operator that the compiler does not look into; running it again writes the same values again.
"""

from __future__ import annotations

import math
import weakref
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from headrace.inference.experts import chosen_experts, find_routers
from headrace.observe.metrics import spread
from headrace.trainer.ranks import Ranks

ReplayMode = Literal["off", "record", "replay"]
_INSTANCES: weakref.WeakValueDictionary[int, Routing] = weakref.WeakValueDictionary()
"""By `id`, which is passed to an operator: its arguments can only be tensors and numbers."""


class LayerStatistics(NamedTuple):
    """Sums over the tokens of a forward pass in one layer, on its device."""

    loads: Tensor
    """[experts]: tokens of each expert."""
    entropy: Tensor
    """Entropy of softmax(router logits), relative to that of a uniform distribution."""
    tokens: Tensor
    changed: Tensor
    """Tokens for which the layer itself would take other experts than the recorded ones."""
    recorded: Tensor
    """Tokens with recorded experts."""


class Routing:
    """The routers of a model; `mode`: whether recorded routes are ignored, compared with, or followed."""

    def __init__(self, model: Any, mode: ReplayMode) -> None:
        self.mode = mode
        self.routers = find_routers(model)
        self.statistics: dict[int, LayerStatistics] = {}
        """Statistics of the last forward pass, by layer."""
        _INSTANCES[id(self)] = self
        kinds: dict[type, type] = {}
        for layer, module in self.routers:
            kind = type(module)
            module.__class__ = kinds.setdefault(kind, type(f"Routed{kind.__name__}", (_Routed, kind), {}))
            module.place = torch.tensor([id(self), layer])
            module.recorded = module.followed = None

    def set_routes(self, routes: Tensor | None, tokens: Tensor, *, follow: bool) -> None:
        """Set the routes of the next forward pass, over [1, `tokens`]: [tokens, layers * experts per token].

        `follow`: whether layers take these experts, except where they are -1.
        """
        self.statistics.clear()
        if self.mode == "off":
            return
        for layer, module in self.routers:
            top_k = module.top_k
            free = tokens.new_full((tokens.shape[1], top_k), -1, dtype=torch.int16)
            own = slice(layer * top_k, (layer + 1) * top_k)
            module.recorded = free if routes is None else routes[:, own].contiguous()
            module.followed = module.recorded if follow else free


class _Routed:
    """Mixin that adds recorded routes and statistics to a router, the same in all layers: one compiled program."""

    top_k: int
    num_experts: int
    recorded: Tensor | None
    """[tokens, experts per token] of the last forward pass; None if routes are off."""
    followed: Tensor | None
    """The experts that the layer takes. A second tensor, since a flag would be compiled to two programs."""
    place: Tensor
    """The `id` of the `Routing` and the layer's number, as a tensor: each plain number would be compiled separately."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.recorded is None or self.followed is None:
            output = super().forward(*args, **kwargs)  # type: ignore[misc]
            own = chosen_experts(output)
            recorded = own[:0]
        else:
            choices: list[Tensor] = []
            with _ReplacedChoice(self.followed, self.num_experts, choices):
                output = super().forward(*args, **kwargs)  # type: ignore[misc]
            own, recorded = choices[0], self.recorded
        logits = next(part for part in output if part.is_floating_point() and part.shape[-1] == self.num_experts)
        chosen = _observe(chosen_experts(output), own, recorded, logits.detach(), self.place)
        return tuple(part if part.is_floating_point() else chosen for part in output)


class _ReplacedChoice(TorchFunctionMode):
    """Replaces a router's choice by `followed`, where that is not -1; appends the router's own choice to `choices`."""

    def __init__(self, followed: Tensor, num_experts: int, choices: list[Tensor]) -> None:
        super().__init__()
        self.followed, self.num_experts, self.choices = followed, num_experts, choices

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return result
        scores, own = args[0], result[1]
        if own.shape != self.followed.shape or scores.shape[1] != self.num_experts:
            return result  # a choice among groups of experts
        self.choices.append(own)
        chosen = torch.where(self.followed < 0, own, self.followed)
        return scores.gather(1, chosen), chosen


@torch.library.custom_op("headrace::observe_routes", mutates_args=())
def _observe(chosen: Tensor, own: Tensor, recorded: Tensor, logits: Tensor, place: Tensor) -> Tensor:
    """Store the statistics of a layer, and return a copy of the chosen experts."""
    logprobs = torch.log_softmax(logits.float(), -1)
    entropy = -(logprobs.exp() * logprobs).sum() / math.log(logits.shape[1])  # a tensor would be copied to a GPU
    loads = torch.zeros(logits.shape[1], device=logits.device)
    loads.index_add_(0, chosen.flatten(), loads.new_ones(chosen.numel()))
    is_recorded = recorded[:, 0] >= 0
    is_changed = (own[: len(recorded)].sort(-1).values != recorded).any(-1) & is_recorded
    tokens = torch.full((), float(len(chosen)), device=logits.device)
    routing, layer = place.tolist()
    _INSTANCES[routing].statistics[layer] = LayerStatistics(loads, entropy, tokens, is_changed.sum(), is_recorded.sum())
    return chosen.clone()


@_observe.register_fake
def _(chosen: Tensor, own: Tensor, recorded: Tensor, logits: Tensor, place: Tensor) -> Tensor:
    return torch.empty_like(chosen)


class RoutingMetrics:
    """The statistics of a step's micro-batches, summed."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None
        self._layers: list[int] = []

    def add(self, statistics: dict[int, LayerStatistics], *, counts: bool = True) -> None:
        """Add a micro-batch; without `counts` as zeros, for a row that only keeps a rank in step with others."""
        if statistics:
            rows = [torch.cat([each.loads, torch.stack(each[1:]).float()]) for each in statistics.values()]
            sums = torch.stack(rows).double() * counts
            self._sums, self._layers = sums if self._sums is None else self._sums + sums, list(statistics)

    def by_layer(self, ranks: Ranks) -> dict[str, dict[int, float]]:
        """Return load, entropy and changed routes of each layer, over all ranks; empty for a model without experts."""
        if self._sums is None:
            return {}
        sums = ranks.all_reduce(self._sums).cpu()
        loads, (entropy, tokens, changed, recorded) = sums[:, :-4], sums[:, -4:].T
        if not tokens.any():
            return {}
        values = {"load": loads.max(1).values / loads.mean(1), "entropy": entropy / tokens}
        if recorded.all():
            values["changed"] = changed / recorded
        return {name: dict(zip(self._layers, each.tolist(), strict=True)) for name, each in values.items()}


def summarize_layers(by_layer: dict[str, dict[int, float]]) -> dict[str, float]:
    """Return the mean, the largest and the smallest layer of each metric."""
    return {
        key: value
        for name, layers in by_layer.items()
        for key, value in spread(f"router/{name}", layers.values()).items()
    }
