"""A conversation to learn from: the row of a data set checked, and its tokens with what is learned of them.

What is learned is what the model itself would have sampled: an assistant's text and its stop token, but neither the
header that opens its turn nor anything that others say. Left out on purpose: rows in other formats (`from` and
`value`), and images.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from jinja2 import TemplateError
from renderers import build_training_sample
from renderers.base import Renderer
from renderers.default import DefaultRenderer

from headrace.environments.data.tables import DataError as DataError
from headrace.rollout.types import NOT_SAMPLED, Message, Sample

ROLES = ("system", "user", "assistant", "tool")
COLUMNS = ("messages", "prompt", "completion", "tools")
"""What is read of a row: either messages, or prompt and completion; and tools, where there are any."""


class Conversation:
    """Messages, which of them to learn, the tools they may call, and how errors call it."""

    def __init__(
        self,
        messages: list[Message],
        context: int = 0,
        tools: list[dict[str, Any]] | None = None,
        where: str = "a conversation",
    ) -> None:
        self.messages = messages
        self.learned = [index >= context and message["role"] == "assistant" for index, message in enumerate(messages)]
        self.tools = tools
        self.where = where


def conversation_of(row: Any, columns: Mapping[str, str], where: str) -> Conversation:
    """A row, checked. `columns` says for ours what the data calls it, where it has another name."""
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected an object with `messages`, or with `prompt` and `completion`")
    found = _renamed(row, columns, where)
    if found.get("messages") is not None:
        prompt, completion = [], _messages(found["messages"], "user", f"{where}: messages")
    elif found.get("prompt") is not None and found.get("completion") is not None:
        prompt = _messages(found["prompt"], "user", f"{where}: prompt")
        completion = _messages(found["completion"], "assistant", f"{where}: completion")
    else:
        raise DataError(
            f"{where}: has neither `messages` nor `prompt` and `completion`; its keys are {sorted(row)}. Where they "
            "have other names, give these as columns"
        )
    if not any(message["role"] == "assistant" for message in completion):
        raise DataError(f"{where}: no assistant message, so there is nothing to learn")
    return Conversation([*prompt, *completion], len(prompt), _tools(found.get("tools"), where), where)


def columns_read(columns: Mapping[str, str]) -> dict[str, str]:
    """For each of our columns that is looked for, its name in the data. Naming one format rules out the other."""
    if "messages" in columns:
        ours: tuple[str, ...] = ("messages", "tools")
    elif "prompt" in columns or "completion" in columns:
        ours = ("prompt", "completion", "tools")
    else:
        ours = COLUMNS
    return {name: columns.get(name, name) for name in ours}


def render(conversation: Conversation, renderer: Renderer) -> Sample:
    """Tokens with cross-entropy weight 1 on what an assistant says, and nothing for the other losses."""
    tokens_of = _by_template if isinstance(renderer, DefaultRenderer) else _by_family
    try:
        ids, mask = tokens_of(conversation, renderer)
    except TemplateError as error:
        raise DataError(f"{conversation.where}: the model's chat template refuses it: {error}") from error
    tokens, learned = np.array(ids, np.int32), np.array(mask, np.bool_)
    prompt = int(learned.argmax()) if learned.any() else len(tokens)
    sample = Sample(tokens, learned, np.zeros(len(tokens)), np.full(len(tokens), NOT_SAMPLED), prompt)
    sample.set_stream("ce_weights", learned.astype(np.float32))
    sample.set_stream("rl_weights", np.zeros(len(tokens), np.float32))
    return sample


def _by_family(conversation: Conversation, renderer: Renderer) -> tuple[list[int], list[bool]]:
    """Through a renderer that knows for each token whether a model samples it."""
    rendered = build_training_sample(
        renderer,
        conversation.messages,
        role_to_mask=lambda message: message["role"] == "assistant",
        tools=conversation.tools,
        message_loss_mask=conversation.learned,
        ensure_final_stop=True,
    )
    return rendered.token_ids, rendered.loss_mask


def _by_template(conversation: Conversation, renderer: Renderer) -> tuple[list[int], list[bool]]:
    """Through the model's own chat template, which does not say whose a token is. Its renderings of parts do.

    What is learned of a message is what the conversation up to it has beyond the prompt that asks for it.
    """
    messages, tools = conversation.messages, conversation.tools
    ids = renderer.render_ids(messages, tools=tools)
    mask = [False] * len(ids)
    stops = set(renderer.get_stop_token_ids())
    for index, learned in enumerate(conversation.learned):
        if not learned:
            continue
        if index == 0:
            raise DataError(f"{conversation.where}: begins with an assistant's message: put what it answers before it")
        before = renderer.render_ids(messages[:index], tools=tools)
        asked = renderer.render_ids(messages[:index], tools=tools, add_generation_prompt=True)
        ended = renderer.render_ids(messages[: index + 1], tools=tools)
        # A prompt may have more than the message keeps: an opened thought, where the message has none.
        start = _common_prefix(asked, ended)
        end = next((place for place in range(len(ended), start, -1) if ended[place - 1] in stops), len(ended))
        if start < len(before) or ended[:end] != ids[:end]:
            raise DataError(
                f"{conversation.where}: the model's chat template renders message {index}, an assistant's, otherwise "
                "once the conversation goes on, so that its tokens cannot be told from others: set renderer.name to "
                "the model's family, or give each answer a row of its own, as a completion after its prompt"
            )
        mask[start:end] = [True] * (end - start)
    return ids, mask


def _common_prefix(left: list[int], right: list[int]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(left), len(right)))


def _renamed(row: dict[str, Any], columns: Mapping[str, str], where: str) -> dict[str, Any]:
    """The columns that are read, under our names."""
    for ours, theirs in columns.items():
        if theirs not in row:
            raise DataError(f"{where}: has no {theirs!r}, which columns.{ours} names; its keys are {sorted(row)}")
    return {ours: row.get(theirs) for ours, theirs in columns_read(columns).items()}


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
            found = message.get("content")
            raise DataError(f"{where}[{number}]: content must be text or a list of parts, not {found!r:.60}")
        # In JSON as it is commonly written, null says that a message lacks a field; templates ask whether it is there.
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
