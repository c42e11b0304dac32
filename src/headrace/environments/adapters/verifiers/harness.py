"""The harness of an agent: a conversation with tools in this process, until a reply calls no tool."""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

from headrace.environments.adapters.verifiers.library import verifiers
from headrace.environments.adapters.verifiers.seat import EPISODE, Seat

NAME = "headrace_in_process"
"""The module name under which verifiers finds the harness; it must have one part."""


@functools.cache
def harness() -> Any:
    """Return the config of the harness, for every agent."""
    vf = verifiers()
    members = {
        "__doc__": "A chat loop in this process.",
        "__module__": NAME,
        "APPENDS_SYSTEM_PROMPT": True,
        "SUPPORTS_MCP": True,
        "SUPPORTS_TOOL_INTERCEPTION": True,
        "SUPPORTS_RESUME": True,
        "EXECUTES_CODE": False,
        "NEEDS_CONTAINER": False,
        "session": _session,
        "launch": _launch,
    }
    offer(NAME, type("InProcess", (vf.Harness,), members))
    return vf.HarnessConfig(id=NAME)


def offer(name: str, *plugins: type) -> None:
    """Make verifiers find these classes under a module name."""
    module: Any = ModuleType(name)
    for plugin in plugins:
        setattr(module, plugin.__name__, plugin)
    module.__all__ = [plugin.__name__ for plugin in plugins]
    sys.modules[name] = module


async def _session(self: Any, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str],
                   data: Any, tool_interception_url: str | None = None) -> Any:  # fmt: skip
    """Open the tools in the setup of a run, under its time limit, before the first turn."""
    await EPISODE.get().by_trace[trace.id].open_tools(mcp_urls)
    base = verifiers().Harness.session
    return await base(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url)


async def _launch(self: Any, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str],
                  data: Any, tool_interception_url: str | None = None) -> Any:  # fmt: skip
    """Run one segment: the prompt of `data` is the conversation so far. With a URL, tool calls are gated."""
    vf = verifiers()
    system, prompt = self.resolve_prompt(data)
    messages = [vf.SystemMessage(content=system)] if system is not None else []
    messages += [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []
    await _converse(EPISODE.get().by_trace[trace.id], messages, gated=tool_interception_url is not None)
    return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def _converse(seat: Seat, messages: list[Any], gated: bool) -> None:
    while (reply := await seat.sample(messages)) is not None and reply.calls:
        messages.append(reply.message)
        for call in reply.calls:
            result = await seat.run(call, gated)
            if result is None:
                return
            messages.append(result)
