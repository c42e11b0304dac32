"""Loss components of tokens: routing by weight streams, checks before a batch ships, and shares of the gradient."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from headrace.rollout.types import KNOWN_STREAMS, Rollout, Sample


def route_actions(sample: Sample, component: Literal["rl", "ce", "ref_kl"]) -> None:
    """Assign the sampled tokens that train to `component`.

    `rl` is the default and needs no stream. For another component they get rl weight 0 and weight 1.0 there. Weights
    that an algorithm has written are kept, zeros included, unless they select only tokens that were not sampled.
    Sampled tokens that their environment excludes get weight 0, whatever the algorithm wrote.
    """
    excluded = sample.sampled & ~sample.mask
    for name in [name for name in sample.streams if name.endswith("_weights")] if excluded.any() else ():
        sample.set_stream(name, np.where(excluded, np.float32(0), sample.streams[name]))
    if component == "rl":
        return
    zeros = np.zeros(len(sample), np.float32)
    if "rl_weights" not in sample.streams:
        sample.set_stream("rl_weights", zeros)
    name = f"{component}_weights"
    written = sample.streams.get(name)
    if written is None or selects_only_unsampled(written, sample.mask):
        others = zeros if written is None else written
        sample.set_stream(name, np.where(sample.mask, np.float32(1), others))


def selects_only_unsampled(weights: np.ndarray, mask: np.ndarray) -> bool:
    return bool(np.any(weights)) and not np.any(weights[mask])


def training_problem(sample: Sample) -> str:
    """Describe the first stream of a sample that is missing or not finite where its losses read it; empty if none."""
    streams, zeros = sample.streams, np.zeros(len(sample), np.float32)
    in_rl, in_ref_kl = sample.rl_members, streams.get("ref_kl_weights", zeros) != 0
    if in_rl.any() and "advantages" not in streams:
        return f"{int(in_rl.sum())} tokens are in the rl loss and have no advantages"
    if in_ref_kl.any() and "ref_logprobs" not in streams:
        return f"{int(in_ref_kl.sum())} tokens are in the ref_kl loss and have no ref_logprobs"
    trained = in_rl | in_ref_kl | (streams.get("ce_weights", zeros) != 0)
    for name in KNOWN_STREAMS:
        values = streams[name][trained] if name in streams else zeros
        if not np.isfinite(values).all():
            return f"{name} of a token is {values[~np.isfinite(values)][0]}"
    logprobs = sample.logprobs[in_rl | in_ref_kl]
    if not np.isfinite(logprobs).all():
        return f"the sampling logprob of a token is {logprobs[~np.isfinite(logprobs)][0]}"
    return ""


class GradientShare(NamedTuple):
    """The gradient of one rollout in one loss component: its size, summed over member tokens, and their number."""

    total: float
    members: int


def gradient_shares(rollout: Rollout) -> dict[str, GradientShare]:
    """Return by loss component, of those that train any token, how much a rollout contributes to the gradient."""
    shares: dict[str, GradientShare] = {}
    for sample in rollout.samples:
        for component, (members, sizes) in token_gradients(sample).items():
            before = shares.get(component, GradientShare(0.0, 0))
            shares[component] = GradientShare(before.total + float(sizes.sum()), before.members + len(members))
    return shares


def token_gradients(sample: Sample) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return by loss component, of those that train any token, the member tokens and the sizes of their gradients.

    The absolute gradient with respect to a member token's logprob, at the policy that sampled it:

        rl      |A| * w
        ce      w
        ref_kl  |ref - logprob| * w
        k2      |logprob - reference| * w                0 where only the trainer knows the reference
        k3      |exp(reference - logprob) - 1| * w       the same

    The trainer divides a component by its member tokens in the whole step; callers that have the whole step do the
    same. This is a proxy: it leaves out what a loss masks or clips, how far the policy has moved since, and how
    strongly a token's logprob depends on the weights.
    """
    weights = {"rl": sample.streams.get("rl_weights", np.ones(len(sample))) * sample.mask}
    for name in ("ce", "ref_kl", "k2", "k3"):
        if f"{name}_weights" in sample.streams:
            weights[name] = sample.streams[f"{name}_weights"]
            if name in ("k2", "k3"):  # penalties of tokens outside the rl loss are ignored
                weights[name] = weights[name] * sample.rl_members
    gradients = {}
    for component, weight in weights.items():
        members = np.flatnonzero(weight[1:]) + 1  # the first token of a sequence has no loss
        if len(members):
            sizes = np.abs(weight[members].astype(np.float64) * _slopes(component, sample, members))
            gradients[component] = members, sizes
    return gradients


def _slopes(component: str, sample: Sample, members: np.ndarray) -> np.ndarray | float:
    """Return the derivative of the loss at each member token, for a weight of 1."""
    if component == "ce":
        return 1.0
    if component in ("k2", "k3"):
        if "kl_logprobs" not in sample.streams:
            return 0.0
        gap: np.ndarray = np.nan_to_num(
            sample.streams["kl_logprobs"][members].astype(np.float64) - sample.logprobs[members]
        )
        return gap if component == "k2" else np.asarray(np.expm1(gap))
    stream = "advantages" if component == "rl" else "ref_logprobs"
    if stream not in sample.streams:
        raise ValueError(f"a sample has {component} tokens but no {stream}: its algorithm has not set them")
    values: np.ndarray = sample.streams[stream][members].astype(np.float64)
    return values if component == "rl" else values - sample.logprobs[members]
