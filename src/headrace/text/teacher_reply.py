"""A teacher's reply rewritten as the policy's own completion, for training on it.

The reply is encoded in the policy's chat format and parsed back: the environment sees exactly what the policy is
trained to write. Such tokens have no version, so that they never become stale, and no logprobs: no policy sampled them.
Replies that the policy must not learn are refused.

The completion tokens of a message are those by which its rendering extends the prompt, up to the stop token: a chat
format may add a line break after it, which no model samples. If the rendering does not begin with the prompt, the cause
is reasoning, which the prompt has opened or ruled out: then the message is rendered with other reasoning. A message is
rendered after one short question instead of its whole conversation: formats rewrite history, but render every reply in
the same way.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from renderers.base import Renderer

from headrace.rollout.types import NOT_SAMPLED, Message, Turn
from headrace.text.completion import CompletionParser, parsed_tool_call
from headrace.text.messages import Reply, ToolCall, assistant_message
from headrace.text.prompt import Prompt, Tools
from headrace.text.tokenizer import Tokenizer, common_prefix_length
from headrace.text.turn_markers import TurnMarkers

QUESTION: Message = {"role": "user", "content": "?"}
MARK = "\u2766headrace\u2766"
"""Marks a position in rendered text and is removed again."""
THINK_START, THINK_END = "<think>", "</think>"


class EncodedReply(NamedTuple):
    """Completion tokens of a message."""

    ids: list[int]
    dropped: int = 0
    """Tokens at the end of the prompt that must be removed before `ids` are appended."""


class ReplyEncoder:
    """Encodes messages as completions of a prompt with `tools`."""

    def __init__(self, renderer: Renderer, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._renderer = renderer
        config: Any = getattr(renderer, "config", None)
        if getattr(config, "auto_drop_analysis", False):  # gpt-oss drops all reasoning, which is right only for history
            self._renderer = copy.copy(renderer)
            self._renderer.config = config.model_copy(update={"auto_drop_analysis": False})
        self._tokenizer = tokenizer
        self._tools: Any = list(tools) or None
        self._prompt = self._render(add_generation_prompt=True)

    def encode(self, message: Message, finished: bool = True) -> EncodedReply:
        """Return the completion tokens of a message; with the stop token unless it was truncated (`finished` false)."""
        if not finished:
            rest, reasoning = _split_reasoning(message)
            if not rest["content"] and not rest.get("tool_calls"):
                ids = self._encode_open_reasoning(reasoning) if reasoning else []
                if ids is not None:
                    return EncodedReply(ids)
        encoded = self._encode_whole(message)
        body = self._without_stop(encoded.ids)
        if not finished:
            return encoded._replace(ids=body)
        if len(body) < len(encoded.ids):
            return encoded._replace(ids=encoded.ids[: len(body) + 1])
        return encoded._replace(ids=[*encoded.ids, *self._stop_token_after(message)])

    def _encode_whole(self, message: Message) -> EncodedReply:
        rendered = self._render(message)
        ids = self._tokens_after_prompt(rendered)
        if ids is None:
            ids = self._encode_with_other_reasoning(*_split_reasoning(message))
        if ids is not None:
            return EncodedReply(ids)
        start = common_prefix_length(self._prompt, rendered)
        return EncodedReply(rendered[start:], len(self._prompt) - start)

    def _encode_with_other_reasoning(self, rest: Message, reasoning: str) -> list[int] | None:
        """Encode without reasoning where the prompt rules it out, and with empty reasoning where the prompt opens it.

        Some formats open reasoning in the prompt and never render it in a message: it is then written out here.
        """
        if reasoning:
            ids = self._tokens_after_prompt(self._render({**rest, "reasoning_content": reasoning}))
            ids = self._tokens_after_prompt(self._render(rest)) if ids is None else ids
        else:
            ids = self._tokens_after_prompt(self._render({**rest, "reasoning_content": MARK}), without=MARK)
        if ids is not None:
            return ids
        prompt, text = self._differing_texts(self._render(rest))
        header, opened, tail = prompt.rpartition(THINK_START)
        if not opened or tail.strip() or not text.startswith(header):
            return None
        return self._tokenizer.encode(f"{reasoning}\n{THINK_END}\n\n{text[len(header) :]}")

    def _tokens_after_prompt(self, rendered: list[int], without: str = "") -> list[int] | None:
        """Return the tokens of `rendered` after the prompt, compared as tokens or else as text; None if it differs."""
        if not without and rendered[: len(self._prompt)] == self._prompt:
            return rendered[len(self._prompt) :]
        prompt, text = self._differing_texts(rendered)
        if without and text.count(without) != 1:
            return None
        text = text.replace(without, "")
        return self._tokenizer.encode(text[len(prompt) :]) if text.startswith(prompt) else None

    def _encode_open_reasoning(self, reasoning: str) -> list[int] | None:
        """Encode reasoning that was truncated before its end; None where the format does not show reasoning."""
        marked = {"role": "assistant", "content": "", "reasoning_content": reasoning + MARK}
        prompt, text = self._differing_texts(self._render(marked))
        shown, mark, _ = text.partition(MARK)
        if mark and shown.startswith(prompt):
            return self._tokenizer.encode(shown[len(prompt) :])
        return self._tokenizer.encode(reasoning) if prompt.rstrip().endswith(THINK_START) else None

    def _differing_texts(self, rendered: list[int]) -> tuple[str, str]:
        """Return the texts of the prompt and of the rendering from their first differing token on."""
        start = common_prefix_length(self._prompt, rendered)
        return self._tokenizer.decode(self._prompt[start:]), self._tokenizer.decode(rendered[start:])

    def _render(self, *messages: Message, add_generation_prompt: bool = False) -> list[int]:
        conversation: Any = [QUESTION, *messages]
        options = {"tools": self._tools, "add_generation_prompt": add_generation_prompt}
        return list(self._renderer.render_ids(conversation, **options))

    def _without_stop(self, ids: list[int]) -> list[int]:
        """Remove the stop token and the white space that the format puts after it."""
        stops = set(self._renderer.get_stop_token_ids())
        last = next((index for index in reversed(range(len(ids))) if ids[index] in stops), None)
        return ids if last is None or self._tokenizer.decode(ids[last + 1 :]).strip() else ids[:last]

    def _stop_token_after(self, message: Message) -> list[int]:
        """Return the stop token for formats that render it only once another message follows."""
        results = [
            {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": "?"}
            for call in message.get("tool_calls") or ()
        ]
        conversation: Any = [QUESTION, message, *(results or [QUESTION])]
        rendered = self._renderer.render(conversation, tools=self._tools)
        tokens = zip(rendered.token_ids, rendered.message_indices, rendered.sampled_mask, strict=False)
        sampled = [token for token, index, is_sampled in tokens if is_sampled and index == 1]
        stops = self._renderer.get_stop_token_ids()
        return sampled[-1:] if sampled and sampled[-1] in stops else stops[:1]


def _split_reasoning(message: Message) -> tuple[Message, str]:
    """Return the message without its reasoning, and the reasoning, which some servers leave in the content."""
    rest = {name: value for name, value in message.items() if name != "reasoning_content"}
    reasoning, content = str(message.get("reasoning_content") or ""), str(message.get("content") or "")
    if not reasoning and (THINK_END in content or content.startswith(THINK_START)):
        reasoning, _, content = content.removeprefix(THINK_START).partition(THINK_END)
        content = content.lstrip("\n")
    return {**rest, "content": content}, reasoning.strip("\n")


CALL_ID_FORMATS: tuple[Callable[[int, str], str], ...] = (
    lambda number, name: f"call_{number}",
    lambda number, name: f"functions.{name}:{number}",
)
"""Ids of tool calls: as elsewhere in a run, or as in Kimi's format, where only the id contains the tool's name.

The ids of the teacher's server are not used: they differ from run to run.
"""


class UntrainableReply(ValueError):
    """A teacher's reply that the policy cannot or must not be trained on."""


class TeacherReplyRewriter:
    """Rewrites a teacher's replies as completions of the policy, within `seq_len` tokens, prompt included."""

    def __init__(self, renderer: Renderer, tokenizer: Tokenizer, seq_len: int) -> None:
        self._renderer, self._tokenizer = renderer, tokenizer
        self._parser = CompletionParser(renderer, tokenizer)
        self._turn_markers = TurnMarkers(renderer, tokenizer)
        self._seq_len = seq_len

    def rewrite(self, reply: Reply, prompt: Prompt, tools: Tools, first_call: int) -> Reply:
        """Return the reply with the policy's tokens; tool calls are numbered from `first_call`."""
        _refuse_invalid_calls(reply.tool_calls)
        if token := self._turn_markers.find_control_token(reply.message):
            raise UntrainableReply(f"the reply contains {token}, a control token of the policy's chat format")
        names, finished = [call.name for call in reply.tool_calls], not reply.truncated
        parsed_names: list[str | None] = []
        for call_id in CALL_ID_FORMATS if names else CALL_ID_FORMATS[:1]:
            expected = [
                ToolCall(call_id(first_call + number, call.name), call.name, call.arguments)
                for number, call in enumerate(reply.tool_calls)
            ]
            message = assistant_message(reply.message["content"], expected, reply.message.get("reasoning_content", ""))
            encoded = self._encode(message, tools, finished)
            prompt_ids = prompt.ids[: len(prompt.ids) - encoded.dropped]
            try:
                parsed = self._parser.parse_strictly(prompt_ids, encoded.ids, tools)
            except (ValueError, RecursionError) as error:  # JSON of any depth, and numbers of any length
                raise UntrainableReply(f"the policy's chat format cannot parse the reply: {error}") from error
            calls = [parsed_tool_call(call, same.id) for call, same in zip(parsed.tool_calls, expected, strict=False)]
            parsed_names = [call.name for call in parsed.tool_calls]
            is_text_only = not tools and not names  # then text that looks like a call stays text
            if is_text_only or parsed_names == names:
                _refuse_invalid_calls(calls)
                if not (is_text_only and parsed.tool_calls):
                    message = assistant_message(parsed.content or "", calls, parsed.reasoning_content or "")
                raw = self._parser.raw_text(prompt_ids, encoded.ids)
                return Reply(message, self._build_turn(encoded, prompt, finished), calls, raw)
        raise UntrainableReply(
            f"the teacher called {names}, but in the policy's chat format the reply calls {parsed_names}: its server "
            "must separate tool calls from text (vLLM: --enable-auto-tool-choice, --tool-call-parser)"
        )

    def _encode(self, message: Message, tools: Tools, finished: bool) -> EncodedReply:
        try:
            encoded = ReplyEncoder(self._renderer, self._tokenizer, tools).encode(message, finished)
        except Exception as error:  # templates raise any type for messages they cannot render
            raise UntrainableReply(f"the policy's chat format cannot render the reply: {error}") from error
        if not encoded.ids:
            raise UntrainableReply("the teacher was truncated before any text: raise sampling.max_tokens")
        early_stop = next((token for token in encoded.ids[:-1] if token in self._parser.stop_token_ids), None)
        if early_stop is not None:
            raise UntrainableReply(f"{self._tokenizer.decode(early_stop)} ends the policy's reply before its end")
        return encoded

    def _build_turn(self, encoded: EncodedReply, prompt: Prompt, finished: bool) -> Turn:
        """Build the turn; tokens beyond `seq_len` are cut off, as from a sampled reply."""
        prompt_length = len(prompt.ids) - encoded.dropped
        ids = np.array(encoded.ids[: self._seq_len - prompt_length], np.int32)
        return Turn(
            prompt.array[:prompt_length],
            ids,
            np.zeros(len(ids), np.float32),
            np.full(len(ids), NOT_SAMPLED, np.int32),
            1.0,  # the teacher's temperature does not apply to the policy
            "stop" if finished and len(ids) == len(encoded.ids) else "length",
            prompt_roles=None if prompt.roles is None else prompt.roles[:prompt_length],
        )


def _refuse_invalid_calls(calls: Sequence[ToolCall]) -> None:
    """Raise `UntrainableReply` for a call that cannot be run, of the teacher or as the policy's format parses it."""
    for call in calls:
        if call.error:
            raise UntrainableReply(f"the call of {call.name or 'a tool'} cannot be run: {call.error}")
