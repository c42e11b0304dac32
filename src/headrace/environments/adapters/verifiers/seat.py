"""One agent's run of a task: model calls with the hooks of the task around them, and tools.

Where verifiers has an HTTP server between an agent's program and the model, a call here is a function call: limits and
stops are checked before it, interceptors may rewrite request and response, and the trace records it. The trace has the
texts; the tokens are in our own turns, one for each sampled message, whatever becomes of the conversation afterwards:
branches that share a message do not train it twice.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from headrace.environments.adapters import import_verifiers as verifiers
from headrace.environments.adapters.verifiers.toolsets import Tools
from headrace.environments.base import Context, PromptTooLong, Reply, ToolCall
from headrace.environments.tools import is_plain
from headrace.rollout.types import Message, Turn
from headrace.safe_text import encodable

CONTEXT_FULL = "context_full"
"""The stop condition of a run whose conversation has reached `seq_len`."""


class SampledMessage(NamedTuple):
    """A message of the model, and its attempts to call tools."""

    message: Any
    calls: Sequence[ToolCall]


class Seats:
    """The seats of one episode; its code finds them in `EPISODE`."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.by_trace: dict[str, Seat] = {}
        self.failure: Exception | None = None
        """The first failure of a model call: verifiers keeps only the text of exceptions."""
        self.sampled: dict[str, Message] = {}
        """Messages of all agents as they were sampled, by their verifiers hash."""


EPISODE: ContextVar[Seats] = ContextVar("the seats of the current episode")


class Interception:
    """What verifiers calls an interception: it provides the access to the model at the start of every run."""

    @asynccontextmanager
    async def acquire(self, session: Any) -> AsyncIterator[tuple[str, str, str]]:
        episode = EPISODE.get()
        async with AsyncExitStack() as stack:
            episode.by_trace[session.trace.id] = Seat(episode, session, stack)
            yield "here:", "", ""


class Seat:
    """One agent of an episode. `session` has the trace, limits and hooks of the task; `stack` ends with the run."""

    def __init__(self, episode: Seats, session: Any, stack: AsyncExitStack) -> None:
        self.turns: list[Turn] = []
        self.tools: Tools | None = None
        self.tool_calls = self.tool_errors = 0
        self._episode = episode
        self._session = session
        self._trace = session.trace
        self._stack = stack
        self._sampled: dict[str, Message] = {}
        """The same for this agent: two agents may write the same text in different tokens."""

    async def open_tools(self, addresses: Mapping[str, str]) -> None:
        if addresses:
            self.tools = await Tools.open(addresses, self._trace, self._stack)

    async def sample(self, messages: Sequence[Any]) -> SampledMessage | None:
        """Return the model's next message; None once the run is over."""
        pending = await self._request(messages)
        if pending is None:
            return None
        if self._session.on_turn_input is not None:
            callback, self._session.on_turn_input = self._session.on_turn_input, None
            callback()
        started = time.time()
        try:
            wire = [self.wire(message) for message in pending.prompt]
            schemas = self.tools.schemas if self.tools is not None else ()
            reply = await self._episode.context.chat(wire, schemas, self._session.ctx.sampling.max_tokens)
        except Exception as error:
            self._record(started, error=error)
            if isinstance(error, PromptTooLong) and self._trace.num_turns:
                self._trace.stop(CONTEXT_FULL)
                return None
            self._episode.failure = self._episode.failure or error
            raise verifiers().ProviderError(f"{type(error).__name__}: {error}") from error
        return await self._answer(pending, reply, started)

    async def run(self, call: ToolCall, gated: bool) -> Any | None:
        """Run a tool call and return its result as a message; None if that ended the run."""
        if gated and not call.error:
            verdict = await self._session.decide_tool(call.id, call.name, call.arguments)
            if verdict["action"] == "stop":
                return None
            if verdict["action"] == "deny":
                return _tool_message(**verdict["message"])
        if call.error:
            content, succeeded = f"error: {call.error}", False
        elif self.tools is None:
            content, succeeded = "error: there are no tools", False
        else:
            content, succeeded = await self.tools.call(call.name, call.arguments)
        self.tool_calls += 1
        self.tool_errors += not succeeded
        name = call.name if is_plain(call.name) else None
        return _tool_message(tool_call_id=call.id, content=content, name=name)

    def wire(self, message: Any) -> Message:
        """Return a message in our format; a sampled one exactly as it was sampled, so that it keeps its tokens."""
        if message.role != "assistant":
            written: Message = verifiers("dialects.chat").message_to_wire(message)
            return written
        name = verifiers("graph").message_hash(message)
        return self._sampled.get(name) or self._episode.sampled.get(name) or _with_parsed_arguments(message)

    async def _request(self, messages: Sequence[Any]) -> Any | None:
        """Return the prepared turn in the graph of messages; None if a limit or a stop of the task refuses it."""
        vf, session = verifiers(), self._session
        async with verifiers("errors").boundary(vf.TaskError, "a hook before the model's turn"):
            if session.stopped or await session.refused() is not None:
                return None
            declared = self.tools.declared if self.tools is not None else None
            original = vf.Request(messages=list(messages), tools=declared)
            request, rewrites, stopped = await session.rewrite_request(original)
        self._trace.request_rewrites.extend(rewrites)
        pending = verifiers("graph").prepare_turn(self._trace, request.messages, request.tools)
        if stopped is None:
            return pending
        pending.commit_prompt()
        self._trace.stop(stopped)
        return None

    async def _answer(self, pending: Any, reply: Reply, started: float) -> SampledMessage | None:
        """Apply the hooks of the task to a reply and record it in the trace; None if that ended the run."""
        session, trace = self._session, self._trace
        response, rewrites, stopped = _response(reply, session.ctx.model), [], None
        if session.response_interceptors or session.response_stops:
            response, rewrites, stopped = await session.rewrite_response(response)
        if session.stopped:
            return None
        node = pending.commit(response)
        if not rewrites:  # a rewritten text was not sampled
            name = verifiers("graph").message_hash(response.message)
            self._sampled[name] = self._episode.sampled[name] = reply.message
            self.turns.append(reply.turn)
        session.consume_prepared(pending.tail)
        trace.response_rewrites.extend(rewrites)
        self._record(started, node, response)
        if stopped is None:
            stopped = await session.gate_tool_calls(node)
        if stopped is not None:
            trace.stop(stopped)
            return None
        return SampledMessage(response.message, () if rewrites else reply.tool_calls)

    def _record(
        self, started: float, node: int | None = None, response: Any = None, error: Exception | None = None
    ) -> None:
        records = verifiers("trace")
        self._trace.calls.append(
            records.ModelCall(
                node=node,
                model=self._session.ctx.model,
                finish_reason=None if response is None else response.finish_reason,
                usage=None if response is None else response.usage,
                time=records.TimeSpan(start=started, end=time.time()),
                error=None if error is None else records.Error(type=type(error).__name__, message=str(error)),
            )
        )
        self._trace.notify()


def _response(reply: Reply, model: str) -> Any:
    vf = verifiers()
    message = reply.message
    calls = [
        vf.ToolCall(id=call["id"], name=call["function"]["name"], arguments=json.dumps(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    finish = "length" if reply.truncated else "tool_calls" if calls else "stop"
    return vf.Response(
        id="",
        created=0,
        model=model,
        message=vf.AssistantMessage(  # valid Unicode: verifiers hashes messages
            content=encodable(str(message.get("content") or "")) or None,
            reasoning_content=encodable(str(message.get("reasoning_content") or "")) or None,
            tool_calls=calls or None,
        ),
        finish_reason=finish,
        usage=vf.Usage(prompt_tokens=len(reply.turn.prompt_ids), completion_tokens=len(reply.turn.completion_ids)),
    )


def _with_parsed_arguments(message: Any) -> Message:
    """Return an assistant message of a prompt, with the arguments of its calls parsed, as our renderers expect."""
    written: Message = verifiers("dialects.chat").message_to_wire(message)
    for call in written.get("tool_calls", ()):
        function = call.get("function", {})
        try:
            arguments = json.loads(function.get("arguments", ""))
        except ValueError:
            continue
        if isinstance(arguments, dict):
            function["arguments"] = arguments
    written["content"] = written["content"] or ""
    return written


def _tool_message(**fields: Any) -> Any:
    """Return a tool message within the length limits of verifiers."""
    bounded = verifiers("harnesses.utils.compaction").bound_tool_message(fields)
    return verifiers().ToolMessage.model_validate(bounded)
