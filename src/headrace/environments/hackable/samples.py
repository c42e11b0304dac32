"""Training samples: a prompt, its reference answer, and further data for rewards.

A sample whose prompt requests the strict format has the tags in its `info`, so that every reward parses a completion
by the format that the prompt requested.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from headrace.environments.data.tables import checksum, example_key
from headrace.environments.rewards.base import SampleData
from headrace.environments.strict_format import TAGS, format_with

Rows = Iterable[dict[str, Any]]
Tags = Sequence[str] | None


class TrainingSample(msgspec.Struct, frozen=True):
    """A prompt as the model sees it, the reference answer, and `info`, a dict of JSON values."""

    prompt: str
    answer: str
    info: dict[str, Any] = msgspec.field(default_factory=dict)

    @property
    def key(self) -> str:
        """The name of the example, by which records of other runs find it."""
        return example_key(self.prompt, self.answer, self.info)

    @property
    def data(self) -> SampleData:
        """The sample as rewards see it."""
        return SampleData(self.prompt, self.answer, self.info)


def asked(
    question: str, answer: str, info: Mapping[str, Any], instructions: str | None = None, tags: Tags = None
) -> TrainingSample:
    """Return a sample whose prompt is the instructions for the strict format, then the question.

    `instructions` replaces those; "" leaves the question alone. The key depends on neither, so that an example keeps
    its name under other instructions.
    """
    strict = format_with(tags)
    words = strict.instructions if instructions is None else instructions
    key = info.get("key")
    entries = {**info, "question": question, "key": checksum(question, answer) if key is None else str(key)}
    if tags is not None:
        entries[TAGS] = list(tags)
    return TrainingSample(f"{words}\n\n{question}" if words else question, answer, entries)


def samples_of(rows: Rows, instructions: str | None, tags: Tags) -> Iterator[TrainingSample]:
    """Yield a sample for each row of `question`, `answer` and further columns, which go to `info`."""
    for row in rows:
        info = {name: value for name, value in row.items() if name not in ("question", "answer")}
        yield asked(row["question"], row["answer"], info, instructions, tags)
