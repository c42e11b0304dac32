"""Gradient share: how much a rollout's tokens contribute to the gradient, estimated from their credit alone.

The absolute gradient of each loss component with respect to a member token's logprob, at the policy that sampled it:

    rl      |A| * w
    ce      w
    ref_kl  |ref - logprob| * w

summed over the rollout. The trainer divides a component by its member tokens in the whole step; callers that have the
whole step do the same. This is a proxy: it leaves out what a loss masks or clips, how far the policy has moved since,
and how strongly a token's logprob depends on the weights.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headrace.rollout.types import Rollout, Sample


class GradientShare(NamedTuple):
    """Of one rollout in one loss component: the sum over its member tokens, and their number."""

    total: float
    members: int


def gradient_shares(rollout: Rollout) -> dict[str, GradientShare]:
    """Return the gradient share by loss component, for components that train any of the rollout's tokens."""
    shares: dict[str, GradientShare] = {}
    for sample in rollout.samples:
        weights = {"rl": sample.streams.get("rl_weights", np.ones(len(sample))) * sample.mask}
        weights |= {
            name: sample.streams[f"{name}_weights"] for name in ("ce", "ref_kl") if f"{name}_weights" in sample.streams
        }
        for component, weight in weights.items():
            members = np.flatnonzero(weight[1:]) + 1  # the first token of a sequence has no loss
            if len(members):
                sizes = np.abs(weight[members].astype(np.float64) * _slopes(component, sample, members))
                before = shares.get(component, GradientShare(0.0, 0))
                shares[component] = GradientShare(before.total + float(sizes.sum()), before.members + len(members))
    return shares


def _slopes(component: str, sample: Sample, members: np.ndarray) -> np.ndarray | float:
    """Return the derivative of the loss at each member token, for a weight of 1."""
    if component == "ce":
        return 1.0
    stream = "advantages" if component == "rl" else "ref_logprobs"
    if stream not in sample.streams:
        raise ValueError(f"a sample has {component} tokens but no {stream}: its algorithm has not set them")
    values: np.ndarray = sample.streams[stream][members].astype(np.float64)
    return values if component == "rl" else values - sample.logprobs[members]
