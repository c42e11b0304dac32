"""A teacher's reply rewritten as the policy's own completion, for training on it.

The reply is encoded in the policy's chat format and parsed back: the environment sees exactly what the policy is
trained to write. Such tokens have no version, so that they never become stale, and no logprobs: no policy sampled them.
Replies that the policy must not learn are refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from renderers.base import Renderer

from headrace.rollout.types import NOT_SAMPLED, Message, Turn
from headrace.text.completion import CompletionParser, parsed_tool_call
from headrace.text.prompt import Prompt, Tools
from headrace.text.replies import Reply, ToolCall, assistant_message
from headrace.text.reply_encoder import EncodedReply, encode_reply, with_placeholder_words
from headrace.text.tokenizer import Tokenizer

CALL_ID_FORMATS: tuple[Callable[[int, str], str], ...] = (
    lambda number, name: f"call_{number}",
    lambda number, name: f"functions.{name}:{number}",
)
"""Ids of tool calls: as elsewhere in a run, or as in Kimi's format, which has the tool's name nowhere else.

The ids of the teacher's server are not used: they differ from run to run.
"""


class UntrainableReply(ValueError):
    """A teacher's reply that the policy cannot or must not be trained on."""


class TeacherReplyRewriter:
    """Rewrites replies within `seq_len` tokens, prompt included."""

    def __init__(self, renderer: Renderer, tokenizer: Tokenizer, seq_len: int) -> None:
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._parser = CompletionParser(renderer, tokenizer)
        self._control_tokens = tokenizer.control_tokens
        self._seq_len = seq_len

    def rewrite(self, reply: Reply, prompt: Prompt, tools: Tools, first_call: int) -> Reply:
        """Return the reply with the policy's tokens; tool calls are numbered from `first_call`."""
        _check_calls(reply.tool_calls)
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
                _check_calls(calls)
                if not (is_text_only and parsed.tool_calls):
                    message = assistant_message(parsed.content or "", calls, parsed.reasoning_content or "")
                raw = self._parser.raw_text(prompt_ids, encoded.ids)
                return Reply(message, self._turn(encoded, prompt, finished), calls, raw)
        raise UntrainableReply(
            f"the teacher called {names}, but in the policy's chat format the reply calls {parsed_names}: its server "
            "must separate tool calls from text (vLLM: --enable-auto-tool-choice, --tool-call-parser)"
        )

    def _encode(self, message: Message, tools: Tools, finished: bool) -> EncodedReply:
        try:
            encoded, placeholders = (
                encode_reply(self._renderer, self._tokenizer, each, tools, finished=finished)
                for each in (message, with_placeholder_words(message))
            )
        except Exception as error:  # templates raise any type for messages they cannot render
            raise UntrainableReply(f"the policy's chat format cannot render the reply: {error}") from error
        if not encoded.ids:
            raise UntrainableReply("the teacher was truncated before any text: raise sampling.max_tokens")
        self._check_control_tokens(encoded.ids, placeholders.ids, finished)
        return encoded

    def _check_control_tokens(self, ids: list[int], placeholder_ids: list[int], finished: bool) -> None:
        """Refuse a stop token before the end, and control tokens that come from the words rather than the format."""
        body = ids[:-1] if finished else ids
        early_stops = [token for token in body if token in self._parser.stop_token_ids]
        is_control = self._control_tokens.__contains__
        forged = Counter(filter(is_control, ids)) - Counter(filter(is_control, placeholder_ids))
        if early_stops or forged:
            token = self._tokenizer.decode([*early_stops, *forged][:1])
            raise UntrainableReply(f"the reply contains {token}, a control token of the policy's chat format")

    def _turn(self, encoded: EncodedReply, prompt: Prompt, finished: bool) -> Turn:
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


def _check_calls(calls: Sequence[ToolCall]) -> None:
    """Refuse a call that cannot be run, as the teacher made it or as the policy's chat format parses it."""
    for call in calls:
        if call.error:
            raise UntrainableReply(f"the call of {call.name or 'a tool'} cannot be run: {call.error}")
