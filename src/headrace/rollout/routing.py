"""Which loss trains the tokens that the policy sampled: weight streams on a sample, the last step before it ships.

And whether the losses then have what they read, so that nothing ships that the trainer would refuse.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from headrace.rollout.types import KNOWN_STREAMS, Sample


def route_actions(sample: Sample, component: Literal["rl", "ce", "ref_kl"]) -> None:
    """Send the sampled tokens to `component`.

    `rl` is where they go by themselves, without any stream. For another one they leave rl, and get weight 1.0 there.
    Weights that an algorithm has written hold, zeros too. Only where all that it chose are tokens that nobody sampled
    has it said nothing of those that were.
    """
    if component == "rl":
        return
    nothing = np.zeros(len(sample), np.float32)
    if "rl_weights" not in sample.streams:
        sample.set_stream("rl_weights", nothing)
    name = f"{component}_weights"
    written = sample.streams.get(name)
    if written is None or says_nothing_of_actions(written, sample.mask):
        others = nothing if written is None else written
        sample.set_stream(name, np.where(sample.mask, np.float32(1), others))


def says_nothing_of_actions(weights: np.ndarray, mask: np.ndarray) -> bool:
    """Whether weights choose tokens, but none that was sampled."""
    return bool(np.any(weights)) and not np.any(weights[mask])


def why_untrainable(sample: Sample) -> str:
    """What the losses that its tokens are in would lack, or could not compute with; empty if nothing."""
    streams, nothing = sample.streams, np.zeros(len(sample), np.float32)
    in_rl = sample.mask & (streams["rl_weights"] != 0) if "rl_weights" in streams else sample.mask
    in_ref_kl = streams.get("ref_kl_weights", nothing) != 0
    if in_rl.any() and "advantages" not in streams:
        return f"{int(in_rl.sum())} tokens are in the rl loss and have no advantages"
    if in_ref_kl.any() and "ref_logprobs" not in streams:
        return f"{int(in_ref_kl.sum())} tokens are in the ref_kl loss and have no ref_logprobs"
    trained = in_rl | in_ref_kl | (streams.get("ce_weights", nothing) != 0)
    for name in KNOWN_STREAMS:
        values = streams[name][trained] if name in streams else nothing
        if not np.isfinite(values).all():
            return f"a token's {name} are {values[~np.isfinite(values)][0]}"
    sampled_with = sample.logprobs[in_rl | in_ref_kl]
    if not np.isfinite(sampled_with).all():
        return f"the logprob that a token was sampled with is {sampled_with[~np.isfinite(sampled_with)][0]}"
    return ""
