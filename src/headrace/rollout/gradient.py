"""How hard a rollout's tokens pull at the weights, as far as their credit alone can say.

The gradient of each loss component with respect to a member token's logprob, where the policy is still the one that
sampled the token:

    rl      |A| * w
    ce      w
    ref_kl  |ref - logprob| * w

summed over the rollout. The trainer divides a component by its member tokens in the whole step; whoever knows the step
does that here, too. It is a proxy: what a loss masks or clips, how far the policy has moved since, and how much one
token's logprob moves the weights compared with another's, only the trainer can tell.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headrace.rollout.types import Rollout, Sample


class Pull(NamedTuple):
    """Of one rollout on one loss component."""

    total: float
    members: int


def pulls(rollout: Rollout) -> dict[str, Pull]:
    """By loss component, for those that train any of its tokens."""
    found: dict[str, Pull] = {}
    for sample in rollout.samples:
        for component, sizes in _sizes(sample).items():
            before = found.get(component, Pull(0.0, 0))
            found[component] = Pull(before.total + float(sizes.sum()), before.members + len(sizes))
    return {component: pull for component, pull in found.items() if pull.members}


def _sizes(sample: Sample) -> dict[str, np.ndarray]:
    """By component, one number per member token. The first token of a sequence is never a member."""
    streams = sample.streams
    rl = streams.get("rl_weights", np.ones(len(sample))) * sample.mask
    weights = {
        "rl": rl,
        **{name: streams[f"{name}_weights"] for name in ("ce", "ref_kl") if f"{name}_weights" in streams},
    }
    sizes = {}
    for component, given in weights.items():
        members = np.flatnonzero(given[1:]) + 1
        if len(members):
            sizes[component] = np.abs(given[members].astype(np.float64) * _slopes(component, sample, members))
    return sizes


def _slopes(component: str, sample: Sample, members: np.ndarray) -> np.ndarray | float:
    """Of the loss at each member, for a weight of 1."""
    if component == "ce":
        return 1.0
    needed = "advantages" if component == "rl" else "ref_logprobs"
    if needed not in sample.streams:
        raise ValueError(f"a sample has {component} members but no {needed}: its algorithm has set none")
    values: np.ndarray = sample.streams[needed][members].astype(np.float64)
    return values if component == "rl" else values - sample.logprobs[members]
