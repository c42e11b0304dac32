"""Completion tokens as replies: text, reasoning and tool calls."""

from __future__ import annotations

from typing import Any, NamedTuple

from renderers.base import ParsedResponse, ParsedToolCall, Renderer, ToolCallParseStatus

from headrace.rollout.types import Message
from headrace.text.messages import INVALID_JSON, NO_NAME, ToolCall, assistant_message, build_tool_call
from headrace.text.prompt import Tools
from headrace.text.tokenizer import Tokenizer

MAX_TOOL_CALLS = 16
TOO_MANY_CALLS = f"a reply can call at most {MAX_TOOL_CALLS} tools: what is beyond that was not run"
CALL_ERRORS = {
    ToolCallParseStatus.INVALID_JSON: INVALID_JSON,
    ToolCallParseStatus.UNCLOSED_BLOCK: "the tool call is not closed",
    ToolCallParseStatus.MISSING_NAME: NO_NAME,
    ToolCallParseStatus.MALFORMED_STRUCTURE: "the tool call is malformed",
}
"""Errors by parse status; an unknown tool name is left to the environment, which has the tools."""
THINK_PREFIXES = ("<think>", "<think>\n")
"""Ends of a prompt that already opens the model's reasoning."""


class ParsedCompletion(NamedTuple):
    """The fields of a `Reply` that follow from the completion's tokens."""

    message: Message
    tool_calls: list[ToolCall]
    raw: str


class CompletionParser:
    """Parses completions in a model's chat format."""

    def __init__(self, renderer: Renderer, tokenizer: Tokenizer) -> None:
        self.stop_token_ids = list(renderer.get_stop_token_ids())
        self._renderer, self._tokenizer = renderer, tokenizer

    def parse(self, prompt_ids: list[int], ids: list[int], tools: Tools, first_call: int = 0) -> ParsedCompletion:
        """Return the message, tool calls and raw text of a sampled completion.

        Calls that cannot be run stay in the message as text; so do all calls where no tools were offered. Calls without
        an id are numbered from `first_call`.
        """
        raw = self.raw_text(prompt_ids, ids)
        try:
            parsed = self.parse_strictly(prompt_ids, ids, tools)
        except (ValueError, RecursionError):  # a policy writes JSON of any depth, and numbers of any length
            parsed = ParsedResponse("", tool_calls=[ParsedToolCall(raw, status=ToolCallParseStatus.INVALID_JSON)])
        attempts = parsed.tool_calls
        calls = [
            parsed_tool_call(call, call.id or f"call_{first_call + number}")
            for number, call in enumerate(attempts[:MAX_TOOL_CALLS])
        ]
        if len(attempts) > MAX_TOOL_CALLS:
            calls.append(ToolCall(f"call_{first_call + MAX_TOOL_CALLS}", "", {}, TOO_MANY_CALLS))
        if tools or not calls:
            invalid = [attempt.raw for attempt, call in zip(attempts, calls, strict=False) if call.error]
            texts = [*invalid, *(attempt.raw for attempt in attempts[len(calls) :])]
        else:
            starts = [attempt.token_span[0] for attempt in attempts if attempt.token_span is not None]
            texts = [self.text(ids, min(starts)) if len(starts) == len(attempts) else raw]
        content = parsed.content or ""
        if texts:
            content = "\n".join([content, *texts]).strip("\n")
        message = assistant_message(content, calls if tools else (), parsed.reasoning_content or "")
        return ParsedCompletion(message, calls, raw)

    def parse_strictly(self, prompt_ids: list[int], ids: list[int], tools: Tools) -> ParsedResponse:
        """Parse a completion; raise ValueError or RecursionError for JSON that Python cannot read."""
        schemas: Any = list(tools) or None
        return self._renderer.parse_response(ids, tools=schemas, prompt_ids=prompt_ids)

    def raw_text(self, prompt_ids: list[int], ids: list[int]) -> str:
        """Return the completion's text without its stop token, with `<think>` first where the prompt ends in it."""
        text = self.text(ids)
        return "<think>" + text if self._tokenizer.decode(prompt_ids[-8:]).endswith(THINK_PREFIXES) else text

    def text(self, ids: list[int], start: int = 0) -> str:
        """Return the text from token `start` on, without the stop token."""
        is_stopped = bool(ids) and ids[-1] in self.stop_token_ids
        return self._tokenizer.decode(ids[start : len(ids) - is_stopped])


def parsed_tool_call(parsed: ParsedToolCall, call_id: str) -> ToolCall:
    """Return a tool call from one that a renderer parsed, with `error` set if it cannot be run."""
    return build_tool_call(call_id, parsed.name, parsed.arguments, CALL_ERRORS.get(parsed.status, ""))
