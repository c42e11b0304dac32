"""Toolsets of verifiers, called where they are instead of over MCP between processes.

verifiers starts a server for each toolset, unless its config has the URL of one that runs. Here it gets an `Address`,
which is the toolset itself. Its setup, its tools and what it shares with the task (`self.state`) work as they do behind
a server: a call sees the state as it is, and puts it back whole if it ends well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from headrace.environments.adapters import library
from headrace.environments.adapters.verifiers.library import verifiers
from headrace.environments.tools import is_plain

_CALLER: ContextVar[Any] = ContextVar("the trace on whose behalf a tool is called")


class Address(str):
    """Where a toolset is, in place of a URL."""

    toolset: Any
    server: Any = None
    """One that serves all episodes; else each has its own."""


def bring_here(toolset: Any) -> Any:
    """The toolset, with its address in its config."""
    address = Address(f"here:{toolset.server_name}")
    address.toolset = toolset
    toolset.config = toolset.config.model_copy(update={"url": address})
    toolset._pull_state = partial(_pull_state, toolset)
    toolset._push_state = partial(_push_state, toolset)
    return toolset


async def serve(toolset: Any, stack: AsyncExitStack, task: Any = None) -> Any:
    """The MCP server of a toolset that has been set up, for a task or for all of them; no socket, no process."""
    await stack.enter_async_context(toolset._exit_stack)
    await toolset.setup()
    if task is not None:
        await toolset.setup_task(task)
    if type(toolset).register is verifiers().Toolset.register:
        return _server(toolset, _tools(toolset))
    server = _server(toolset, [])
    toolset.register(server)
    return server


class Tools:
    """What one agent can call. `schemas` are for the model, `declared` for the trace."""

    def __init__(self, trace: Any) -> None:
        self.schemas: list[dict[str, Any]] = []
        self.declared: list[Any] = []
        self._trace = trace
        self._places: dict[str, tuple[Any, str]] = {}

    @classmethod
    async def open(cls, addresses: Mapping[str, str], trace: Any, stack: AsyncExitStack) -> Tools:
        vf = verifiers()
        tools = cls(trace)
        for name, address in addresses.items():
            assert isinstance(address, Address), f"{address} is not in this process: loading refuses that"
            async with verifiers("errors").boundary(vf.ToolsetError, f"toolset {name or address}"):
                server = address.server or await serve(address.toolset, stack, trace.task.data)
                with _called_by(trace):
                    await tools._list(name, server)
        return tools

    async def call(self, name: str, arguments: dict[str, Any]) -> tuple[Any, bool]:
        """What the model is told, a text or parts, and whether the call succeeded. All that a tool raises is told."""
        if name not in self._places:
            named = repr(name) if is_plain(name) else "of that name"
            return f"error: there is no tool {named}; there is {', '.join(self._places)}", False
        server, tool = self._places[name]
        with _called_by(self._trace):
            try:
                result = await server.call_tool(tool, arguments)
            except Exception as error:
                return _portable(str(error)), False
        content = verifiers("harnesses.utils.mcp").mcp_content_to_chat_content(result.content)
        return _portable(content), not result.is_error

    async def _list(self, prefix: str, server: Any) -> None:
        for tool in await server.list_tools():
            name = f"{prefix}_{tool.name}" if prefix else tool.name
            if name in self._places:
                raise ValueError(f"two tools have the name {name}: a model could not tell them apart")
            self._places[name] = (server, tool.name)
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
    """A copy: the classes of a toolset's state and of its task's may differ, and a call that fails changes nothing."""
    return toolset._state_adapter.validate_json(_CALLER.get().state.model_dump_json())


async def _push_state(toolset: Any, before: bytes) -> None:
    after = toolset._state_adapter.dump_json(toolset.state)
    if after != before:
        trace = _CALLER.get()
        trace.state = type(trace.state).model_validate_json(after)


def _server(toolset: Any, tools: list[Any]) -> Any:
    root, silence = logging.getLogger(), logging.NullHandler()
    root.addHandler(silence)  # a server sets up logging for the whole process where nobody has
    try:
        name = toolset.server_name or type(toolset).__name__
        return library("mcp.server.mcpserver", "verifiers").MCPServer(name, tools=tools)
    finally:
        root.removeHandler(silence)


_described: WeakKeyDictionary[Callable[..., Any], Any] = WeakKeyDictionary()


def _tools(toolset: Any) -> list[Any]:
    """Its tools for a server. To describe one takes milliseconds, so all toolsets of a class share that."""
    tool = library("mcp.server.mcpserver.tools", "verifiers").Tool
    tools = []
    for function in verifiers("utils.decorators").discover_decorated(toolset, "tool"):
        wrapped = toolset._with_state(function)
        known = _described.get(function.__func__)
        if known is None:
            name = getattr(function, "tool_name", None) or function.__name__
            known = tool.from_function(wrapped, name=name, description=(function.__doc__ or "").strip() or None)
            _described[function.__func__] = known.model_copy(update={"fn": None})  # it would keep the toolset
        tools.append(known.model_copy(update={"fn": wrapped}))
    return tools


def _portable(content: Any) -> Any:
    return content.encode(errors="replace").decode() if isinstance(content, str) else content
