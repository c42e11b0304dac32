"""Conversations for supervised training: from a file or from an environment, by position, in an order a seed fixes.

A stream is endless and can start anywhere: example number n is the same whoever asks, so a resumed run sees exactly the
examples that an uninterrupted one would have seen.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from renderers import build_training_sample
from renderers.base import Renderer

from headrace.environments.base import Environment
from headrace.errors import BadInput
from headrace.rollout.types import NOT_SAMPLED, Message, Sample

ROLES = ("system", "user", "assistant", "tool")


class DataError(BadInput):
    """A row that cannot be trained on. The message names the file and the line."""


class Conversation:
    """Messages, which of them to learn, and the tools they may call."""

    def __init__(self, messages: list[Message], context: int = 0, tools: list[dict[str, Any]] | None = None) -> None:
        self.messages = messages
        self.learned = [index >= context and message["role"] == "assistant" for index, message in enumerate(messages)]
        self.tools = tools


def from_environment(environment: Environment, seed: int, position: int) -> Iterator[Conversation]:
    """The environment's demonstrations from `position` on."""
    return (Conversation(messages) for messages in islice(environment.demonstrations(seed), position, None))


def from_rows(rows: list[Conversation], seed: int, position: int) -> Iterator[Conversation]:
    """Endless passes over the rows from `position` on, each in its own order."""
    epoch, start = divmod(position, len(rows))
    while True:
        order = np.random.default_rng([seed, epoch]).permutation(len(rows))
        yield from (rows[index] for index in order[start:])
        epoch, start = epoch + 1, 0


def read_rows(path: Path) -> list[Conversation]:
    """Every row of a JSONL or Parquet file, checked; the first bad one is an error."""
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    if path.suffix in (".jsonl", ".json"):
        rows = list(_json_lines(path))
    elif path.suffix == ".parquet":
        rows = list(_parquet_rows(path))
    else:
        raise DataError(f"{path}: expected a .jsonl or .parquet file")
    if not rows:
        raise DataError(f"{path}: has no rows")
    return rows


def render(conversation: Conversation, renderer: Renderer) -> Sample:
    """Tokens with cross-entropy weight 1 on what an assistant says, and nothing for the other losses."""
    rendered = build_training_sample(
        renderer,
        conversation.messages,
        role_to_mask=lambda message: message["role"] == "assistant",
        tools=conversation.tools,
        message_loss_mask=conversation.learned,
        ensure_final_stop=True,
    )
    tokens = np.array(rendered.token_ids, np.int32)
    learned = np.array(rendered.loss_mask, np.bool_)
    prompt = int(learned.argmax()) if learned.any() else len(tokens)
    sample = Sample(tokens, learned, np.zeros(len(tokens)), np.full(len(tokens), NOT_SAMPLED), prompt)
    sample.set_stream("ce_weights", learned.astype(np.float32))
    sample.set_stream("rl_weights", np.zeros(len(tokens), np.float32))
    return sample


def _json_lines(path: Path) -> Iterator[Conversation]:
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}, line {number}"
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{where}: not valid JSON: {error}") from error
            yield _conversation(row, where)


def _parquet_rows(path: Path) -> Iterator[Conversation]:
    import pyarrow.parquet

    for number, row in enumerate(pyarrow.parquet.read_table(path).to_pylist(), 1):
        yield _conversation(row, f"{path}, row {number}")


def _conversation(row: Any, where: str) -> Conversation:
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected an object with `messages`, or with `prompt` and `completion`")
    if row.get("messages") is not None:
        prompt, completion = [], _messages(row["messages"], "user", f"{where}: messages")
    elif row.get("prompt") is not None and row.get("completion") is not None:
        prompt = _messages(row["prompt"], "user", f"{where}: prompt")
        completion = _messages(row["completion"], "assistant", f"{where}: completion")
    else:
        raise DataError(f"{where}: has neither `messages` nor `prompt` and `completion`; its keys are {sorted(row)}")
    if not any(message["role"] == "assistant" for message in completion):
        raise DataError(f"{where}: no assistant message, so there is nothing to learn")
    return Conversation([*prompt, *completion], context=len(prompt), tools=_tools(row.get("tools"), where))


def _messages(value: Any, role_of_text: str, where: str) -> list[Message]:
    """A list of messages, or a text that stands for one message."""
    if isinstance(value, str):
        return [{"role": role_of_text, "content": value}]
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: expected a non-empty list of messages, not {value!r:.60}")
    messages = []
    for number, message in enumerate(value):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise DataError(f"{where}[{number}]: expected a role ({', '.join(ROLES)}) and content, not {message!r:.60}")
        if not isinstance(message.get("content"), str | list) and not message.get("tool_calls"):
            raise DataError(f"{where}[{number}]: content must be text, not {message.get('content')!r:.60}")
        # Parquet fills the fields that a message lacks with nulls.
        messages.append({key: content for key, content in message.items() if content is not None})
    return messages


def _tools(value: Any, where: str) -> list[dict[str, Any]] | None:
    """A list of tool schemas, or the same as JSON text, which is how Parquet files tend to carry it."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: tools is not valid JSON: {error}") from error
    if value is not None and not isinstance(value, list):
        raise DataError(f"{where}: tools must be a list")
    return value or None
