"""What shipped environments share: randomly drawn tasks, answers between tags, similarity of answers, and word lists.

Drawn tasks are deterministic under a seed, all different, and none is in both splits.
"""

from __future__ import annotations

import functools
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import msgspec

from headrace.environments.arguments import check_choice, check_flag, check_mistakes, check_whole
from headrace.environments.base import Environment
from headrace.rollout.types import Message

SPLITS = ("train", "eval")
EVAL_SHARE = 10
"""One task in this many is in `eval`, by a checksum of its content."""
MAX_FUTILE_DRAWS = 200
"""Draws in a row without a new task after which there are assumed to be no more."""
FIRST_EVAL_SEED = 1 << 20
"""Seeds of evaluation begin here, and those of training end."""

Draw = Callable[[random.Random], dict[str, Any]]
Part = Callable[[dict[str, Any]], Any]
"""Returns a part of a task, as JSON values."""


@dataclass(eq=False)
class DrawnEnvironment(Environment):
    """Base of environments of several turns with randomly drawn tasks; its fields are the `args` of a run file.

    Prompts and replies of `terse` environments have no instructions and no tags, for the smallest models.
    """

    split: str = "train"
    num_tasks: int = 1000
    seed: int = 0
    terse: bool = False
    demonstrate_mistakes: float = 0.0

    def __post_init__(self) -> None:
        check_split(self.split)
        check_whole("num_tasks", self.num_tasks, 1)
        check_flag("terse", self.terse)
        check_mistakes(self.demonstrate_mistakes)

    def write(self, name: str, content: object) -> str:
        """Return a reply with this content: between tags, or alone if replies are terse."""
        return str(content) if self.terse else tag(name, str(content))

    def read(self, text: str, name: str) -> str:
        """Return the content of a reply; empty if it is not between tags, where it must be."""
        return (text if self.terse else extract_tagged(text, name) or "").strip()


def draw_tasks(
    draw: Draw, split: str, num_tasks: int, seed: int, identity: Part = dict, split_by: Part | None = None
) -> Iterator[dict[str, Any]]:
    """Yield up to `num_tasks` different tasks that `draw` makes, lazily; fewer where there are no more.

    Two tasks are the same if they have the same `identity`: it must be all that the prompt depends on, and nothing
    else. Tasks with the same `split_by` (default: the identity) are in the same split.
    """
    check_split(split)
    check_whole("num_tasks", num_tasks, 1)

    def drawn() -> Iterator[dict[str, Any]]:
        rng = random.Random(f"{seed}-{split}")
        identities: set[bytes] = set()
        futile = 0
        while len(identities) < num_tasks and futile < MAX_FUTILE_DRAWS:
            task = draw(rng)
            own = msgspec.json.encode(identity(task), order="deterministic")
            group = msgspec.json.encode((split_by or identity)(task), order="deterministic")
            futile += 1
            if own not in identities and (zlib.crc32(group) % EVAL_SHARE == 0) == (split == "eval"):
                futile = 0
                identities.add(own)
                yield task

    return drawn()


def seeds_of(split: str, num_tasks: int, seed: int) -> range:
    """Return the seeds of the tasks of a game; those of `train` and of `eval` are disjoint."""
    check_split(split)
    check_whole("num_tasks", num_tasks, 1, FIRST_EVAL_SEED)
    check_whole("seed", seed, 0)
    first = seed + (FIRST_EVAL_SEED if split == "eval" else 0)
    return range(first, first + num_tasks)


def check_split(split: Any) -> None:
    check_choice("split", split, SPLITS)


MAX_LENGTH_RATIO = 8
"""A reply is compared up to this many times the length of the expected answer; the rest is ignored."""


def tag(name: str, content: str) -> str:
    return f"<{name}>{content}</{name}>"


def extract_tagged(text: str, name: str) -> str | None:
    """Return the text between the tags; None unless they occur exactly once: several answers count as none."""
    _, opened, rest = text.partition(f"<{name}>")
    content, closed, after = rest.partition(f"</{name}>")
    once = opened and closed and f"<{name}>" not in content and f"<{name}>" not in after
    return content if once else None


def replies(messages: Sequence[Message]) -> list[str]:
    """Return the model's replies in a conversation."""
    return [str(message.get("content") or "") for message in messages if message["role"] == "assistant"]


def reply_similarity(reply: Sequence[str], expected: Sequence[str]) -> float:
    """Return the `similarity` of a reply of any length, of which only the beginning is compared."""
    return similarity(reply[: MAX_LENGTH_RATIO * len(expected)], expected)


def similarity(reply: Sequence[str], expected: Sequence[str]) -> float:
    """Return twice the longest common subsequence over the summed lengths: 1 if equal, 0 with nothing in common."""
    if not reply and not expected:
        return 1.0
    row = [0] * (len(expected) + 1)
    for left in reply:
        diagonal = 0
        for column, right in enumerate(expected, 1):
            diagonal, row[column] = row[column], diagonal + 1 if left == right else max(row[column], row[column - 1])
    return 2 * row[-1] / (len(reply) + len(expected))


@functools.cache
def word_list(name: str) -> tuple[str, ...]:
    """Return the words of `words/NAME.txt` in their order.

    `answers` are common words, chosen by hand; `guesses` are the other lower-case words of an English word list, with
    common inflected forms and without slurs.
    """
    file = resources.files("headrace.environments.shipped").joinpath("words", f"{name}.txt")
    return tuple(file.read_text(encoding="utf-8").split())
