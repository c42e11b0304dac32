"""Training examples: checked rows of a data set as conversations or preference pairs, and their tokens with a mask.

The loss covers what the model itself would sample: an assistant's text and its stop token, but not the header that
opens its turn. Preference pairs, for DPO, are in the conventional format: `prompt`, `chosen` and `rejected`, each a
text or messages. Without `prompt`, or if both completions repeat it, the prompt is the common beginning of the two
conversations. Rows in other formats (`from` and `value`) and images are not supported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from jinja2 import TemplateError
from renderers import build_training_sample
from renderers.base import Renderer
from renderers.default import DefaultRenderer

from headrace.errors import DataError
from headrace.rollout.types import NOT_SAMPLED, ROLES, Message, Sample
from headrace.text.tokenizer import common_prefix_length

COLUMNS = ("messages", "prompt", "completion", "tools")
"""The columns of a conversation: either messages, or prompt and completion; and optional tools."""
PAIR_COLUMNS = ("prompt", "chosen", "rejected", "tools")
Place = tuple[str, int]
"""The file or dataset of a row, and its line or row number from 1."""


class SftConversation:
    """Messages of which those of the assistant from number `context` on are trained, and the tools they may call."""

    def __init__(
        self,
        messages: list[Message],
        context: int = 0,
        tools: list[dict[str, Any]] | None = None,
        place: Place | None = None,
    ) -> None:
        self.messages = messages
        self.is_trained = [
            index >= context and message["role"] == "assistant" for index, message in enumerate(messages)
        ]
        self.tools, self.place = tools, place

    @property
    def content(self) -> list[Any]:
        """Everything but its place, for a digest."""
        return [self.messages, self.is_trained, self.tools]

    @property
    def shared_content(self) -> None:
        """None: a conversation has no part that other examples share."""

    def samples(self, renderer: Renderer, seq_len: int) -> list[Sample]:
        return [render_sample(self, renderer)]


def parse_row(row: Any, columns: Mapping[str, str], place: Place) -> SftConversation:
    """Check a row and return its conversation. `columns` maps our column names to those of the data."""
    file, line = place
    error = partial(DataError, file=file, line=line)
    fields = read_fields(row, columns, row_columns(columns), error, "`messages`, or with `prompt` and `completion`")
    prompt: list[Message] = []
    if fields.get("messages") is not None:
        completion = parse_messages(fields["messages"], "messages", "user", error)
    elif fields.get("prompt") is not None and fields.get("completion") is not None:
        prompt = parse_messages(fields["prompt"], "prompt", "user", error)
        completion = parse_messages(fields["completion"], "completion", "assistant", error)
    else:
        raise error(
            "has neither `messages` nor `prompt` and `completion`",
            fix=f"Map other names in `columns`. {_describe_columns(row)}",
        )
    if not any(message["role"] == "assistant" for message in completion):
        raise error("no assistant message to train on", key="messages" if not prompt else "completion")
    return SftConversation([*prompt, *completion], len(prompt), parse_tools(fields.get("tools"), error), place)


def read_fields(
    row: Any, columns: Mapping[str, str], read: Mapping[str, str], error: partial[DataError], expected: str
) -> dict[str, Any]:
    """Return the values of the columns that are read, by our names; raise if the row lacks a mapped one."""
    if not isinstance(row, dict):
        raise error(f"expected an object with {expected}")
    for ours, theirs in columns.items():
        if theirs not in row:
            raise error("the row has no such column", key=f"columns.{ours}", value=theirs, fix=_describe_columns(row))
    return {ours: row.get(theirs) for ours, theirs in read.items()}


def _describe_columns(row: dict[str, Any]) -> str:
    return f"The row has {', '.join(map(repr, sorted(row)))}."


def row_columns(columns: Mapping[str, str]) -> dict[str, str]:
    """Return the columns to read, each with its name in the data. A mapped column of one format excludes the other."""
    if "messages" in columns:
        ours: tuple[str, ...] = ("messages", "tools")
    elif "prompt" in columns or "completion" in columns:
        ours = ("prompt", "completion", "tools")
    else:
        ours = COLUMNS
    return {name: columns.get(name, name) for name in ours}


def render_sample(conversation: SftConversation, renderer: Renderer) -> Sample:
    """Return the tokens of a conversation with `ce_weights` 1 on what the assistant writes and `rl_weights` 0."""
    tokenize = _tokenize_by_template if isinstance(renderer, DefaultRenderer) else _tokenize_by_family
    try:
        ids, mask = tokenize(conversation, renderer)
    except TemplateError as error:
        raise _make_error(conversation, f"the model's chat template refuses it: {error}") from error
    tokens, is_trained = np.array(ids, np.int32), np.array(mask, np.bool_)
    prompt_length = int(is_trained.argmax()) if is_trained.any() else len(tokens)
    sample = Sample(tokens, is_trained, np.zeros(len(tokens)), np.full(len(tokens), NOT_SAMPLED), prompt_length)
    sample.set_stream("ce_weights", is_trained.astype(np.float32))
    sample.set_stream("rl_weights", np.zeros(len(tokens), np.float32))
    return sample


def _tokenize_by_family(conversation: SftConversation, renderer: Renderer) -> tuple[list[int], list[bool]]:
    """Return tokens and mask from a renderer that attributes each token to a message."""
    rendered = build_training_sample(
        renderer,
        conversation.messages,
        role_to_mask=lambda message: message["role"] == "assistant",
        tools=conversation.tools,
        message_loss_mask=conversation.is_trained,
        ensure_final_stop=True,
    )
    return rendered.token_ids, rendered.loss_mask


def _tokenize_by_template(conversation: SftConversation, renderer: Renderer) -> tuple[list[int], list[bool]]:
    """Return tokens and mask from the model's own chat template, which does not attribute tokens to messages.

    The tokens of a message are those by which the conversation up to it extends the prompt before it.
    """
    messages, tools = conversation.messages, conversation.tools
    ids = renderer.render_ids(messages, tools=tools)
    mask = [False] * len(ids)
    stops = set(renderer.get_stop_token_ids())
    for index, is_trained in enumerate(conversation.is_trained):
        if not is_trained:
            continue
        if index == 0:
            raise _make_error(conversation, "begins with an assistant message", "Put a user message before it.")
        before = renderer.render_ids(messages[:index], tools=tools)
        prompt = renderer.render_ids(messages[:index], tools=tools, add_generation_prompt=True)
        extended = renderer.render_ids(messages[: index + 1], tools=tools)
        # A prompt may end with tokens that the message does not keep, such as an opening <think>.
        start = common_prefix_length(prompt, extended)
        end = next((i for i in range(len(extended), start, -1) if extended[i - 1] in stops), len(extended))
        if start < len(before) or extended[:end] != ids[:end]:
            raise _make_error(
                conversation,
                f"the model's chat template renders assistant message {index} differently once messages follow it, "
                "so its tokens cannot be identified",
                "Set renderer.name to the model's family, or give each answer its own row, as prompt and completion.",
            )
        mask[start:end] = [True] * (end - start)
    return ids, mask


def _make_error(conversation: SftConversation, fact: str, fix: str | None = None) -> DataError:
    file, line = conversation.place or (None, None)
    return DataError(fact, fix=fix, file=file, line=line)


def parse_messages(value: Any, key: str, role_of_text: str, error: partial[DataError]) -> list[Message]:
    """Check a list of messages, or turn a text into one message of `role_of_text`."""
    if isinstance(value, str):
        return [{"role": role_of_text, "content": value}]
    if not isinstance(value, list) or not value:
        raise error("expected a non-empty list of messages", key=key, value=value)
    messages = []
    for number, message in enumerate(value):
        if not isinstance(message, dict) or message.get("role") not in ROLES[1:]:
            raise error(f"expected a role ({', '.join(ROLES[1:])}) and content", key=f"{key}[{number}]", value=message)
        content = message.get("content")
        if not isinstance(content, str | list) and not message.get("tool_calls"):
            raise error("must be text or a list of parts", key=f"{key}[{number}].content", value=content)
        # Data sets write null for a missing field, but templates test whether the field exists.
        messages.append({name: field for name, field in message.items() if field is not None})
    return messages


def parse_tools(value: Any, error: partial[DataError]) -> list[dict[str, Any]] | None:
    """Check a list of tool schemas, or parse it from JSON text, as Parquet files tend to have it."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as cause:
            raise error(f"not valid JSON: {cause}", key="tools", value=value) from cause
    if value is not None and not isinstance(value, list):
        raise error("must be a list", key="tools", value=value)
    return value or None


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
        raise error("lacks `chosen` or `rejected`", fix=f"Map other names in `columns`. {_describe_columns(row)}")
    sides = [parse_messages(fields[key], key, "assistant", error) for key in ("chosen", "rejected")]
    prompt = [] if fields["prompt"] is None else parse_messages(fields["prompt"], "prompt", "user", error)
    if any(side[: len(prompt)] != prompt for side in sides):  # else both repeat it, or there is none
        sides = [[*prompt, *side] for side in sides]
        context = len(prompt)
    else:
        context = count_prompt_messages(*sides)
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
    """Return the columns of a pair, each with its name in the data."""
    return {name: columns.get(name, name) for name in PAIR_COLUMNS}


def count_prompt_messages(chosen: Sequence[Message], rejected: Sequence[Message]) -> int:
    """Return the number of equal messages before an assistant message in both; 0 if there is no such prompt."""
    pairs = list(zip(chosen, rejected, strict=False))
    equal = next((number for number, (left, right) in enumerate(pairs) if left != right), len(pairs))
    both = (n for n in range(min(equal, len(pairs) - 1), 0, -1) if {m["role"] for m in pairs[n]} == {"assistant"})
    return next(both, 0)
