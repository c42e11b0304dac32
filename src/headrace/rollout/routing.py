"""Route sampled tokens to a loss component by weight streams, and check that the losses have the streams they read.

This is the last step before a batch ships, so that no batch is written that the trainer would refuse.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from headrace.rollout.types import KNOWN_STREAMS, Sample


def route_actions(sample: Sample, component: Literal["rl", "ce", "ref_kl"]) -> None:
    """Assign the sampled tokens to `component`.

    `rl` is the default and needs no stream. For another component they get rl weight 0 and weight 1.0 there. Weights
    that an algorithm has written are kept, zeros included, unless they select only tokens that were not sampled.
    """
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
    """Return which stream the losses of its tokens lack or cannot compute with; empty if none."""
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
