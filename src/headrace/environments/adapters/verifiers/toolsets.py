"""Toolsets of verifiers, called in this process instead of over MCP between processes.

verifiers starts a server for each toolset, unless its config has the URL of a running one. Here the config gets an
`Address`, which refers to the toolset itself. Its setup, its tools and the state that it shares with the task
(`self.state`) work as behind a server: a call sees the current state, and replaces it if the call succeeds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from headrace.environments.adapters import import_verifiers as verifiers
from headrace.environments.adapters import library
from headrace.environments.tools import is_plain

_CALLER: ContextVar[Any] = ContextVar("the trace that calls a tool")


class Address(str):
    """A reference to a toolset, in place of a URL."""

    toolset: Any
    server: Any = None
    """A server for all episodes; unset, each episode has its own."""


def bring_here(toolset: Any) -> Any:
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
        return _server(toolset, _tools(toolset))
    server = _server(toolset, [])
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
        vf = verifiers()
        tools = cls(trace)
        for name, address in addresses.items():
            assert isinstance(address, Address), f"{address} is not in this process"
            async with verifiers("errors").boundary(vf.ToolsetError, f"toolset {name or address}"):
                server = address.server or await serve(address.toolset, stack, trace.task.data)
                with _called_by(trace):
                    await tools._list(name, server)
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
                return _portable(str(error)), False
        content = verifiers("harnesses.utils.mcp").mcp_content_to_chat_content(result.content)
        return _portable(content), not result.is_error

    async def _list(self, prefix: str, server: Any) -> None:
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
    after = toolset._state_adapter.dump_json(toolset.state)
    if after != before:
        trace = _CALLER.get()
        trace.state = type(trace.state).model_validate_json(after)


def _server(toolset: Any, tools: list[Any]) -> Any:
    root, silence = logging.getLogger(), logging.NullHandler()
    root.addHandler(silence)  # else a server configures the logging of the whole process
    try:
        name = toolset.server_name or type(toolset).__name__
        return library("mcp.server.mcpserver", "verifiers").MCPServer(name, tools=tools)
    finally:
        root.removeHandler(silence)


_described: WeakKeyDictionary[Callable[..., Any], Any] = WeakKeyDictionary()


def _tools(toolset: Any) -> list[Any]:
    """Return the tools of a toolset. Describing one takes milliseconds, so toolsets of a class share descriptions."""
    tool = library("mcp.server.mcpserver.tools", "verifiers").Tool
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


def _portable(content: Any) -> Any:
    return content.encode(errors="replace").decode() if isinstance(content, str) else content
