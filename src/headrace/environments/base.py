"""What an environment is: tasks, and one episode at a time.

An environment is written by users. It never sees policy versions or permits; it gets a task and a context through which
it talks to the model, and returns rollouts with their turns, messages and rewards. One that can only judge episodes of
a task side by side scores their group when all of them are in.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec

from headrace.environments.strict_format import THINKING_TAGS
from headrace.errors import BadInput
from headrace.rollout.fingerprint import fingerprint
from headrace.rollout.types import Message, Rollout, Task
from headrace.text.replies import Reply as Reply
from headrace.text.replies import ToolCall as ToolCall


class EpisodeError(Exception):
    """An episode failed for a known reason: `reason` is a short counter name, the message is for people.

    An environment may raise it. One that comes from a worker process also has the `place` in the code where the
    original was raised (its type, file and line) and its `remote_traceback`, so that each place is reported once.
    """

    reason: str = "environment"
    place: str = ""
    remote_traceback: str = ""
    call: int | None = None
    """In a worker process: the call to the model whose failure it is."""

    def __init__(self, reason: str, message: str, *, place: str = "", remote_traceback: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.place = place
        self.remote_traceback = remote_traceback


class PromptTooLong(EpisodeError):
    """The conversation leaves no room for an answer within `seq_len`."""

    REASON = "prompt_too_long"

    def __init__(self, message: str) -> None:
        super().__init__(self.REASON, message)


class ChatFailed(Exception):
    """The model gave no answer, as an environment in a worker process sees it. `kind` names the original's type.

    An original that is an EpisodeError is seen there as one, and a PromptTooLong as a PromptTooLong.
    """

    def __init__(self, call: int, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.call = call
        self.kind = kind


class Context(Protocol):
    """An episode's line to the model."""

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), max_tokens: int | None = None
    ) -> Reply:
        """One reply to the conversation. A conversation that goes on from an earlier reply keeps its exact tokens.

        `tools` are function schemas in OpenAI's form; `max_tokens` can only lower what the run allows.
        """
        ...


class Demonstration(msgspec.Struct):
    """A conversation that shows how a task is done, for supervised training."""

    messages: list[Message]
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)


class Environment:
    """Base of all environments: subclass, and implement `tasks` and `run`; all else is optional."""

    demonstrate_mistakes: float = 0.0
    """The share of replies in demonstrations that are mistakes: what RL has to unlearn."""

    def tasks(self) -> Iterable[dict[str, Any]]:
        """The data of every task, in a stable order. A text under `key` names the task; else its content does."""
        raise NotImplementedError

    async def run(self, task: Task, context: Context) -> list[Rollout]:
        """One episode. An environment that scores groups may leave `rewards` empty here."""
        raise NotImplementedError

    async def score_group(self, rollouts: Sequence[Rollout]) -> None:
        """Set `rewards` (and `metrics`) on the rollouts of one group, once all its episodes are in.

        One that is left without a finite number costs the group; one that gets an `error`, itself alone.
        """
        raise NotImplementedError(f"{type(self).__name__} does not score groups")

    @property
    def scores_groups(self) -> bool:
        """Whether rewards come from `score_group`."""
        return type(self).score_group is not Environment.score_group

    async def start(self) -> None:
        """Open what episodes need; called once, in the process that runs them, before the first."""

    async def close(self) -> None:
        """Give back what `start` or an episode opened."""

    def thinking_tags(self, task: Task) -> tuple[str, str]:
        """Return the tags around the thoughts of a reply to this task; `headrace eval` measures what is between."""
        return THINKING_TAGS

    def gold(self, task: Task, messages: Sequence[Message]) -> Message | str:
        """The best reply to this conversation. It makes an environment probeable and able to demonstrate its tasks."""
        raise NotImplementedError(f"{type(self).__name__} has no gold replies: implement gold(task, messages)")

    def mistake(self, task: Task, messages: Sequence[Message], rng: random.Random) -> Message | str:
        """A reply that a beginner might give instead; by default the gold one with a number or a letter changed."""
        from headrace.environments.script import perturbed

        return perturbed(self.gold(task, messages), rng)

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        """Endless episodes on random tasks, played with `gold` replies and a share of mistakes."""
        from headrace.environments.script import demonstrate

        return demonstrate(self, seed)


def tasks_of(environment: Environment, name: str, key: str = "environment") -> list[Task]:
    """Return its tasks, checked: JSON, at least one, and no two of one key with different data.

    An error names `key`, to which the user set the environment.
    """
    refuse = partial(BadInput, key=key, value=name)
    tasks: dict[str, Task] = {}
    found = []
    listed: Any = environment.tasks()
    if not isinstance(listed, Iterable):
        raise refuse(f"tasks() returned a {type(listed).__name__}", fix="Return a list of dicts.")
    for number, data in enumerate(listed):
        given: Any = data
        if not isinstance(given, dict):
            raise refuse(f"task {number} is a {type(given).__name__}, not a dict of JSON values")
        own_key = given.get("key", "")
        try:
            _check_json(given)
            task = Task(name, given, own_key if isinstance(own_key, str) else "")
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise refuse(f"task {number} is not JSON: {error}") from error
        known = tasks.setdefault(task.key, task).data
        if known != given and fingerprint([known]) != fingerprint([given]):  # what is no number does not equal itself
            raise refuse(
                f"task {number} has the key {task.key!r} of another task with other data",
                fix="Give each task its own key, or leave the keys out: tasks then differ by their data.",
            )
        found.append(task)
    if not found:
        raise refuse("tasks() returned no tasks")
    return found


def _check_json(data: dict[str, Any]) -> None:
    """Raise unless it is the same after it was written and read, here or in a worker process."""
    msgspec.msgpack.encode(data)  # refuses integers beyond 64 bits
    if msgspec.json.decode(msgspec.json.encode(data)) != data:  # the quick way to say yes
        _find_loss(data, "")


def _find_loss(value: Any, path: str) -> None:
    match value:
        case dict():
            for key, entry in value.items():
                if not isinstance(key, str):
                    raise TypeError(f"the key {key!r} is not a text")
                _find_loss(entry, f"{path}[{key!r}]")
        case list():
            for number, entry in enumerate(value):
                _find_loss(entry, f"{path}[{number}]")
        case str() | int() | float() | None:  # not a number, which equals nothing, travels all the same
            pass
        case _:
            raise TypeError(f"{path} is a {type(value).__name__}")


def evenly_spaced(count: int, most: int) -> list[int]:
    """Return at most `most` indices below `count`, evenly spaced, beginning with 0."""
    chosen = min(count, most)
    return [index * count // chosen for index in range(chosen)]
