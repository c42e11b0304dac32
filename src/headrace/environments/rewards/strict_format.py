"""Reward for a completion in the strict format."""

from __future__ import annotations

from headrace.environments.rewards.base import Data
from headrace.environments.rewards.registry import register_reward
from headrace.environments.strict_format import format_of


@register_reward
def format_tag_reward(text: str, data: Data) -> float:
    """1.0 for the strict format with an answer in its box, else 0.0."""
    return float(format_of(data).parse(text) is not None)


format_tag_reward.bounded = True  # type: ignore[attr-defined]
