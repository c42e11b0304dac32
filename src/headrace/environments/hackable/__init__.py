"""For changing one file and seeing a curve: data providers, rewards and objectives as small plugins. No torch."""

from headrace.environments.hackable import adapted_rewards, curriculum, data, objectives, rewards
from headrace.environments.hackable.objective import Objective, Progress
from headrace.environments.hackable.registry import (
    DataProvider,
    Reward,
    build_data_provider,
    build_objective,
    build_reward,
    build_rewards,
    in_order,
    register_data_provider,
    register_objective,
    register_reward,
)
from headrace.environments.hackable.samples import TrainingSample, asked
from headrace.environments.hackable.scoring import Scored, Scorer

__all__ = [
    "DataProvider",
    "Objective",
    "Progress",
    "Reward",
    "Scored",
    "Scorer",
    "TrainingSample",
    "adapted_rewards",
    "asked",
    "build_data_provider",
    "build_objective",
    "build_reward",
    "build_rewards",
    "curriculum",
    "data",
    "in_order",
    "objectives",
    "register_data_provider",
    "register_objective",
    "register_reward",
    "rewards",
]
