"""Tasks, episodes and rewards: the API for writing environments. Never imports torch."""

from headrace.environments.base import Context, Environment, EpisodeError, Reply
from headrace.environments.chat import Chat, ToolError
from headrace.environments.single_turn import environment
from headrace.rollout.types import Rollout, Task

__all__ = ["Chat", "Context", "Environment", "EpisodeError", "Reply", "Rollout", "Task", "ToolError", "environment"]
