"""One agent's run of a task: model calls with the hooks of the task around them, and toolsets called in this process.

Where verifiers has an HTTP server between an agent's program and the model, a call here is a function call: limits and
stops are checked before it, interceptors may rewrite request and response, and the trace records it. The trace has the
texts; the tokens are in our own turns, one for each sampled message, whatever becomes of the conversation afterwards:
branches that share a message do not train it twice.

verifiers starts a server for each toolset, unless its config has the URL of a running one. Here the config gets an
`Address`, which refers to the toolset itself. Its setup, its tools and the state that it shares with the task
(`self.state`) work as behind a server: a call sees the current state, and replaces it if the call succeeds.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from headrace.environments.adapters import import_library
from headrace.environments.adapters import import_verifiers as verifiers
from headrace.environments.base import Context, PromptTooLong, Reply, ToolCall
from headrace.environments.chat import is_plain
from headrace.rollout.types import Message, Turn
from headrace.safe_text import encodable

_CALLER: ContextVar[Any] = ContextVar("the trace that calls a tool")


class Address(str):
    """A reference to a toolset, in place of a URL."""

    toolset: Any
    server: Any = None
    """A server for all episodes; unset, each episode has its own."""


def set_address(toolset: Any) -> Any:
    """Put the address of a toolset in its config, and return the toolset."""
    address = Address(f"here:{toolset.server_name}")
    address.toolset = toolset
    toolset.config = toolset.config.model_copy(update={"url": address})
    toolset._pull_state = partial(_pull_state, toolset)
    toolset._push_state = partial(_push_state, toolset)
    return toolset


async def serve(toolset: Any, stack: AsyncExitStack, task: Any = None) -> Any:
    """Set up a toolset, for a task or for all, and return its MCP server, without socket or process."""
    await stack.enter_async_context(toolset._exit_stack)
    await toolset.setup()
    if task is not None:
        await toolset.setup_task(task)
    if type(toolset).register is verifiers().Toolset.register:
        return _make_server(toolset, _describe_tools(toolset))
    server = _make_server(toolset, [])
    toolset.register(server)
    return server


class Tools:
    """The tools of one agent. `schemas` are for the model, `declared` for the trace."""

    def __init__(self, trace: Any) -> None:
        self.schemas: list[dict[str, Any]] = []
        self.declared: list[Any] = []
        self._trace = trace
        self._servers: dict[str, tuple[Any, str]] = {}

    @classmethod
    async def open(cls, addresses: Mapping[str, str], trace: Any, stack: AsyncExitStack) -> Tools:
        """Return the tools of the toolsets at these addresses; `stack` closes them."""
        vf = verifiers()
        tools = cls(trace)
        for name, address in addresses.items():
            assert isinstance(address, Address), f"{address} is not in this process"
            async with verifiers("errors").boundary(vf.ToolsetError, f"toolset {name or address}"):
                server = address.server or await serve(address.toolset, stack, trace.task.data)
                with _called_by(trace):
                    await tools._add_server(name, server)
        return tools

    async def call(self, name: str, arguments: dict[str, Any]) -> tuple[Any, bool]:
        """Return the result of a call, a text or parts, and whether it succeeded. Exceptions become results."""
        if name not in self._servers:
            named = repr(name) if is_plain(name) else "of that name"
            return f"error: there is no tool {named}; there is {', '.join(self._servers)}", False
        server, tool = self._servers[name]
        with _called_by(self._trace):
            try:
                result = await server.call_tool(tool, arguments)
            except Exception as error:
                return _replace_surrogates(str(error)), False
        content = verifiers("harnesses.utils.mcp").mcp_content_to_chat_content(result.content)
        return _replace_surrogates(content), not result.is_error

    async def _add_server(self, prefix: str, server: Any) -> None:
        """Add the tools of a server, named with the prefix."""
        for tool in await server.list_tools():
            name = f"{prefix}_{tool.name}" if prefix else tool.name
            if name in self._servers:
                raise ValueError(f"two tools have the name {name}: a model could not tell them apart")
            self._servers[name] = (server, tool.name)
            function = {"name": name, "description": tool.description or "", "parameters": tool.input_schema}
            self.schemas.append({"type": "function", "function": function})
            self.declared.append(verifiers().Tool(**function))


@contextmanager
def _called_by(trace: Any) -> Iterator[None]:
    token = _CALLER.set(trace)
    try:
        yield
    finally:
        _CALLER.reset(token)


async def _pull_state(toolset: Any) -> Any:
    """Return a copy of the state in the toolset's class; a call that fails does not change the state."""
    return toolset._state_adapter.validate_json(_CALLER.get().state.model_dump_json())


async def _push_state(toolset: Any, before: bytes) -> None:
    """Replace the state of the calling trace by that of the toolset, if a call has changed it."""
    after = toolset._state_adapter.dump_json(toolset.state)
    if after != before:
        trace = _CALLER.get()
        trace.state = type(trace.state).model_validate_json(after)


def _make_server(toolset: Any, tools: list[Any]) -> Any:
    """Return an MCP server with these tools, without changing the logging of the process."""
    root, silence = logging.getLogger(), logging.NullHandler()
    root.addHandler(silence)  # else a server configures the logging of the whole process
    try:
        name = toolset.server_name or type(toolset).__name__
        return import_library("mcp.server.mcpserver", "verifiers").MCPServer(name, tools=tools)
    finally:
        root.removeHandler(silence)


_described: WeakKeyDictionary[Callable[..., Any], Any] = WeakKeyDictionary()


def _describe_tools(toolset: Any) -> list[Any]:
    """Return the tools of a toolset. Describing one takes milliseconds, so toolsets of a class share descriptions."""
    tool = import_library("mcp.server.mcpserver.tools", "verifiers").Tool
    tools = []
    for function in verifiers("utils.decorators").discover_decorated(toolset, "tool"):
        wrapped = toolset._with_state(function)
        described = _described.get(function.__func__)
        if described is None:
            name = getattr(function, "tool_name", None) or function.__name__
            described = tool.from_function(wrapped, name=name, description=(function.__doc__ or "").strip() or None)
            _described[function.__func__] = described.model_copy(update={"fn": None})  # it would keep the toolset alive
        tools.append(described.model_copy(update={"fn": wrapped}))
    return tools


def _replace_surrogates(content: Any) -> Any:
    return content.encode(errors="replace").decode() if isinstance(content, str) else content


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
        self.stack = stack
        self._sampled: dict[str, Message] = {}
        """The same for this agent: two agents may write the same text in different tokens."""

    async def sample(self, messages: Sequence[Any]) -> SampledMessage | None:
        """Return the model's next message; None once the run is over."""
        pending = await self._prepare_turn(messages)
        if pending is None:
            return None
        if self._session.on_turn_input is not None:
            callback, self._session.on_turn_input = self._session.on_turn_input, None
            callback()
        started = time.time()
        try:
            wire = [self.to_wire(message) for message in pending.prompt]
            schemas = self.tools.schemas if self.tools is not None else ()
            reply = await self._episode.context.chat(wire, schemas, self._session.ctx.sampling.max_tokens)
        except Exception as error:
            self._record(started, error=verifiers("trace").Error(type=type(error).__name__, message=str(error)))
            if isinstance(error, PromptTooLong) and self._trace.num_turns:
                self._trace.stop(CONTEXT_FULL)
                return None
            self._episode.failure = self._episode.failure or error
            raise verifiers().ProviderError(f"{type(error).__name__}: {error}") from error
        return await self._commit_reply(pending, reply, started)

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

    def to_wire(self, message: Any) -> Message:
        """Return a message in our format; a sampled one exactly as it was sampled, so that it keeps its tokens."""
        if message.role != "assistant":
            written: Message = verifiers("dialects.chat").message_to_wire(message)
            return written
        name = verifiers("graph").message_hash(message)
        return self._sampled.get(name) or self._episode.sampled.get(name) or _with_parsed_arguments(message)

    async def _prepare_turn(self, messages: Sequence[Any]) -> Any | None:
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

    async def _commit_reply(self, pending: Any, reply: Reply, started: float) -> SampledMessage | None:
        """Apply the hooks of the task to a reply and record it in the trace; None if that ended the run."""
        session, trace = self._session, self._trace
        response, rewrites, stopped = _to_response(reply, session.ctx.model), [], None
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
        self._record(started, node=node, finish_reason=response.finish_reason, usage=response.usage)
        if stopped is None:
            stopped = await session.gate_tool_calls(node)
        if stopped is not None:
            trace.stop(stopped)
            return None
        return SampledMessage(response.message, () if rewrites else reply.tool_calls)

    def _record(self, started: float, **outcome: Any) -> None:
        """Record a model call in the trace: its `error`, or its `node`, `finish_reason` and `usage`."""
        records = verifiers("trace")
        span = records.TimeSpan(start=started, end=time.time())
        self._trace.calls.append(records.ModelCall(model=self._session.ctx.model, time=span, **outcome))
        self._trace.notify()


def _to_response(reply: Reply, model: str) -> Any:
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
