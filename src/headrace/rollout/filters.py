"""Filters: does a rollout look like something we should not train on? Pure tests on one finished rollout."""

from __future__ import annotations

import math

import numpy as np

from headrace.rollout.types import NOT_SAMPLED, Rollout, Sample

_OTHER_COMPONENTS = ("ce_weights", "ref_kl_weights")


def is_gibberish(rollout: Rollout, vocab_size: int, token_id_threshold: int, logprob_offset: float) -> bool:
    """A rare token (high id) that the policy itself found less likely than chance."""
    floor = -math.log(vocab_size) - logprob_offset
    return any(
        bool(np.any(s.mask & (s.token_ids > token_id_threshold) & (s.logprobs < floor)))
        for s in rollout.samples
        if s.token_ids.max(initial=0) > token_id_threshold  # few are: the rest is not worth looking at
    )


def is_repetitive(rollout: Rollout, window: int, prob_threshold: float) -> bool:
    """`window` tokens in a row of which the policy was all but certain; the streak spans turns."""
    if sum(np.count_nonzero(s.mask) for s in rollout.samples) < window:
        return False
    floor = math.log(prob_threshold)  # how certain another model was, its rollouts do not tell
    certain = np.concatenate([((s.logprobs > floor) & (s.versions != NOT_SAMPLED))[s.mask] for s in rollout.samples])
    doubts = np.flatnonzero(~certain)
    return bool(np.any(np.diff(doubts, prepend=-1, append=len(certain)) > window))


def has_no_advantage(rollout: Rollout) -> bool:
    """The rollout has rl credit and all of it is zero. Rollouts trained by other components never match."""
    if any(np.any(s.streams[name]) for s in rollout.samples for name in _OTHER_COMPONENTS if name in s.streams):
        return False
    credit = [s.streams["advantages"][_in_rl_loss(s)] for s in rollout.samples if "advantages" in s.streams]
    return any(len(values) for values in credit) and not any(np.count_nonzero(values) for values in credit)


def _in_rl_loss(sample: Sample) -> np.ndarray:
    weights = sample.streams.get("rl_weights")
    return sample.mask if weights is None else sample.mask & (weights != 0)
