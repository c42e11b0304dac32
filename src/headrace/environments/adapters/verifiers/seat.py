"""One agent's run of a task: its way to the model, with the hooks of its task around every call, and its tools.

Where verifiers has an HTTP server between an agent's program and the model, a call here is a function call: limits and
stops are asked before it, interceptors may rewrite what goes in and what comes out, and the trace records it. The words
go to the trace; the tokens stay in our own turns, one for each message that was sampled, whatever becomes of the
conversation afterwards: branches that share a message do not train it twice.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from headrace.environments.adapters.verifiers.library import verifiers
from headrace.environments.adapters.verifiers.toolsets import Tools
from headrace.environments.base import Context, PromptTooLong, Reply, ToolCall
from headrace.environments.tools import is_plain
from headrace.rollout.types import Message, Turn

CONTEXT_FULL = "context_full"
"""The stop condition of a run that has no room left within `seq_len`."""


class Said(NamedTuple):
    """A message of the model, and its attempts to call tools."""

    message: Any
    calls: Sequence[ToolCall]


class Seats:
    """Those of one episode. Whatever runs in it finds them in `EPISODE`."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.by_trace: dict[str, Seat] = {}
        self.failure: Exception | None = None
        """Why the model gave no answer, if it ever did not: verifiers keeps the words of exceptions alone."""
        self.sampled: dict[str, Message] = {}
        """Messages of all agents as they were sampled, by the hash that verifiers has of them."""


EPISODE: ContextVar[Seats] = ContextVar("the seats of the episode that runs")


class Doorway:
    """What verifiers calls an interception: it is asked for a way to the model at the start of every run."""

    @asynccontextmanager
    async def acquire(self, session: Any) -> AsyncIterator[tuple[str, str, str]]:
        episode = EPISODE.get()
        async with AsyncExitStack() as stack:
            episode.by_trace[session.trace.id] = Seat(episode, session, stack)
            yield "here:", "", ""


class Seat:
    """`session` is verifiers' own: the trace, the limits, and the hooks of the task. `stack` ends with the run."""

    def __init__(self, episode: Seats, session: Any, stack: AsyncExitStack) -> None:
        self.turns: list[Turn] = []
        self.tools: Tools | None = None
        self.tool_calls = self.tool_errors = 0
        self._episode = episode
        self._session = session
        self._trace = session.trace
        self._stack = stack
        self._sampled: dict[str, Message] = {}
        """As the episode's, for this agent: two may say the same in different tokens."""

    async def open_tools(self, addresses: Mapping[str, str]) -> None:
        if addresses:
            self.tools = await Tools.open(addresses, self._trace, self._stack)

    async def ask(self, messages: Sequence[Any]) -> Said | None:
        """The model's next message; None once the run is over."""
        pending = await self._request(messages)
        if pending is None:
            return None
        if self._session.on_turn_input is not None:
            heard, self._session.on_turn_input = self._session.on_turn_input, None
            heard()
        started = time.time()
        try:
            reply = await self._sample(pending.prompt)
        except Exception as error:
            self._record(started, error=error)
            if isinstance(error, PromptTooLong) and self._trace.num_turns:
                self._trace.stop(CONTEXT_FULL)
                return None
            self._episode.failure = self._episode.failure or error
            raise verifiers().ProviderError(f"{type(error).__name__}: {error}") from error
        return await self._answer(pending, reply, started)

    async def run(self, call: ToolCall, gated: bool) -> Any | None:
        """What the model is told about its call; None if that ended the run."""
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
        """A message as we write it; one that was sampled as it was then, so that it keeps its tokens."""
        if message.role != "assistant":
            written: Message = verifiers("dialects.chat").message_to_wire(message)
            return written
        name = verifiers("graph").message_hash(message)
        return self._sampled.get(name) or self._episode.sampled.get(name) or _as_said(message)

    # -- one call to the model ------------------------------------------------------------------------------------

    async def _request(self, messages: Sequence[Any]) -> Any | None:
        """What is asked, in verifiers' graph of messages; None if a limit or a stop of the task refuses it."""
        vf, session = verifiers(), self._session
        async with verifiers("errors").boundary(vf.TaskError, "a hook before the model's turn"):
            if session.stopped or await session.refused() is not None:
                return None
            declared = self.tools.declared if self.tools is not None else None
            asked = vf.Request(messages=list(messages), tools=declared)
            request, rewrites, stopped = await session.rewrite_request(asked)
        self._trace.request_rewrites.extend(rewrites)
        pending = verifiers("graph").prepare_turn(self._trace, request.messages, request.tools)
        if stopped is None:
            return pending
        pending.commit_prompt()
        self._trace.stop(stopped)
        return None

    async def _sample(self, messages: Sequence[Any]) -> Reply:
        asked = [self.wire(message) for message in messages]
        schemas = self.tools.schemas if self.tools is not None else ()
        return await self._episode.context.chat(asked, schemas, self._session.ctx.sampling.max_tokens)

    async def _answer(self, pending: Any, reply: Reply, started: float) -> Said | None:
        """Past the hooks of the task and into the trace; None if that ended the run."""
        session, trace = self._session, self._trace
        response, rewrites, stopped = _response(reply, session.ctx.model), [], None
        if session.response_interceptors or session.response_stops:
            response, rewrites, stopped = await session.rewrite_response(response)
        if session.stopped:
            return None
        node = pending.commit(response)
        if not rewrites:  # else the words are the task's, and nobody sampled them
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
        return Said(response.message, () if rewrites else reply.tool_calls)

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
        message=vf.AssistantMessage(
            content=_printable(message.get("content")) or None,
            reasoning_content=_printable(message.get("reasoning_content")) or None,
            tool_calls=calls or None,
        ),
        finish_reason=finish,
        usage=vf.Usage(prompt_tokens=len(reply.turn.prompt_ids), completion_tokens=len(reply.turn.completion_ids)),
    )


def _as_said(message: Any) -> Message:
    """An assistant's message that a prompt brings along, with the arguments of its calls as our renderers take them."""
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
    """Within the bounds that verifiers has for what a tool says."""
    bounded = verifiers("harnesses.utils.compaction").bound_tool_message(fields)
    return verifiers().ToolMessage.model_validate(bounded)


def _printable(text: Any) -> str:
    """verifiers hashes what is said, and cannot hash what is no valid Unicode."""
    return str(text or "").encode(errors="replace").decode()
