"""Rollout filters: predicates on one finished rollout that should not be trained on."""

from __future__ import annotations

import math

import numpy as np

from headrace.rollout.types import NOT_SAMPLED, Rollout

_OTHER_COMPONENTS = ("ce_weights", "ref_kl_weights")


def is_gibberish(rollout: Rollout, vocab_size: int, token_id_threshold: int, logprob_offset: float) -> bool:
    """Whether the policy sampled a rare token (high id) at less than uniform probability."""
    floor = -math.log(vocab_size) - logprob_offset
    return any(
        bool(np.any(s.mask & (s.token_ids > token_id_threshold) & (s.logprobs < floor)))
        for s in rollout.samples
        if s.token_ids.max(initial=0) > token_id_threshold  # rare: skip the larger arrays otherwise
    )


def is_repetitive(rollout: Rollout, window: int, prob_threshold: float) -> bool:
    """Whether `window` consecutive tokens, over turns, were sampled with more than `prob_threshold`."""
    if sum(np.count_nonzero(s.mask) for s in rollout.samples) < window:
        return False
    floor = math.log(prob_threshold)
    # NOT_SAMPLED tokens come from another model: their logprobs are unknown.
    certain = np.concatenate([((s.logprobs > floor) & (s.versions != NOT_SAMPLED))[s.mask] for s in rollout.samples])
    uncertain = np.flatnonzero(~certain)
    return bool(np.any(np.diff(uncertain, prepend=-1, append=len(certain)) > window))


def has_no_advantage(rollout: Rollout) -> bool:
    """Whether all advantages in the rl loss are zero; False if another loss component trains the rollout."""
    if any(np.any(s.streams[name]) for s in rollout.samples for name in _OTHER_COMPONENTS if name in s.streams):
        return False
    credit = [s.streams["advantages"][s.rl_members] for s in rollout.samples if "advantages" in s.streams]
    return any(len(values) for values in credit) and not any(np.count_nonzero(values) for values in credit)
