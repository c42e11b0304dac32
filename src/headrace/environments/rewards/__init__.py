"""Rewards: what an answer is worth, given the task's data. Never imports torch."""

from headrace.environments.rewards.base import Reward, Rewards, in_sandbox, scaled
from headrace.environments.rewards.code import CodeExecution
from headrace.environments.rewards.exact import Exact
from headrace.environments.rewards.json_schema import JsonSchema
from headrace.environments.rewards.judge import Judge
from headrace.environments.rewards.numeric import Numeric
from headrace.environments.rewards.pattern import Pattern
from headrace.environments.rewards.symbolic import Symbolic

__all__ = [
    "CodeExecution",
    "Exact",
    "JsonSchema",
    "Judge",
    "Numeric",
    "Pattern",
    "Reward",
    "Rewards",
    "Symbolic",
    "in_sandbox",
    "scaled",
]
