"""What an environment is: tasks, and one episode at a time.

An environment is written by users. It never sees groups, policy versions or permits; it gets a task and a context
through which it talks to the model, and returns rollouts with their turns, messages and rewards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from headrace.rollout.types import Message, Rollout, Task, Turn


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
        """One episode."""
        raise NotImplementedError

    def demonstrations(self, seed: int) -> Iterator[list[Message]]:
        """Endless conversations that show how the task is done, for supervised training. Optional."""
        raise NotImplementedError(f"{type(self).__name__} has no demonstrations to train on")
