"""The hackable layer: data providers, rewards and objectives as small plugins of a run file. Never imports torch."""

from headrace.environments.hackable.environment import Scored, Scorer
from headrace.environments.hackable.registry import (
    DataProvider,
    Objective,
    Progress,
    Trace,
    TrainingSample,
    build_data_provider,
    build_objective,
    in_order,
    make_sample,
    register_data_provider,
    register_objective,
)
from headrace.environments.rewards.base import build_reward, build_rewards, register_reward

asked = make_sample
"""The earlier name of `make_sample`."""

__all__ = [
    "DataProvider", "Objective", "Progress", "Scored", "Scorer", "Trace", "TrainingSample", "asked",
    "build_data_provider", "build_objective", "build_reward", "build_rewards", "in_order", "make_sample",
    "register_data_provider", "register_objective", "register_reward",
]  # fmt: skip
