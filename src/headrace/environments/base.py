"""What an environment is: tasks, and one episode at a time.

An environment is written by users. It never sees policy versions or permits; it gets a task and a context through which
it talks to the model, and returns rollouts with their turns, messages and rewards. One that can only judge episodes of
a task side by side scores their group when all of them are in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from headrace.rollout.types import Message, Rollout, Task, Turn


class EpisodeError(Exception):
    """An episode failed for a known reason: `reason` is a short counter name, the message is for people.

    An environment may raise it. One that comes from a worker process also has the `place` in the code where the
    original was raised (its type, file and line) and its `remote_traceback`, so that each place is reported once.
    """

    def __init__(self, reason: str, message: str, *, place: str = "", remote_traceback: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.place = place
        self.remote_traceback = remote_traceback


class PromptTooLong(EpisodeError):
    """The conversation leaves no room for an answer within `seq_len`."""

    def __init__(self, message: str) -> None:
        super().__init__("prompt_too_long", message)


class ChatFailed(Exception):
    """The model gave no answer, as an environment in a worker process sees it. `kind` names the original's type."""

    def __init__(self, call: int, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.call = call
        self.kind = kind


class Reply:
    """What the model answered to a conversation: the message, and the exact turn behind it."""

    def __init__(self, message: Message, turn: Turn) -> None:
        self.message = message
        self.turn = turn

    @property
    def text(self) -> str:
        return str(self.message.get("content") or "")

    @property
    def truncated(self) -> bool:
        return self.turn.finish_reason == "length"


class Context(Protocol):
    """An episode's line to the model."""

    async def chat(self, messages: Sequence[Message]) -> Reply:
        """Render the conversation, sample one reply."""
        ...


class Environment:
    """Base of all environments: subclass, and implement `tasks` and `run`."""

    def tasks(self) -> Sequence[dict[str, Any]]:
        """The data of every task, in a stable order."""
        raise NotImplementedError

    async def run(self, task: Task, context: Context) -> list[Rollout]:
        """One episode. An environment that scores groups may leave `rewards` empty here."""
        raise NotImplementedError

    async def score_group(self, rollouts: Sequence[Rollout]) -> None:
        """Set `rewards` (and `metrics`) on the rollouts of one group, once all its episodes are in. Optional."""
        raise NotImplementedError(f"{type(self).__name__} does not score groups")

    @property
    def scores_groups(self) -> bool:
        """Whether rewards come from `score_group`."""
        return type(self).score_group is not Environment.score_group

    def demonstrations(self, seed: int) -> Iterator[list[Message]]:
        """Endless conversations that show how the task is done, for supervised training. Optional."""
        raise NotImplementedError(f"{type(self).__name__} has no demonstrations to train on")
