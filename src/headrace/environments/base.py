"""The interface of environments: tasks, and episodes.

An environment is written by users. It gets a task and a context for calls to the model, and returns rollouts with
their turns, messages and rewards. One that compares the episodes of a task scores their group when all have finished.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec

from headrace.environments.strict_format import THINKING_TAGS
from headrace.errors import BadInput
from headrace.inference.schema import StructuredOutputs
from headrace.rollout.digest import fingerprint
from headrace.rollout.types import Message, Rollout, Task
from headrace.text.messages import Reply as Reply
from headrace.text.messages import ToolCall as ToolCall


class EpisodeError(Exception):
    """The failure of an episode; `reason` is the name of the counter that it increases.

    An environment may raise it. One from a worker process also has the `place` where the original was raised (its type,
    file and line), so that each place is reported once, and its `remote_traceback`.
    """

    reason: str = "environment"
    place: str = ""
    remote_traceback: str = ""
    call: int | None = None
    """In a worker process: the number of the call to the model that failed."""

    def __init__(self, reason: str, message: str, *, place: str = "", remote_traceback: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.place = place
        self.remote_traceback = remote_traceback


class PromptTooLong(EpisodeError):
    """The conversation leaves no room for a reply within `seq_len`."""

    REASON = "prompt_too_long"

    def __init__(self, message: str) -> None:
        super().__init__(self.REASON, message)


class ChatFailed(Exception):
    """A failed call to the model, as an environment in a worker process sees it. `kind` is the original's type.

    `EpisodeError` and `PromptTooLong` keep their types in worker processes.
    """

    def __init__(self, call: int, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.call = call
        self.kind = kind


class Context(Protocol):
    """An episode's access to the model."""

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        max_tokens: int | None = None,
        structured_outputs: StructuredOutputs | None = None,
    ) -> Reply:
        """Return one reply to the conversation. A conversation that continues an earlier reply keeps its exact tokens.

        `tools` are function schemas in OpenAI's form; `max_tokens` can only lower the run's limit. A reply matches
        `structured_outputs` in evaluation and where a frozen model samples; elsewhere they are ignored, with a warning:
        the trainer computes logprobs of the whole distribution, not of a masked one.
        """
        ...


class Demonstration(msgspec.Struct):
    """A conversation that shows how a task is done, for supervised training."""

    messages: list[Message]
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)


class Environment:
    """Base of all environments: implement `tasks` and `run`; the rest is optional."""

    demonstrate_mistakes: float = 0.0
    """The share of replies in demonstrations that are mistakes, for RL to unlearn."""

    def tasks(self) -> Iterable[dict[str, Any]]:
        """Return the data of every task, in a stable order. Its key is the text under `key`, or a hash of it."""
        raise NotImplementedError

    async def run(self, task: Task, context: Context) -> list[Rollout]:
        """Run one episode. An environment that scores groups may leave `rewards` empty here."""
        raise NotImplementedError

    async def score_group(self, rollouts: Sequence[Rollout]) -> None:
        """Set `rewards` (and `metrics`) on the rollouts of one group, once all its episodes have finished.

        A rollout without a finite reward fails the whole group; one with an `error` fails alone.
        """
        raise NotImplementedError(f"{type(self).__name__} does not score groups")

    @property
    def scores_groups(self) -> bool:
        """Whether rewards come from `score_group`."""
        return type(self).score_group is not Environment.score_group

    async def start(self) -> None:
        """Open resources; called once, in the process that runs episodes, before the first one."""

    async def close(self) -> None:
        """Release what `start` or an episode opened."""

    def thinking_tags(self, task: Task) -> tuple[str, str]:
        """Return the tags around the reasoning of a reply to this task, which `headrace eval` measures."""
        return THINKING_TAGS

    def gold(self, task: Task, messages: Sequence[Message]) -> Message | str:
        """Return the best reply to this conversation, for demonstrations and `headrace probe`."""
        raise NotImplementedError(f"{type(self).__name__} has no gold replies: implement gold(task, messages)")

    def mistake(self, task: Task, messages: Sequence[Message], rng: random.Random) -> Message | str:
        """Return a wrong reply; by default the gold one with a number or a letter changed."""
        from headrace.environments.script import perturb_reply

        return perturb_reply(self.gold(task, messages), rng)

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        """Yield endless episodes on random tasks, with `gold` replies and a share of mistakes."""
        from headrace.environments.script import demonstrate

        return demonstrate(self, seed)


def tasks_of(environment: Environment, name: str, key: str = "environment") -> list[Task]:
    """Return the environment's tasks, checked: JSON, at least one, and a key has one content.

    `key` is the run file's key of the environment, for errors.
    """
    refuse = partial(BadInput, key=key, value=name)
    by_key: dict[str, Task] = {}
    tasks = []
    rows: Any = environment.tasks()
    if not isinstance(rows, Iterable):
        raise refuse(f"tasks() returned a {type(rows).__name__}", fix="Return a list of dicts.")
    for number, data in enumerate(rows):
        if not isinstance(data, dict):
            raise refuse(f"task {number} is a {type(data).__name__}, not a dict of JSON values")
        own_key = data.get("key", "")
        try:
            msgspec.msgpack.encode(data)  # refuses integers beyond 64 bits
            if msgspec.json.decode(msgspec.json.encode(data)) != data:  # fast path
                _check_json_lossless(data, "")
            task = Task(name, data, own_key if isinstance(own_key, str) else "")
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise refuse(f"task {number} is not JSON: {error}") from error
        first = by_key.setdefault(task.key, task).data
        if first != data and fingerprint([first]) != fingerprint([data]):  # NaN does not equal itself
            raise refuse(
                f"task {number} has the key {task.key!r} of another task with other data",
                fix="Give each task its own key, or leave the keys out: tasks then differ by their data.",
            )
        tasks.append(task)
    if not tasks:
        raise refuse("tasks() returned no tasks")
    return tasks


def _check_json_lossless(value: Any, path: str) -> None:
    """Raise `TypeError` that names the value which JSON does not represent exactly."""
    match value:
        case dict():
            for key, entry in value.items():
                if not isinstance(key, str):
                    raise TypeError(f"the key {key!r} is not a string")
                _check_json_lossless(entry, f"{path}[{key!r}]")
        case list():
            for number, entry in enumerate(value):
                _check_json_lossless(entry, f"{path}[{number}]")
        case str() | int() | float() | None:  # NaN does not equal itself, but can be encoded
            pass
        case _:
            raise TypeError(f"{path} is a {type(value).__name__}")


def evenly_spaced(count: int, most: int) -> list[int]:
    """Return at most `most` indices below `count`, evenly spaced, beginning with 0."""
    chosen = min(count, most)
    return [index * count // chosen for index in range(chosen)]
