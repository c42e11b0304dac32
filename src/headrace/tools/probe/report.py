"""What a probe has seen, as plain data: it crosses from the probed process, and `--json` prints it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.environments.base import EpisodeError
from headrace.rollout.checks import reward_problem, total_reward
from headrace.rollout.types import Message, Rollout
from headrace.tools.probe.signal import Prediction


class Opening(msgspec.Struct):
    """How an environment loaded, and what its tasks are."""

    import_seconds: float
    load_seconds: float
    """Its constructor and `start`."""
    tasks_seconds: float
    tasks: int
    task_bytes: int
    """All tasks as JSON."""
    scores_groups: bool
    folder: str
    """Where its code is."""


class Problem(msgspec.Struct, frozen=True):
    """Why an episode has no reward. `place` is a file and a line, where one is to blame."""

    reason: str
    text: str
    place: str = ""


class Exchange(msgspec.Struct):
    """What an episode asked: its first question, and the whole conversation."""

    prompt: list[Message]
    tools: list[dict[str, Any]]
    conversation: list[Message]


class Episode(msgspec.Struct):
    """One completion on one task. The time that went into making the completion is not in the times."""

    completion: str
    task: int
    rewards: dict[str, float] = msgspec.field(default_factory=dict)
    reward: float | None = None
    """The mean of what the agents earned that are trained, as `rewards` are by component."""
    earned: list[float] = msgspec.field(default_factory=list)
    """What each of these agents earned."""
    problem: Problem | None = None
    seconds: float = 0.0
    cpu_seconds: float | None = 0.0
    """None if its process was killed, or died: nobody measured it."""
    blocked_seconds: float = 0.0
    """The longest stretch that the event loop was held."""
    replies: int = 0
    endless: bool = False
    """Whether it asked for more replies than a probe gives."""
    offers_tools: bool = False
    says_gold: bool = False
    """Whether all its replies were the gold ones."""
    exchange: Exchange | None = None


class ShownPrompt(msgspec.Struct):
    """A first question as the model reads it."""

    task: int
    key: str
    text: str
    tokens: int


class OfferedTool(msgspec.Struct):
    """A tool that first questions offer; of several with one name, the first that was seen."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema."""
    share: float = 0.0
    """Of the first questions, those that offer it."""


class Prompts(msgspec.Struct):
    """The first questions of all tasks that were played, as rendered: chat format and tools are counted."""

    tokenizer: str
    """The model whose tokenizer and chat format were used."""
    shown: list[ShownPrompt]
    lengths: list[int]
    conversation_lengths: list[int]
    """With everything that followed, up to the last reply."""
    tools: list[OfferedTool] = msgspec.field(default_factory=list)
    problem: str = ""
    """Why a conversation could not be rendered."""


class Sampled(msgspec.Struct):
    """What a model earned: by task and episode, the rewards of all agents that are trained."""

    model: str
    group_size: int
    rewards: list[list[list[float]]]
    problems: list[Problem]
    episodes: int
    truncated: int
    seconds: float
    predictions: list[Prediction]
    """By group size, the run's and those that there are episodes enough for; none if all episodes failed."""


class Report(msgspec.Struct):
    environment: str
    args: dict[str, Any]
    opening: Opening
    keys: list[str]
    """Of the tasks that were played, by number in `played`."""
    played: list[int]
    duplicates: int
    first_difference: int | None
    """The first task that was another one in a second process."""
    episodes: list[Episode]
    unstable: list[str]
    """Completions that earned something else the second time."""
    closing: Problem | None
    prompts: Prompts | None = None
    seq_len: int | None = None
    sampled: Sampled | None = None

    def of(self, completion: str) -> list[Episode]:
        return [episode for episode in self.episodes if episode.completion == completion]

    @property
    def agents(self) -> int:
        """How many are trained in an episode, at most."""
        return max((len(episode.earned) for episode in self.episodes), default=0)


def rewards_of(rollouts: Sequence[Rollout]) -> tuple[dict[str, float], list[float]]:
    """By component, averaged over the agents that are trained; and what each of them earned in all."""
    trained = [rollout for rollout in rollouts if rollout.trainable]
    if not trained:
        raise EpisodeError("no_rollout", "the episode returned no rollout that is trained")
    for rollout in trained:
        if rollout.error is not None:
            raise EpisodeError(rollout.error.reason, rollout.error.detail)
        given: dict[str, Any] = rollout.rewards  # by users' code, whatever the types say
        if not given or not all(isinstance(value, int | float) and math.isfinite(value) for value in given.values()):
            raise EpisodeError("invalid_reward", f"rewards {given} do not sum to a finite number")
        if why := reward_problem(rollout.rewards):
            raise EpisodeError("invalid_reward", why)
    names = dict.fromkeys(name for rollout in trained for name in rollout.rewards)
    by_name = {name: sum(float(r.rewards.get(name, 0.0)) for r in trained) / len(trained) for name in names}
    return by_name, [total_reward(rollout.rewards) for rollout in trained]
