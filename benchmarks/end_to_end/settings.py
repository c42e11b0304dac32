"""What every contender is given: the same model, prompts, rollouts, learning rate and number of steps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headrace.environments.base import tasks_of
from headrace.environments.script import play
from headrace.orchestrator.source import TrainSource, TrainTasks
from headrace.rollout.types import Message

EXAMPLE = Path(__file__).parents[2] / "examples/tool-calls"
UNKNOWN = float("nan")
Score = Callable[[str, Mapping[str, Any]], float]


class Workload(NamedTuple):
    """A task: what is asked, how replies are scored, and how long prompt and completion may be together."""

    run_file: Path
    environment: str
    make_environment: Callable[[], Any]
    rewards: list[Score]
    """The reward is their sum."""
    exact: Score
    max_model_len: int


class Settings(NamedTuple):
    """A step samples `group` answers to each of `prompts` requests, and is one step of the optimizer."""

    workload: str
    model: str
    seed: int
    steps: int
    prompts: int
    group: int
    max_tokens: int
    temperature: float
    lr: float
    headrace: tuple[str, ...] = ()
    """Further settings of Headrace's run file, KEY=VALUE."""
    trl: tuple[str, ...] = ()
    """Further settings of TRL's GRPOConfig, KEY=VALUE with values in JSON."""

    @property
    def rollouts(self) -> int:
        return self.prompts * self.group


class Point(NamedTuple):
    """The rollouts of one step: when the last of them was scored, in seconds of the run, and what they earned."""

    step: int
    seconds: float
    reward: float
    exact: float
    mean_tokens: float = UNKNOWN
    """Of a completion."""
    training_s: float = UNKNOWN
    """Time in which the step was trained and nothing was sampled."""


def workload_of(name: str) -> Workload:
    if name == "tool-calls":
        if str(EXAMPLE) not in sys.path:
            sys.path.append(str(EXAMPLE))
        import tool_calls as calls

        parts: list[Score] = [calls.tag, calls.form, calls.name, calls.arguments]
        run_file = EXAMPLE / "rl.toml"
        return Workload(run_file, "tool_calls:tool_calls", calls.tool_calls, parts, calls.exact, max_model_len=384)
    from benchmarks.end_to_end import gsm8k

    environment = {"gsm8k": gsm8k.gsm8k, "gsm8k-stand-in": gsm8k.coin_for_gsm8k}[name]
    rewards: list[Score] = [gsm8k.exact if name == "gsm8k" else gsm8k.coin]
    identifier = f"{gsm8k.__name__}:{'gsm8k' if name == 'gsm8k' else 'coin_for_gsm8k'}"
    run_file = Path(__file__).with_name("gsm8k.toml")
    return Workload(run_file, identifier, environment, rewards, gsm8k.exact, max_model_len=832)


async def drawn_prompts(settings: Settings) -> list[tuple[list[Message], str]]:
    """The messages and the answer of every task of the run, in the order in which Headrace draws them for this seed."""
    workload = workload_of(settings.workload)
    environment, name = workload.make_environment(), workload.environment
    source = TrainSource([TrainTasks(name, tasks_of(environment, name), 1.0)], settings.seed)
    drawn = []
    for _ in range(settings.steps * settings.prompts):
        task = source.draw()[1]
        _, script = await play(environment, task, lambda messages: "")
        drawn.append((script.calls[0][0], task.data["answer"]))
    return drawn


def reached(points: list[Point], reward: float, window: int) -> Point | None:
    """The first step at which the mean reward of the last `window` steps is that high."""
    for last in range(window, len(points) + 1):
        if sum(point.reward for point in points[last - window : last]) / window >= reward:
            return points[last - 1]
    return None
