"""Scored episodes, and the file of a model's episodes, to which each is appended when it ends.

An incomplete last line, left by a kill, is removed. Failed episodes run again when the evaluation is repeated; of two
lines about one episode, the later one counts.
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
"""The reward or metric that is positive if an answer is in format."""


class ScoredEpisode(msgspec.Struct):
    """The numbers of one episode. A failed episode has an `error` and is left out of all means."""

    key: str
    sample: int
    correct: bool = False
    reward: float = 0.0
    rewards: dict[str, float | None] = msgspec.field(default_factory=dict)
    metrics: dict[str, float | None] = msgspec.field(default_factory=dict)
    in_format: bool | None = None
    """None if the environment does not report it."""
    tokens: int | None = 0
    """None if the server returns neither token ids nor usage."""
    thinking_tokens: int | None = None
    thinking_words: int | None = None
    """None without reasoning; tokens also without a tokenizer."""
    truncated: bool = False
    error: str = ""


class Completion(ScoredEpisode):
    """A scored episode with its conversations by agent."""

    detail: str = ""
    conversations: dict[str, list[Message]] = msgspec.field(default_factory=dict)


class Correctness(NamedTuple):
    """The criterion of a correct episode, as in the evaluations of a run."""

    name: str | None = None
    """A reward or metric; unset: `CORRECT`, or else the total reward."""
    solved: float | None = None
    """The lowest value that is correct; unset: 1. If it is set without a name, the total reward is compared."""

    @property
    def threshold(self) -> float:
        return 1.0 if self.solved is None else self.solved

    def value(self, parts: Mapping[str, float | None], reward: float) -> float:
        """Return the number that is compared with the threshold; `parts` are rewards and metrics by name."""
        name = self.name or (CORRECT if self.solved is None else None)
        value = reward if name is None else parts.get(name, reward)
        return math.nan if value is None else value


class Thinking(NamedTuple):
    """How reasoning is read and measured."""

    written: Callable[[Rollout], list[str]]
    """Returns the text of every turn, reasoning included."""
    count_tokens: Callable[[str], int] | None
    """None without a tokenizer."""


def make_completion(
    key: str,
    sample: int,
    rollouts: Sequence[Rollout],
    thinking: Thinking,
    tags: tuple[str, str],
    correct: Correctness,
    tokens: int | None,
) -> Completion:
    """Return an episode's rollouts as one completion: those of trained agents count, or all if none is trained.

    `tags` enclose reasoning; `tokens` is the number of tokens of all replies.
    """
    conversations = {rollout.agent: rollout.messages for rollout in rollouts}
    counted = counted_rollouts(rollouts)
    failed = next((rollout.error for rollout in rollouts if rollout.error is not None), None)
    if failed is not None:
        return Completion(key, sample, error=failed.reason, detail=failed.detail, conversations=conversations)
    rewards = _means([rollout.rewards for rollout in counted])
    metrics = _means([rollout.metrics for rollout in counted])
    reward = sum(rollout.reward for rollout in counted) / len(counted)
    values = {**rewards, **metrics}
    if correct.name is not None and correct.name not in values:
        names = ", ".join(sorted(values)) or "none"
        fact = "the environment reports no such reward or metric"
        raise BadInput(fact, key="--correct", value=correct.name, fix=f"It reports: {names}.")
    formatted = values.get(FORMAT)
    reasoning = [text for rollout in counted if (text := extract_reasoning(rollout, thinking, tags)) is not None]
    return Completion(
        key,
        sample,
        correct=correct.value(values, reward) >= correct.threshold,
        reward=reward,
        rewards=dict(rewards),
        metrics=dict(metrics),
        in_format=None if formatted is None else formatted > 0,
        tokens=tokens,
        thinking_tokens=sum(map(thinking.count_tokens, reasoning)) if reasoning and thinking.count_tokens else None,
        thinking_words=sum(len(text.split()) for text in reasoning) if reasoning else None,
        truncated=any(rollout.truncated for rollout in counted),
        conversations=conversations,
    )


def counted_rollouts(rollouts: Sequence[Rollout]) -> list[Rollout]:
    return [rollout for rollout in rollouts if rollout.trainable] or list(rollouts)


def extract_reasoning(rollout: Rollout, thinking: Thinking, tags: tuple[str, str]) -> str | None:
    """Return all reasoning: between the tags (to the end if they are not closed), or of the `reasoning_content`."""
    opening, closing = tags
    tagged = []
    for written in thinking.written(rollout):
        _, opened, rest = written.partition(opening)
        if opened:
            tagged.append(rest.partition(closing)[0].strip())
    separate = [str(message["reasoning_content"]) for message in rollout.messages if message.get("reasoning_content")]
    return "\n".join(tagged or separate) if tagged or separate else None


def _means(tables: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for table in tables for name in table)
    values_by_name = {name: [table[name] for table in tables if name in table] for name in names}
    return {name: sum(values) / len(values) for name, values in values_by_name.items()}


class CompletionsFile:
    """A model's `completions.jsonl`. The constructor reads existing episodes and removes an incomplete last line."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.scored, length = read_episodes(path)
        """By task key and sample index."""
        self._file = open(path, "ab")  # noqa: SIM115 - closed by close()
        self._file.truncate(length)

    def append(self, completion: Completion) -> None:
        self._file.write(msgspec.json.encode(completion) + b"\n")
        self._file.flush()
        self.scored[completion.key, completion.sample] = completion

    def close(self) -> None:
        self._file.close()


def read_episodes(path: Path) -> tuple[dict[tuple[str, int], ScoredEpisode], int]:
    """Return the episodes of a file by task key and sample index, and the size of its complete lines in bytes."""
    content = path.read_bytes() if path.is_file() else b""
    length = content.rfind(b"\n") + 1
    decoder = msgspec.json.Decoder(ScoredEpisode)
    scored = {}
    for number, line in enumerate(content[:length].splitlines(), 1):
        try:
            episode = decoder.decode(line)
        except msgspec.DecodeError as error:
            fact = f"cannot be read as an episode: {error}"
            raise BadInput(fact, file=path, line=number, fix="Move the file away.") from error
        scored[episode.key, episode.sample] = episode
    return scored, length
