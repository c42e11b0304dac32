"""What every contender is given: the same model, prompts, rollouts, learning rate and number of steps."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from headrace.environments.base import tasks_of
from headrace.environments.script import play
from headrace.orchestrator.source import TrainSource, TrainTasks
from headrace.rollout.types import Message

NAME = "tool_calls:tool_calls"
EXAMPLE = Path(__file__).parents[2] / "examples/tool-calls"


class Settings(NamedTuple):
    """A step samples `group` answers to each of `prompts` requests, and is one step of the optimizer."""

    model: str
    seed: int
    steps: int
    prompts: int
    group: int
    max_tokens: int
    temperature: float
    lr: float

    @property
    def rollouts(self) -> int:
        return self.prompts * self.group


class Point(NamedTuple):
    """The rollouts of one step: when the last of them was scored, in seconds of the run, and what they earned."""

    step: int
    seconds: float
    reward: float
    exact: float


def tool_calls() -> ModuleType:
    """The module of the example: its tasks and rewards."""
    if str(EXAMPLE) not in sys.path:
        sys.path.append(str(EXAMPLE))
    import tool_calls

    return tool_calls


async def drawn_prompts(settings: Settings) -> list[tuple[list[Message], str]]:
    """The messages and the answer of every task of the run, in the order in which Headrace draws them for this seed."""
    environment = tool_calls().tool_calls()
    source = TrainSource([TrainTasks(NAME, tasks_of(environment, NAME), 1.0)], settings.seed)
    found = []
    for _ in range(settings.steps * settings.prompts):
        task = source.draw()[1]
        _, script = await play(environment, task, lambda messages: "")
        found.append((script.calls[0][0], task.data["answer"]))
    return found


def reached(points: list[Point], reward: float, window: int) -> Point | None:
    """The first step at which the mean reward of the last `window` steps is that high."""
    for last in range(window, len(points) + 1):
        if sum(point.reward for point in points[last - window : last]) / window >= reward:
            return points[last - 1]
    return None
