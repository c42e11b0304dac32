r"""What is trained on: a prompt, the answer that is wanted, and whatever else rewards may need to know.

A sample that asks for the strict format says in its `info` with which tags, so that every reward reads a completion by
the very format that the prompt asked for, and nobody has to configure it twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from headrace.environments.arguments import BadArgument
from headrace.environments.strict_format import StrictFormat

TAGS = "tags"
"""The entry of `info` that has the tags around the thoughts; unset, they are `<think>` and `</think>`."""
KEY = "key"
"""The entry of `info` that names the example, whatever words it was asked in."""


class TrainingSample(msgspec.Struct, frozen=True):
    """`prompt` is all that the model is asked, `answer` the reference, `info` JSON."""

    prompt: str
    answer: str
    info: dict[str, Any] = msgspec.field(default_factory=dict)

    @property
    def key(self) -> str:
        """The example's name, by which a record of another run about it is found."""
        return key_of(self.prompt, self.answer, self.info)


def key_of(prompt: str, answer: str, info: Mapping[str, Any]) -> str:
    """What `info` has under `key`, else a checksum of prompt and answer."""
    named = info.get(KEY)
    return named if isinstance(named, str) and named else checksum(prompt, answer)


def checksum(*texts: str) -> str:
    return hashlib.sha256(msgspec.json.encode(texts)).hexdigest()[:16]


def asked(
    question: str,
    answer: str,
    info: Mapping[str, Any],
    instructions: str | None = None,
    tags: Sequence[str] | None = None,
) -> TrainingSample:
    """A sample that asks for the strict format before the question.

    Other `instructions` are asked for instead; "" leaves the question alone. Its key depends on neither, so that an
    example keeps its name when it is asked in other words.
    """
    strict = strict_format(tags)
    words = strict.instructions if instructions is None else instructions
    key = info.get(KEY)
    entries = {**info, "question": question, KEY: checksum(question, answer) if key is None else str(key)}
    if tags is not None:
        entries[TAGS] = list(tags)
    return TrainingSample(f"{words}\n\n{question}" if words else question, answer, entries)


def format_of(info: Mapping[str, Any]) -> StrictFormat:
    """The strict format that a sample asks for."""
    return strict_format(info.get(TAGS))


def strict_format(tags: Sequence[str] | None) -> StrictFormat:
    """The one with these tags, or the usual one."""
    if tags is None:
        return _format()
    if isinstance(tags, str) or len(tags) != 2:
        fix = 'For example ["<think>", "</think>"].'
        raise BadArgument("expected two texts", key=TAGS, value=tags, fix=fix)
    return _format(*tags)


@lru_cache
def _format(*tags: str) -> StrictFormat:
    return StrictFormat(*tags)
