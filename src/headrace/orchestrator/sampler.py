"""An environment's line to the policy: one request to the engine, and its tokens as a reply."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from renderers.base import ParsedResponse, ParsedToolCall, Renderer, ToolCallParseStatus

from headrace.environments.base import Reply, ToolCall
from headrace.inference.client.completion import Completion
from headrace.inference.client.engine_client import EngineClient
from headrace.inference.schema import SamplingParams
from headrace.orchestrator.conversation import Conversation, Question
from headrace.orchestrator.prompting import Prompter, Tools, aside, call_of
from headrace.rollout.types import Message, Turn
from headrace.text.prompt import Prompt
from headrace.text.replies import assistant_message
from headrace.text.tokenizer import Tokenizer

MOST_CALLS = 16
TOO_MANY = f"a reply can call at most {MOST_CALLS} tools: what is beyond that was not run"
READ_AT_ONCE = 4096
"""Tokens of a reply that take too little time to be worth a thread."""


class Sampler:
    """One per environment: the engines, the renderer, and how to sample.

    `cache_salt` separates what the engines' prefix caches may share: a live policy's changes with its weights. It is
    asked for at every request, so that a turn after an update shares nothing with those before it, although its
    conversation is the same and stays with its engine. While an update is on its way the salt may be the older one:
    engines therefore tell the weights of what they cache apart themselves, whatever the salt.

    `observe` sees each prompt and what came of it, with the temperature; it must not wait. With a `seed` every request
    has one of its own, made of this one, its episode's name and what is asked. Long prompts are rendered in threads,
    `pool_size` of them at once.
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
        min_p: float = 0.0,
        max_tokens: int | None = None,
        cache_salt: Callable[[], str | None] = lambda: None,
        observe: Callable[[list[int], Completion, float], None] | None = None,
        seed: int | None = None,
        pool_size: int = 1,
    ) -> None:
        self.prompter = Prompter(renderer, tokenizer, seq_len, pool_size)
        self._client = client
        self._temperature = temperature
        self._top_p = top_p
        self._top_k = top_k
        self._min_p = min_p
        self._max_tokens = max_tokens
        self._cache_salt = cache_salt
        self._observe = observe
        self._seed = seed

    def open(self, session: str, episode: str) -> Conversation:
        self._client.join(session)
        return Conversation(self, session, episode)

    def close(self, session: str) -> None:
        self._client.leave(session)

    async def reply(self, question: Question) -> Reply:
        """What an engine samples."""
        completion = await self._client.generate(
            question.prompt.ids,
            SamplingParams(
                temperature=self._temperature,
                top_p=self._top_p,
                top_k=self._top_k,
                min_p=self._min_p,
                max_tokens=question.at_most(self._max_tokens),
                stop_token_ids=self.prompter.stop_token_ids,
                seed=question.seed(self._seed),
            ),
            cache_salt=self._cache_salt(),
            session=question.session,
        )
        if self._observe is not None:
            self._observe(question.prompt.ids, completion, self._temperature)
        return await aside(len(completion.token_ids) > READ_AT_ONCE, self._reply, question, completion)

    def _reply(self, question: Question, completion: Completion) -> Reply:
        ids, prompt = completion.token_ids, question.prompt
        raw = self.prompter.raw(prompt.ids, ids)
        parsed = self._read(prompt.ids, ids, question.tools, raw)
        calls = [
            call_of(call, call.id or f"call_{question.first_call + number}")
            for number, call in enumerate(parsed.tool_calls[:MOST_CALLS])
        ]
        if len(parsed.tool_calls) > MOST_CALLS:
            calls.append(ToolCall(f"call_{question.first_call + MOST_CALLS}", "", {}, TOO_MANY))
        if question.tools or not calls:
            message = _message(parsed, calls, *_unread(parsed, calls))
        else:
            message = _message(parsed, (), self._from_first_call(parsed, ids, raw))
        return Reply(message, self._turn(prompt, completion), calls, raw)

    def _from_first_call(self, parsed: ParsedResponse, completion_ids: list[int], raw: str) -> str:
        """What was written from there on; all of it where the renderer does not say where that is."""
        starts = [call.token_span[0] for call in parsed.tool_calls if call.token_span is not None]
        return self.prompter.text(completion_ids, min(starts)) if len(starts) == len(parsed.tool_calls) else raw

    def _read(self, prompt_ids: list[int], completion_ids: list[int], tools: Tools, raw: str) -> ParsedResponse:
        try:
            return self.prompter.read(prompt_ids, completion_ids, tools)
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


def _unread(parsed: ParsedResponse, calls: list[ToolCall]) -> list[str]:
    """Calls that cannot be read, or be run, as the model wrote them."""
    unread = [attempt.raw for attempt, call in zip(parsed.tool_calls, calls, strict=False) if call.error]
    return [*unread, *(attempt.raw for attempt in parsed.tool_calls[len(calls) :])]


def _message(parsed: ParsedResponse, calls: Sequence[ToolCall], *more: str) -> Message:
    """The reply as a message: its text, more of what the model wrote below that, and the calls that can be run."""
    content = parsed.content or ""
    told = "\n".join([content, *more]).strip("\n") if more else content
    return assistant_message(told, calls, parsed.reasoning_content or "")
