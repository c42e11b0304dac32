"""Preference pairs for DPO: checked rows of a data set with a chosen and a rejected completion of one prompt.

Rows are in the conventional format, `prompt`, `chosen` and `rejected`, each a text or messages. Without `prompt`, or if
both completions repeat it, the prompt is what the two conversations begin with alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from renderers.base import Renderer

from headrace.errors import DataError
from headrace.rollout.types import Message, Sample
from headrace.text.sft_conversation import (
    Place,
    SftConversation,
    keys_of,
    parse_messages,
    parse_tools,
    read_fields,
    render_sample,
)

COLUMNS = ("prompt", "chosen", "rejected", "tools")


class PreferencePair:
    """Two conversations with the same first `context` messages."""

    def __init__(self, chosen: SftConversation, rejected: SftConversation, context: int) -> None:
        self.chosen, self.rejected, self.context = chosen, rejected, context
        self.tools = chosen.tools

    @property
    def content(self) -> list[Any]:
        """Everything but its place, for a digest."""
        return [self.chosen.content, self.rejected.content]

    @property
    def shared_content(self) -> list[Message]:
        """The prompt, which pairs may have in common."""
        return self.chosen.messages[: self.context]

    def samples(self, renderer: Renderer, seq_len: int) -> list[Sample]:
        """Return the tokens of the chosen and the rejected conversation, with advantages 1 and -1 on their completions.

        A pair of which one side has no trained token within `seq_len` has none on either: there is nothing to compare.
        """
        samples = [render_sample(conversation, renderer) for conversation in (self.chosen, self.rejected)]
        comparable = all(sample.mask[1:seq_len].any() for sample in samples)
        for sample, sign in zip(samples, (1.0, -1.0), strict=True):
            sample.mask &= comparable
            sample.streams = {"advantages": np.where(sample.mask, sign, 0.0).astype(np.float32)}
        return samples


def parse_pair(row: Any, columns: Mapping[str, str], place: Place) -> PreferencePair:
    """Check a row and return its pair. `columns` maps our column names to those of the data."""
    file, line = place
    error = partial(DataError, file=file, line=line)
    fields = read_fields(row, columns, pair_columns(columns), error, "`prompt`, `chosen` and `rejected`")
    if fields["chosen"] is None or fields["rejected"] is None:
        raise error("lacks `chosen` or `rejected`", fix=f"Map other names in `columns`. {keys_of(row)}")
    sides = [parse_messages(fields[key], key, "assistant", error) for key in ("chosen", "rejected")]
    prompt = [] if fields["prompt"] is None else parse_messages(fields["prompt"], "prompt", "user", error)
    if any(side[: len(prompt)] != prompt for side in sides):  # else both repeat it, or there is none
        sides = [[*prompt, *side] for side in sides]
        context = len(prompt)
    else:
        context = common_prompt(*sides)
    for key, messages in zip(("chosen", "rejected"), sides, strict=True):
        if context == 0 or not any(message["role"] == "assistant" for message in messages[context:]):
            fact = "no prompt before it" if context == 0 else "no assistant message to train on"
            raise error(fact, key=key, value=fields[key])
    if sides[0] == sides[1]:
        raise error("the chosen and the rejected completion are the same")
    tools = parse_tools(fields["tools"], error)
    chosen, rejected = (SftConversation(messages, context, tools, place) for messages in sides)
    return PreferencePair(chosen, rejected, context)


def pair_columns(columns: Mapping[str, str]) -> dict[str, str]:
    """Return our columns, each with its name in the data."""
    return {name: columns.get(name, name) for name in COLUMNS}


def common_prompt(chosen: Sequence[Message], rejected: Sequence[Message]) -> int:
    """Return how many messages are the prompt of both: as many as are equal, up to a message of the assistant in each.

    0 if the conversations have no such prompt.
    """
    pairs = list(zip(chosen, rejected, strict=False))
    equal = next((number for number, (left, right) in enumerate(pairs) if left != right), len(pairs))
    both = (n for n in range(min(equal, len(pairs) - 1), 0, -1) if {m["role"] for m in pairs[n]} == {"assistant"})
    return next(both, 0)
