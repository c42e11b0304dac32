"""Rewards that ship, and what loads and runs them. Never imports torch."""

from headrace.environments.rewards.base import (
    GroupReward,
    Reward,
    build_reward,
    group_reward,
    in_sandbox,
    register_reward,
    scaled,
)
from headrace.environments.rewards.code import CodeExecution
from headrace.environments.rewards.judge import Judge
from headrace.environments.rewards.math_rewards import Numeric, Symbolic
from headrace.environments.rewards.running import Rewards
from headrace.environments.rewards.text_rewards import Exact, JsonSchema, Pattern

__all__ = [
    "CodeExecution", "Exact", "GroupReward", "JsonSchema", "Judge", "Numeric", "Pattern", "Reward", "Rewards",
    "Symbolic", "build_reward", "group_reward", "in_sandbox", "register_reward", "scaled",
]  # fmt: skip
