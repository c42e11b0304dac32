"""The batch signature of the hackable layer: `reward(prompts, completions, answers, infos) -> list[float]`.

A reward with this signature is called as a group reward, with the columns of its rows as arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class SampleData(dict[str, Any]):
    """The data of a sample as rewards see it: the entries of its `info`, and its `prompt` and `answer`."""

    def __init__(self, prompt: str, answer: str, info: Mapping[str, Any]) -> None:
        super().__init__({**info, "prompt": prompt, "answer": answer})
        self.info = info


def batch_arguments(texts: Sequence[str], data: Sequence[Mapping[str, Any]]) -> tuple[list[Any], ...]:
    """Return prompts, completions, answers and infos. For the row of an environment, `info` is the whole row."""
    columns = [[str(row.get(name, "")) for row in data] for name in ("prompt", "answer")]
    return columns[0], list(texts), columns[1], [getattr(row, "info", row) for row in data]
