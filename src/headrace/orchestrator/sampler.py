"""An environment's line to the model: a conversation to tokens, one request to the engine, tokens to a reply."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from renderers.base import ParsedResponse, ParsedToolCall, Renderer, ToolCallParseStatus

from headrace.environments.base import EpisodeError, PromptTooLong, Reply, ToolCall
from headrace.inference.client import Completion, EngineClient
from headrace.inference.schema import SamplingParams
from headrace.rollout.types import ROLES, Message, Turn
from headrace.text.prompt import Prompt, Prompts, text_length
from headrace.text.tokenizer import Tokenizer

Tools = Sequence[dict[str, Any]]
T = TypeVar("T")

UNUSABLE = {
    ToolCallParseStatus.INVALID_JSON: "the tool call is not valid JSON",
    ToolCallParseStatus.UNCLOSED_BLOCK: "the tool call is not closed",
    ToolCallParseStatus.MISSING_NAME: "the tool call names no tool",
    ToolCallParseStatus.MALFORMED_STRUCTURE: "the tool call is malformed",
}
"""What a model is told about a call that cannot be read. A name that is not known is the tools' affair."""
MOST_CALLS = 16
TOO_MANY = f"a reply can call at most {MOST_CALLS} tools: what is beyond that was not run"
WRITE_AT_ONCE = 20_000
READ_AT_ONCE = 4096
"""Characters of a conversation, and tokens of a reply, that take too little time to be worth a thread."""
THOUGHT = ("<think>", "<think>\n")
"""How a prompt ends that has already opened the model's thoughts."""
Name = hashlib.blake2b
"""What tells a conversation from others, as far as it has come."""
encode = msgspec.json.Encoder(order="deterministic").encode


class Sampler:
    """One per environment: the engines, the renderer, and how to sample.

    `cache_salt` separates what the engines' prefix caches may share: a live policy's changes with its weights, that of
    a frozen model never does. `observe` sees each prompt and what came of it, with the temperature; it must not wait.
    With a `seed` every request has one of its own, made of this one, its episode's name and what is asked.
    """

    def __init__(
        self,
        client: EngineClient,
        renderer: Renderer,
        tokenizer: Tokenizer,
        seq_len: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        max_tokens: int | None = None,
        cache_salt: Callable[[], str | None] = lambda: None,
        observe: Callable[[list[int], Completion, float], None] | None = None,
        seed: int | None = None,
    ) -> None:
        self.prompts = Prompts(renderer)
        self._client = client
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._seq_len = seq_len
        self._temperature = temperature
        self._top_p = top_p
        self._top_k = top_k
        self._max_tokens = max_tokens
        self._cache_salt = cache_salt
        self._observe = observe
        self._seed = seed
        self._stop_token_ids = list(renderer.get_stop_token_ids())
        self._rendering = asyncio.Lock()

    def open(self, session: str, episode: str) -> Conversation:
        self._client.join(session)
        return Conversation(self, session, episode)

    def close(self, session: str) -> None:
        self._client.leave(session)

    async def prompt(self, messages: list[Message], tools: list[dict[str, Any]], past: Past | None) -> Prompt:
        """The prompt that goes on from the past exactly, where that can be; long ones do not hold up the loop."""
        length = text_length(messages)
        if length > WRITE_AT_ONCE:
            self._check_room(self.prompts.least_tokens(messages, self._tokenizer), "at least ")
        if past is not None:
            new = text_length(past.since) + len(past.turn.prompt_ids) + len(past.turn.completion_ids)
            prompt = await _aside(new > WRITE_AT_ONCE, self.prompts.go_on, past.turn, past.since, tools)
            if prompt is not None:
                return prompt
        if length <= WRITE_AT_ONCE:
            return self.prompts.render(messages, tools)
        async with self._rendering:  # the next to ask the same finds it made
            return await asyncio.to_thread(self.prompts.render, messages, tools)

    async def sample(
        self, prompt: Prompt, tools: Tools, max_tokens: int | None, session: str, name: str, first_call: int
    ) -> Reply:
        """`name` tells this turn from all others of the run; tool calls are numbered from `first_call`."""
        self._check_room(len(prompt.ids))
        if tools and not getattr(self._renderer, "supports_tools", True):
            raise EpisodeError(
                "no_tool_parser",
                "the model's own chat template does not say how tool calls are read: set renderer.tool_parser, or a "
                "renderer.name that knows the model",
            )
        completion = await self._client.generate(
            prompt.ids,
            SamplingParams(
                temperature=self._temperature,
                top_p=self._top_p,
                top_k=self._top_k,
                max_tokens=min(
                    limit
                    for limit in (self._seq_len - len(prompt.ids), self._max_tokens, max_tokens)
                    if limit is not None
                ),
                stop_token_ids=self._stop_token_ids,
                seed=None if self._seed is None else seed_of(f"{self._seed}-{name}"),
            ),
            cache_salt=self._cache_salt(),
            session=session,
        )
        if self._observe is not None:
            self._observe(prompt.ids, completion, self._temperature)
        return await _aside(
            len(completion.token_ids) > READ_AT_ONCE, self._reply, prompt, completion, tools, first_call
        )

    def _check_room(self, tokens: int, least: str = "") -> None:
        if tokens >= self._seq_len:
            raise PromptTooLong(f"the conversation has {least}{tokens} tokens and seq_len is {self._seq_len}")

    def _reply(self, prompt: Prompt, completion: Completion, tools: Tools, first_call: int) -> Reply:
        ids = completion.token_ids
        raw = self._raw(prompt.ids, ids)
        parsed = self._read(prompt.ids, ids, tools, raw)
        calls = [_tool_call(call, f"call_{first_call + n}") for n, call in enumerate(parsed.tool_calls[:MOST_CALLS])]
        if len(parsed.tool_calls) > MOST_CALLS:
            calls.append(ToolCall(f"call_{first_call + MOST_CALLS}", "", {}, TOO_MANY))
        if tools or not calls:
            message = _message(parsed, calls)
        else:
            message = _told(parsed, self._from_first_call(parsed, ids, raw))
        return Reply(message, self._turn(prompt, completion), calls, raw)

    def _from_first_call(self, parsed: ParsedResponse, completion_ids: list[int], raw: str) -> str:
        """What was written from there on; all of it where the renderer does not say where that is."""
        starts = [call.token_span[0] for call in parsed.tool_calls if call.token_span is not None]
        return self._decode(completion_ids, min(starts)) if len(starts) == len(parsed.tool_calls) else raw

    def _read(self, prompt_ids: list[int], completion_ids: list[int], tools: Tools, raw: str) -> ParsedResponse:
        specification: Any = list(tools) or None
        try:
            return self._renderer.parse_response(completion_ids, tools=specification, prompt_ids=prompt_ids)
        except (ValueError, RecursionError):  # a policy writes JSON of any depth, and numbers of any length
            return ParsedResponse("", tool_calls=[ParsedToolCall(raw, status=ToolCallParseStatus.INVALID_JSON)])

    def _turn(self, prompt: Prompt, completion: Completion) -> Turn:
        truncated = completion.truncated_logprobs
        return Turn(
            prompt.array,
            np.array(completion.token_ids, np.int32),
            np.array(completion.logprobs, np.float32),
            completion.steps,
            self._temperature,
            completion.finish_reason,
            None if truncated is None else np.array(truncated, np.float32),
            prompt.roles,
        )

    def _raw(self, prompt_ids: list[int], completion_ids: list[int]) -> str:
        """What was written, without the token that ended it; thoughts that the prompt opened begin where it did."""
        text = self._decode(completion_ids)
        return "<think>" + text if self._tokenizer.decode(prompt_ids[-8:]).endswith(THOUGHT) else text

    def _decode(self, completion_ids: list[int], start: int = 0) -> str:
        ended = bool(completion_ids) and completion_ids[-1] in self._stop_token_ids
        return self._tokenizer.decode(completion_ids[start : len(completion_ids) - ended])


class Past(NamedTuple):
    """The turn that a conversation goes on from, and the messages since."""

    turn: Turn
    since: list[Message]


class _Sampled(NamedTuple):
    """A reply that was sampled, and the turn behind it."""

    reply: Message
    turn: Turn


class Conversation:
    """A sampler on behalf of one episode: it remembers the turns, so that a conversation goes on from exact tokens."""

    def __init__(self, sampler: Sampler, session: str, episode: str) -> None:
        self._sampler = sampler
        self._session = session
        self._episode = episode
        self._asked: Counter[bytes] = Counter()
        self._sampled: dict[bytes, list[_Sampled]] = {}
        """By the conversation as far as its last reply, as it was then: an environment may change its messages."""

    async def chat(self, messages: Sequence[Message], tools: Tools = (), max_tokens: int | None = None) -> Reply:
        """Several may be under way at once: what is asked, not when, tells one from another."""
        messages, tools = list(messages), list(tools)
        _check(messages)
        names = _names(messages, tools)
        question = names[-1].digest()
        self._asked[question] += 1
        name = f"{self._episode}-{question.hex()}-{self._asked[question]}"
        prompt = await self._sampler.prompt(messages, tools, self._past(messages, names))
        reply = await self._sampler.sample(prompt, tools, max_tokens, self._session, name, _calls_in(messages))
        names[-1].update(encode(reply.message))
        self._sampled.setdefault(names[-1].digest(), []).append(_Sampled(reply.message, reply.turn))
        return reply

    def _past(self, messages: list[Message], names: list[Name]) -> Past | None:
        """What came of the last reply, if this line sampled it in this very conversation."""
        for end in range(len(messages) - 1, 0, -1):
            reply = messages[end - 1]
            if reply.get("role") != "assistant":
                continue
            known = self._sampled.get(names[end].digest())
            if known:  # the same words may have been sampled twice, in different tokens
                sampled = next((sampled for sampled in known if sampled.reply is reply), known[-1])
                return Past(sampled.turn, messages[end:])
        return None


async def _aside(long: bool, function: Callable[..., T], *args: Any) -> T:
    """What the function returns; from a thread where it may take long, so that the loop goes on."""
    return await asyncio.to_thread(function, *args) if long else function(*args)


def _check(messages: list[Any]) -> None:
    """Raise for what a renderer would leave out, or stumble over."""
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            complaint = f"is a {type(message).__name__}, not a dict with a role and content"
        elif message.get("role") not in ROLES[1:]:
            complaint = f"has the role {message.get('role')!r:.60}, which is none of {', '.join(ROLES[1:])}"
        elif not isinstance(message.get("content"), str | list | None):
            complaint = f"has a {type(message['content']).__name__} as its content, not a text or a list of parts"
        else:
            continue
        raise EpisodeError("invalid_message", f"messages[{index}] {complaint}")


def _names(messages: list[Message], tools: list[dict[str, Any]]) -> list[Name]:
    """The content of a conversation after none of its messages, after the first, and so on to the last."""
    names = [hashlib.blake2b(encode(tools), digest_size=16)]
    for message in messages:
        names.append(names[-1].copy())
        names[-1].update(encode(message))
    return names


def _calls_in(messages: list[Message]) -> int:
    """Tool calls so far; those that could not be read are in no message, but have been answered."""
    called = sum(len(message.get("tool_calls") or ()) for message in messages)
    return max(called, len([message for message in messages if message.get("role") == "tool"]))


def _tool_call(call: ParsedToolCall, identity: str) -> ToolCall:
    name = call.name if isinstance(call.name, str) and _is_portable(call.name) else ""
    arguments: Any = call.arguments
    error = UNUSABLE.get(call.status, "")
    if not error and not name:
        error = UNUSABLE[ToolCallParseStatus.MISSING_NAME]
    elif not error and not isinstance(arguments, dict):
        error = "the arguments of a tool call must be a JSON object"
    elif not error and not _is_portable(arguments):
        error = "the tool call has a number or a character that cannot be passed on"
    return ToolCall(call.id or identity, name, {} if error else arguments, error)


def _is_portable(value: Any) -> bool:
    """Whether it can go to another process: Python reads integers of any size from JSON, and halves of characters."""
    try:
        msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeEncodeError, RecursionError):
        return False
    return True


def _message(parsed: ParsedResponse, calls: list[ToolCall]) -> Message:
    """The reply as a message. A call that cannot be read, or be run, stays in its text, as the model wrote it."""
    unread = [attempt.raw for attempt, call in zip(parsed.tool_calls, calls, strict=False) if call.error]
    message = _told(parsed, *unread, *(attempt.raw for attempt in parsed.tool_calls[len(calls) :]))
    usable = [call for call in calls if not call.error]
    if usable:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in usable
        ]
    return message


def _told(parsed: ParsedResponse, *more: str) -> Message:
    """The reply as a message without calls: its text, and more of what the model wrote below that."""
    message: Message = {
        "role": "assistant",
        "content": "\n".join([parsed.content or "", *more]).strip("\n") if more else parsed.content or "",
    }
    if parsed.reasoning_content:
        message["reasoning_content"] = parsed.reasoning_content
    return message


def seed_of(name: str) -> int:
    """A seed that engines take, 63 bits of a hash."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 1
