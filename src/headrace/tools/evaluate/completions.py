"""What an episode came to, and the file in which every model's episodes are kept, a line each, as they end.

A file that a kill left with half a line is cut back to its last whole one. An episode that failed is run again when the
evaluation is; of two lines about one episode the later one counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from headrace.errors import BadInput
from headrace.orchestrator.batch_metrics import CORRECT
from headrace.rollout.types import Message, Rollout

FORMAT = "format"
"""The reward or metric by which environments tell whether an answer is in format."""


class Scored(msgspec.Struct):
    """One episode as it is counted. One that failed has an `error`, and counts in no mean."""

    key: str
    sample: int
    correct: bool = False
    reward: float = 0.0
    rewards: dict[str, float | None] = msgspec.field(default_factory=dict)
    metrics: dict[str, float | None] = msgspec.field(default_factory=dict)
    in_format: bool | None = None
    """None where the environment does not tell."""
    tokens: int | None = 0
    """None where nobody knows: the server deals in words alone, and does not say."""
    thinking_tokens: int | None = None
    thinking_words: int | None = None
    """None where there is no block of thoughts; tokens also where nobody can count them."""
    truncated: bool = False
    error: str = ""


class Completion(Scored):
    """The same with what was said, by agent."""

    detail: str = ""
    conversations: dict[str, list[Message]] = msgspec.field(default_factory=dict)


class Correctness(NamedTuple):
    """What says whether an episode is right, as in the evaluations of a run."""

    name: str | None = None
    """A reward or metric; unset: `CORRECT`, or else the whole reward."""
    solved: float | None = None
    """From which value on it is right; unset: from 1. Where it is set, and no name is, the whole reward counts."""

    @property
    def threshold(self) -> float:
        return 1.0 if self.solved is None else self.solved

    def value(self, parts: Mapping[str, float | None], reward: float) -> float:
        """Return the number that is compared with the threshold; `parts` are rewards and metrics by name."""
        name = self.name or (CORRECT if self.solved is None else None)
        value = reward if name is None else parts.get(name, reward)
        return math.nan if value is None else value


class Thinking(NamedTuple):
    """How thoughts are found in what was written, and measured."""

    written: Callable[[Rollout], list[str]]
    """The text of every turn, thoughts included."""
    counted: Callable[[str], int] | None
    """Tokens of a text; None where there is no tokenizer."""


def completion_of(
    key: str,
    sample: int,
    rollouts: Sequence[Rollout],
    thinking: Thinking,
    tags: tuple[str, str],
    correct: Correctness,
    tokens: int | None,
) -> Completion:
    """An episode's rollouts as one line: those of the agents that are trained count, or all where none is.

    `tags` are those around thoughts; `tokens` is how many its replies took.
    """
    conversations = {rollout.agent: rollout.messages for rollout in rollouts}
    counted = counted_of(rollouts)
    failed = next((rollout.error for rollout in rollouts if rollout.error is not None), None)
    if failed is not None:
        return Completion(key, sample, error=failed.reason, detail=failed.detail, conversations=conversations)
    rewards = _means([rollout.rewards for rollout in counted])
    metrics = _means([rollout.metrics for rollout in counted])
    reward = sum(rollout.reward for rollout in counted) / len(counted)
    values = {**rewards, **metrics}
    if correct.name is not None and correct.name not in values:
        names = ", ".join(sorted(values)) or "none"
        raise BadInput(
            "the environment reports no such reward or metric",
            key="--correct",
            value=correct.name,
            fix=f"It reports: {names}.",
        )
    formatted = values.get(FORMAT)
    thoughts = [text for rollout in counted if (text := thoughts_of(rollout, thinking, tags)) is not None]
    return Completion(
        key,
        sample,
        correct=correct.value(values, reward) >= correct.threshold,
        reward=reward,
        rewards=dict(rewards),
        metrics=dict(metrics),
        in_format=None if formatted is None else formatted > 0,
        tokens=tokens,
        thinking_tokens=sum(map(thinking.counted, thoughts)) if thoughts and thinking.counted is not None else None,
        thinking_words=sum(len(text.split()) for text in thoughts) if thoughts else None,
        truncated=any(rollout.truncated for rollout in counted),
        conversations=conversations,
    )


def counted_of(rollouts: Sequence[Rollout]) -> list[Rollout]:
    return [rollout for rollout in rollouts if rollout.trainable] or list(rollouts)


def thoughts_of(rollout: Rollout, thinking: Thinking, tags: tuple[str, str]) -> str | None:
    """Return all thoughts: between the tags, to the end where they are not closed, or the renderer's own field."""
    opening, closing = tags
    found = []
    for written in thinking.written(rollout):
        _, opened, rest = written.partition(opening)
        if opened:
            found.append(rest.partition(closing)[0].strip())
    separate = [str(message["reasoning_content"]) for message in rollout.messages if message.get("reasoning_content")]
    return "\n".join(found or separate) if found or separate else None


def _means(tables: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for table in tables for name in table)
    known = {name: [table[name] for table in tables if name in table] for name in names}
    return {name: sum(values) / len(values) for name, values in known.items()}


class CompletionsFile:
    """A model's `completions.jsonl`. Opening it reads what is there."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.scored = _read(path) if path.is_file() else {}
        """By task key and number of the sample."""
        self._file = open(path, "ab")  # noqa: SIM115 - closed by close()

    def append(self, completion: Completion) -> None:
        self._file.write(msgspec.json.encode(completion) + b"\n")
        self._file.flush()
        self.scored[completion.key, completion.sample] = completion

    def close(self) -> None:
        self._file.close()

    def lacks(self, key: str, sample: int) -> bool:
        known = self.scored.get((key, sample))
        return known is None or bool(known.error)


def _read(path: Path) -> dict[tuple[str, int], Scored]:
    """Its episodes. Half a line at its end is cut off."""
    scored = {}
    decoder = msgspec.json.Decoder(Scored)
    with open(path, "rb+") as file:
        whole = 0
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                episode = decoder.decode(line)
            except msgspec.DecodeError as error:
                raise BadInput(
                    f"cannot be read as an episode: {error}", file=path, line=number, fix="Move the file away."
                ) from error
            scored[episode.key, episode.sample] = episode
            whole += len(line)
        file.truncate(whole)
    return scored
