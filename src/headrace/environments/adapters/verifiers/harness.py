"""The program that plays a seat: a conversation in this process, with its tools, until a reply calls none."""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

from headrace.environments.adapters.verifiers.library import verifiers
from headrace.environments.adapters.verifiers.seat import EPISODE, Seat

NAME = "headrace_in_process"
"""Under which verifiers finds the harness. Its plugins are modules whose names have one part."""


@functools.cache
def harness() -> Any:
    """Its config, to be given to every agent."""
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
    """Have verifiers find these classes under a name."""
    module: Any = ModuleType(name)
    for plugin in plugins:
        setattr(module, plugin.__name__, plugin)
    module.__all__ = [plugin.__name__ for plugin in plugins]
    sys.modules[name] = module


async def _session(self: Any, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str],
                   data: Any, tool_interception_url: str | None = None) -> Any:  # fmt: skip
    """Part of the setup of a run, under its time limit: the tools are there when the first turn begins."""
    await EPISODE.get().by_trace[trace.id].open_tools(mcp_urls)
    base = verifiers().Harness.session
    return await base(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url)


async def _launch(self: Any, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str],
                  data: Any, tool_interception_url: str | None = None) -> Any:  # fmt: skip
    """One segment: `data` has the whole conversation so far as its prompt. Tools are gated if there is a URL for it."""
    vf = verifiers()
    system, prompt = self.resolve_prompt(data)
    messages = [vf.SystemMessage(content=system)] if system is not None else []
    messages += [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []
    await _converse(EPISODE.get().by_trace[trace.id], messages, gated=tool_interception_url is not None)
    return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def _converse(seat: Seat, messages: list[Any], gated: bool) -> None:
    while (said := await seat.ask(messages)) is not None and said.calls:
        messages.append(said.message)
        for call in said.calls:
            told = await seat.run(call, gated)
            if told is None:
                return
            messages.append(told)
