"""Turn markers: the tokens that structure a chat format, which only its renderer may produce.

Text of a message, a data row, a tool result or a hint that spells a marker reaches the model as characters. The markers
are special tokens, and all tokens that the renderer puts around the words of test conversations. Tags of reasoning and
tool calls remain tokens, since instructions name them; only in tool results are they encoded as characters.

Before a message is rendered, each marker in it is broken: `BREAK` follows its first character. The tokenizer encodes
what is on both sides of a break separately. Text without markers is passed on as it is. Left out: formats that mark
turns by plain text, where nothing distinguishes a marker from words, and OpenAI's own encoder for gpt-oss, which
encodes all text as characters.
"""

from __future__ import annotations

import json
import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any, cast

from renderers.base import RenderedTokens, Renderer
from tokenizers import AddedToken

from headrace.rollout.types import Message
from headrace.text.messages import content_text
from headrace.text.tokenizer import BREAK, Tokenizer

log = logging.getLogger(__name__)

_TAG = re.compile("think|tool.?call|invoke", re.IGNORECASE)
"""Names of tags of reasoning and tool calls, such as `</think>`, `[TOOL_CALLS]` and `<|tool_call_begin|>`."""
_WORD = re.compile(r"[\w\s]*")
_SYSTEM, _USER, _ASSISTANT = ({"role": role, "content": "0"} for role in ("system", "user", "assistant"))
_ID = "call00000"
"""Mistral's templates require nine letters or digits."""
_CALL = {"id": _ID, "type": "function", "function": {"name": "f", "arguments": {"a": "0"}}}
_CALLED = [_USER, {**_ASSISTANT, "reasoning_content": "0", "tool_calls": [_CALL]}]
_RESULT = {"role": "tool", "tool_call_id": _ID, "name": "f", "content": "0"}
_TOOLS = [{"type": "function", "function": {"name": "f", "description": "0", "parameters": {"type": "object"}}}]
_PLAIN = ([_USER], [_SYSTEM, _USER], [_USER, _ASSISTANT, _USER], [_USER, _ASSISTANT])


class TurnMarkers:
    """The markers of a model's chat format."""

    def __init__(self, renderer: Renderer, tokenizer: Tokenizer) -> None:
        emitted = partial(_emitted_tokens, renderer)
        plain, called = emitted(_PLAIN), emitted([_CALLED])
        structure = (
            plain | called | emitted([[*_CALLED, _RESULT], [*_CALLED, _RESULT, _USER]]) | emitted(_PLAIN, _TOOLS)
        )
        ends = {*renderer.get_stop_token_ids(), tokenizer.eos_token_id, tokenizer.bos_token_id}
        tags, markers = [], []
        for token, entry in tokenizer.backend.get_added_tokens_decoder().items():
            is_markup = _WORD.fullmatch(entry.content) is None
            if token in ends:
                markers.append(entry)
            elif _TAG.search(entry.content) or (is_markup and not entry.special and token in called - plain):
                tags.append(entry)
            elif entry.special or (is_markup and token in structure):
                markers.append(entry)
        normalizer = tokenizer.backend.normalizer
        self._markers, self._markers_and_tags = _Breaker(markers, normalizer), _Breaker(markers + tags, normalizer)
        self._control = _Breaker([*markers, *(tag for tag in tags if tag.special)], normalizer)
        self.mark_turns = any(tokenizer.backend.token_to_id(marker.content) in plain for marker in markers)
        """False where the format marks turns by plain text, which the text of messages can imitate."""

    def break_messages(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages with a break in each marker in a text, name or argument. Roles are not changed."""
        broken = []
        for message in messages:
            breaker, content = self._markers, message.get("content")
            if message.get("role") == "tool":
                breaker = self._markers_and_tags
            fields = {name: value if name == "role" else breaker.apply(value) for name, value in message.items()}
            if isinstance(content, list) and breaker.find(content_text(content)):
                fields["content"] = [_append_break(part) for part in fields["content"]]
            broken.append(fields)
        return broken

    def break_tools(self, tools: Sequence[Any] | None) -> list[Any] | None:
        """Return tool schemas with a break in each marker in a text or key."""
        return None if tools is None else [self._markers.apply(tool) for tool in tools]

    def find_control_token(self, message: Message) -> str | None:
        """Return a marker or another special token that a message contains."""
        return next(filter(None, map(self._control.find, _texts(message))), None)


class _Breaker:
    """Inserts `BREAK` into every occurrence of some markers in a text."""

    def __init__(self, markers: Sequence[AddedToken], normalizer: Any) -> None:
        texts = [marker.content for marker in markers if len(marker.content) > 1]
        # One pattern per first character, for which `re` searches fast.
        self._patterns = [
            re.compile(f"{re.escape(first)}(?=({_trie(rests)}))") for first, rests in _group_by_first_char(texts)
        ]
        # A prefix of a marker at the end of a text could be completed by a marker after the text.
        prefixes = {text[:size] for text in texts for size in range(1, len(text) + 1)}
        beginnings = {text[:-size] for text in texts for size in range(1, len(text)) if text[-size:] in prefixes}
        if beginnings:
            self._patterns.append(re.compile(rf"(?:{'|'.join(map(re.escape, beginnings))})(?=(\s*)\Z)"))
        self._shortest = min(map(len, [*texts, *beginnings]), default=0)
        self._normalizer = normalizer
        matched_normalized = [marker.content for marker in markers if normalizer is not None and marker.normalized]
        self._normalized = list(map(normalizer.normalize_str, matched_normalized)) if matched_normalized else []

    def apply(self, value: Any) -> Any:
        """Return a JSON value with breaks in its texts and keys."""
        if isinstance(value, str):
            return self._break(value)
        if isinstance(value, dict):
            broken = {}
            for key, entry in value.items():
                is_json = key == "arguments" and isinstance(entry, str) and "\\" in entry
                broken[self.apply(key)] = self._break_json(entry) if is_json else self.apply(entry)
            return broken
        return list(map(self.apply, value)) if isinstance(value, list | tuple) else value

    def find(self, text: str) -> str | None:
        """Return the first marker of a text."""
        matches = (pattern.search(text) for pattern in self._patterns)
        return next((match[0] + match[1] for match in matches if match), None)

    def _break(self, text: str) -> str:
        for pattern in self._patterns if len(text) >= self._shortest else ():
            if pattern.search(text):
                text = pattern.sub(rf"\g<0>{BREAK}", text)
        # Some tokens are matched in normalized text, and normalization may turn other characters into a marker.
        if self._normalized and any(map(self._has_normalized_marker, text.split(BREAK))):
            return BREAK.join(text.replace(BREAK, ""))
        return text

    def _has_normalized_marker(self, text: str) -> bool:
        normalized = self._normalizer.normalize_str(text)
        return any(marker in normalized for marker in self._normalized)

    def _break_json(self, text: str) -> Any:
        """Break the arguments of a call, given as JSON text: renderers may parse it, and escapes may spell a marker."""
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError):
            return self._break(text)
        broken = self.apply(parsed)
        return self._break(text) if broken == parsed else broken


class _BreakMarkersMixin:
    """Mixin for a renderer: breaks the markers in all messages and tools before they are rendered."""

    turn_markers: TurnMarkers

    def render(self, messages: list[Any], *, tools: list[Any] | None = None, **options: Any) -> RenderedTokens:
        markers, renderer = self.turn_markers, cast(Renderer, super())
        return renderer.render(markers.break_messages(messages), tools=markers.break_tools(tools), **options)

    def render_ids(self, messages: list[Any], *, tools: list[Any] | None = None, **options: Any) -> list[int]:
        markers, renderer = self.turn_markers, cast(Renderer, super())
        return list(renderer.render_ids(markers.break_messages(messages), tools=markers.break_tools(tools), **options))

    def bridge_to_next_turn(
        self, prompt: list[int], completion: list[int], messages: list[Any], *, tools: list[Any] | None = None
    ) -> RenderedTokens | None:
        markers, renderer = self.turn_markers, cast(Renderer, super())
        broken, schemas = markers.break_messages(messages), markers.break_tools(tools)
        return renderer.bridge_to_next_turn(prompt, completion, broken, tools=schemas)


def reserve_turn_markers(renderer: Renderer, tokenizer: Tokenizer) -> None:
    """Change the class of a renderer in place, so that no text of a message produces a marker."""
    kind, markers = type(renderer), TurnMarkers(renderer, tokenizer)
    if not markers.mark_turns:
        _warn_of_plain_turns(tokenizer.name_or_path)
    renderer.__class__ = type(kind.__name__, (_BreakMarkersMixin, kind), {"turn_markers": markers})


@cache
def _warn_of_plain_turns(model: str) -> None:
    """Log a warning once per model: a process makes several renderers."""
    log.warning("the chat format of %s marks turns by plain text, which messages can imitate", model)


def _emitted_tokens(renderer: Renderer, conversations: Iterable[list[Any]], tools: list[Any] | None = None) -> set[int]:
    """Return all tokens in the renderings of those conversations that the chat format can render."""
    tokens: set[int] = set()
    for messages in conversations:
        for add_generation_prompt in (False, True):
            try:
                tokens.update(renderer.render_ids(messages, tools=tools, add_generation_prompt=add_generation_prompt))
            except Exception:  # templates raise any type for messages they cannot render
                continue
    return tokens


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts and keys of a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for entry in (*value, *value.values()) if isinstance(value, dict) else value:
            yield from _texts(entry)


def _trie(texts: Iterable[str]) -> str:
    """Return a regular expression for texts that shares common prefixes: some tokenizers have 1000 special tokens."""
    branches = (
        re.escape(first) + ("" if "" in rests else f"(?:{_trie(rests)})")
        for first, rests in _group_by_first_char(texts)
    )
    return "|".join(branches)


def _group_by_first_char(texts: Iterable[str]) -> Iterable[tuple[str, list[str]]]:
    """Return each first character of texts with what follows it."""
    rests: defaultdict[str, list[str]] = defaultdict(list)
    for text in texts:
        rests[text[0]].append(text[1:])
    return rests.items()


def _append_break(part: Any) -> Any:
    """Return a part of a message's content whose text cannot be joined with that of the next part."""
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return {**part, "text": part["text"] + BREAK}
    return part + BREAK if isinstance(part, str) else part
