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
    Weights that an algorithm has written hold: those in rl, those on tokens that nobody sampled, and, where any sampled
    token of the sample has one, those of all its sampled tokens, the zeros too.
    """
    if component == "rl":
        return
    nothing = np.zeros(len(sample), np.float32)
    if "rl_weights" not in sample.streams:
        sample.set_stream("rl_weights", nothing)
    name = f"{component}_weights"
    written = sample.streams.get(name, nothing)
    if not np.any(written[sample.mask]):
        written = np.where(sample.mask, np.float32(1), written)
    sample.set_stream(name, written)


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
    return ""
