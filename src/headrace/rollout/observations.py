"""Who wrote what stands between a sample's completions: tools, users, the chat format itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.rollout.types import Sample, Turn


def observed_roles(sample: Sample, turns: Sequence[Turn]) -> np.ndarray | None:
    """For each token its role's number in `ROLES`, 0 outside observations; None where the renderer could not tell.

    `turns` are those of the sample's rollout: its `obs_spans` say which of their prompts each observation is of.
    """
    roles = np.zeros(len(sample), np.int8)
    for start, turn, prompt_start, length in sample.obs_spans:
        known = turns[turn].prompt_roles
        if known is None:
            return None
        place = sample.prompt_length + start
        roles[place : place + length] = known[prompt_start : prompt_start + length]
    return roles
