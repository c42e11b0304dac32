"""The tokens with which a model would have given an answer that another one gave in words.

They are those of the answer's own rendering beyond the prompt that asks for it, up to the stop token: a chat format may
put a line break behind that, which no model writes. Where the rendering does not begin with the prompt, it is the
thoughts that differ: the prompt has opened them, or ruled them out. Then the answer is written as it would go on.

An answer is rendered after one short question instead of its whole conversation: formats rewrite history, but write
every answer alike.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from renderers.base import Renderer

from headrace.rollout.types import Message
from headrace.text.tokenizer import Tokenizer, common_prefix_length

QUESTION: Message = {"role": "user", "content": "?"}
MARK = "\u2766headrace\u2766"
"""Stands for a place in a text, and is taken out again."""
PLAIN = "x"
"""A word that means nothing in any chat format."""
OPENING, CLOSING = "<think>", "</think>"


class Answer(NamedTuple):
    """`dropped`: tokens at the end of the prompt that an answer like this one does not go on from."""

    ids: list[int]
    dropped: int = 0


def answer_tokens(
    renderer: Renderer,
    tokenizer: Tokenizer,
    message: Message,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    ended: bool = True,
) -> Answer:
    """What follows the prompt; with the stop token, unless the answer was cut off before its end."""
    return _Writing(renderer, tokenizer, tools).answer(message, ended)


def with_plain_words(message: Message) -> Message:
    """The message with nothing but plain words in the place of what was said: all else is of the chat format."""
    content = str(message.get("content") or "")
    plain = {**message, "content": _plain_content(content, thinks=not message.get("reasoning_content"))}
    if message.get("reasoning_content"):
        plain["reasoning_content"] = PLAIN
    if message.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in message["tool_calls"]]
    return plain


def _plain_content(content: str, thinks: bool) -> str:
    """Marks of a thought stay where the text may have one."""
    if not (thinks and _has_thought(content)):
        return PLAIN if content else ""
    opening = OPENING if content.startswith(OPENING) else ""
    thought, closing, rest = content.removeprefix(OPENING).partition(CLOSING)
    return "".join((opening, PLAIN if thought.strip() else "", closing, PLAIN if rest.strip() else ""))


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    function = {**call["function"], "name": PLAIN, "arguments": _plain(arguments)}
    return {**call, "id": call["id"].replace(name, PLAIN), "function": function}


def _plain(value: Any) -> Any:
    match value:
        case str():
            return PLAIN
        case dict():
            return {f"{PLAIN}{number}": _plain(entry) for number, entry in enumerate(value.values())}
        case list():
            return [_plain(entry) for entry in value]
        case _:
            return value


class _Writing:
    def __init__(self, renderer: Renderer, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]]) -> None:
        self._renderer = _that_shows_thoughts(renderer)
        self._tokenizer = tokenizer
        self._tools: Any = list(tools) or None
        self._asked = self._render(add_generation_prompt=True)

    def answer(self, message: Message, ended: bool) -> Answer:
        if ended:
            answer = self._write(message)
            return answer._replace(ids=self._closed(answer.ids, message))
        apart, thought = _thought_apart(message)
        if not apart["content"] and not apart.get("tool_calls"):
            cut = self._cut_thought(thought) if thought else []
            if cut is not None:
                return Answer(cut)
        answer = self._write(message)
        return answer._replace(ids=self._open(answer.ids))

    def _write(self, message: Message) -> Answer:
        rendered = self._render(message)
        ids = self._beyond_prompt(rendered)
        if ids is None:
            ids = self._with_other_thoughts(*_thought_apart(message))
        if ids is not None:
            return Answer(ids)
        start = common_prefix_length(self._asked, rendered)
        return Answer(rendered[start:], len(self._asked) - start)

    def _with_other_thoughts(self, apart: Message, thought: str) -> list[int] | None:
        """The answer with none where the prompt rules them out, and with empty ones where it opened them."""
        if thought:
            ids = self._beyond_prompt(self._render({**apart, "reasoning_content": thought}))
            ids = self._beyond_prompt(self._render(apart)) if ids is None else ids
        else:
            ids = self._beyond_prompt(self._render({**apart, "reasoning_content": MARK}), without=MARK)
        return self._after_opening(apart, thought) if ids is None else ids

    def _beyond_prompt(self, rendered: list[int], without: str = "") -> list[int] | None:
        """What goes on from the prompt, in tokens or at least as text; None if the rendering does not begin with it."""
        if not without and rendered[: len(self._asked)] == self._asked:
            return rendered[len(self._asked) :]
        begun, text = self._texts(rendered)
        if without and text.count(without) != 1:
            return None
        text = text.replace(without, "")
        return self._tokenizer.encode(text[len(begun) :]) if text.startswith(begun) else None

    def _after_opening(self, apart: Message, thought: str) -> list[int] | None:
        """For formats that open the thoughts in the prompt, and never show them in an answer."""
        begun, text = self._texts(self._render(apart))
        header, opened, rest = begun.rpartition(OPENING)
        if not opened or rest.strip() or not text.startswith(header):
            return None
        return self._tokenizer.encode(f"{thought}\n{CLOSING}\n\n{text[len(header) :]}")

    def _cut_thought(self, thought: str) -> list[int] | None:
        """A thought that never came to its end; None where the format does not show thoughts."""
        marked = {"role": "assistant", "content": "", "reasoning_content": thought + MARK}
        begun, text = self._texts(self._render(marked))
        shown, found, _ = text.partition(MARK)
        if found and shown.startswith(begun):
            return self._tokenizer.encode(shown[len(begun) :])
        return self._tokenizer.encode(thought) if begun.rstrip().endswith(OPENING) else None

    def _texts(self, rendered: list[int]) -> tuple[str, str]:
        """Prompt and rendering from where they differ."""
        start = common_prefix_length(self._asked, rendered)
        return self._tokenizer.decode(self._asked[start:]), self._tokenizer.decode(rendered[start:])

    def _render(self, *messages: Message, add_generation_prompt: bool = False) -> list[int]:
        conversation: Any = [QUESTION, *messages]
        return list(
            self._renderer.render_ids(conversation, tools=self._tools, add_generation_prompt=add_generation_prompt)
        )

    def _closed(self, ids: list[int], message: Message) -> list[int]:
        """Up to the stop token."""
        body = self._open(ids)
        return ids[: len(body) + 1] if len(body) < len(ids) else [*ids, *self._next_stop(message)]

    def _open(self, ids: list[int]) -> list[int]:
        """Without the stop token and what the format puts behind it."""
        stops = set(self._renderer.get_stop_token_ids())
        last = next((place for place in reversed(range(len(ids))) if ids[place] in stops), None)
        return ids if last is None or self._tokenizer.decode(ids[last + 1 :]).strip() else ids[:last]

    def _next_stop(self, message: Message) -> list[int]:
        """For formats where the next message ends an answer: what that begins with is what a model writes."""
        results = [
            {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": "?"}
            for call in message.get("tool_calls") or ()
        ]
        conversation: Any = [QUESTION, message, *(results or [QUESTION])]
        rendered = self._renderer.render(conversation, tools=self._tools)
        tokens = zip(rendered.token_ids, rendered.message_indices, rendered.sampled_mask, strict=False)
        written = [token for token, index, sampled in tokens if sampled and index == 1]
        stops = self._renderer.get_stop_token_ids()
        return written[-1:] if written and written[-1] in stops else stops[:1]


def _that_shows_thoughts(renderer: Renderer) -> Renderer:
    """gpt-oss leaves the thoughts of all answers out, which is right for those of the past alone."""
    config: Any = getattr(renderer, "config", None)
    if not getattr(config, "auto_drop_analysis", False):
        return renderer
    other: Any = copy.copy(renderer)
    other.config = config.model_copy(update={"auto_drop_analysis": False})
    return other


def _thought_apart(message: Message) -> tuple[Message, str]:
    """The message without its thought, and that; some servers leave it in the text."""
    apart = {name: value for name, value in message.items() if name != "reasoning_content"}
    thought, content = str(message.get("reasoning_content") or ""), str(message.get("content") or "")
    if not thought and _has_thought(content):
        thought, _, content = content.removeprefix(OPENING).partition(CLOSING)
        content = content.lstrip("\n")
    return {**apart, "content": content}, thought.strip("\n")


def _has_thought(content: str) -> bool:
    return CLOSING in content or content.startswith(OPENING)
