"""A conversation with the model: messages, turns, tool calls, and its end.

Tokens are the context's concern: it continues the exact tokens of the last turn where the chat format allows that, and
renders the conversation again where it does not. A tool is an ordinary function, `async` or not, with type hints; the
model reads its docstring. The model gets a `ToolError` and invalid arguments as the result; any other exception is a
fault of the environment.
"""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from headrace.environments.base import Context, PromptTooLong, Reply, ToolCall
from headrace.observe import tracing
from headrace.rollout.types import Message, Rollout, Turn

if TYPE_CHECKING:  # a tenth of a second to import, which only environments with tools need
    import pydantic


PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,60}")
"""A name that the model invented goes into a prompt only if it is short and has no markup of the chat format."""
MAX_ARGUMENT_ERRORS = 5
"""Invalid arguments of a call that the result lists."""


class ToolError(Exception):
    """A failed tool call; the model gets the message as the result, and the episode continues."""


class Tool:
    """A function with its schema, which functions with the same code (closures of each episode) share."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.schema, self._arguments = _describe(function)
        self.name: str = self.schema["function"]["name"]

    async def __call__(self, arguments: dict[str, Any]) -> str:
        """Call the function with checked arguments and return its result as text or JSON."""
        import pydantic

        try:
            checked = self._arguments.model_validate(arguments)
        except pydantic.ValidationError as error:
            raise ToolError(f"the arguments of {self.name} do not fit: {_format_argument_errors(error)}") from None
        result = self.function(**{name: getattr(checked, name) for name in type(checked).model_fields})
        if inspect.isawaitable(result):
            result = await result
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


async def run_call(tools: dict[str, Tool], call: ToolCall) -> tuple[str, bool]:
    """Run a call; return the result for the model, and whether the call succeeded."""
    try:
        if call.error:
            raise ToolError(call.error)
        if call.name not in tools:
            named = repr(call.name) if is_plain(call.name) else "of that name"
            raise ToolError(f"there is no tool {named}; there is {', '.join(tools) or 'none'}")
        with tracing.span("tool", tool=call.name):
            content, succeeded = await tools[call.name](call.arguments), True
    except ToolError as error:
        content, succeeded = f"Error: {error}", False
    return content.encode(errors="replace").decode(), succeeded  # a tool may return lone surrogates


def is_plain(name: str) -> bool:
    """Return whether a name may go into a prompt unchanged."""
    return PLAIN_NAME.fullmatch(name) is not None


class _Description(typing.NamedTuple):
    source: tuple[Any, ...]
    schema: dict[str, Any]
    arguments: type[pydantic.BaseModel]


_descriptions: WeakKeyDictionary[CodeType, _Description] = WeakKeyDictionary()


def _describe(function: Callable[..., Any]) -> tuple[dict[str, Any], type[pydantic.BaseModel]]:
    """Return the schema in OpenAI's form and the model that checks arguments, cached: they take a millisecond."""
    code: Any = function
    if not hasattr(code, "__code__"):
        raise TypeError(f"tool {function!r} is not a function: give one with a name, type hints and a docstring")
    # Everything that the schema depends on: closures with the same code may differ in it.
    source = (code.__name__, code.__doc__, code.__defaults__, code.__kwdefaults__, code.__annotations__)
    description = _descriptions.get(code.__code__)
    if description is None or description.source != source:
        arguments = _make_arguments_model(code.__name__, function)
        specification: dict[str, Any] = {"name": code.__name__}
        if code.__doc__:
            specification["description"] = inspect.cleandoc(code.__doc__)
        specification["parameters"] = _compact_schema(arguments.model_json_schema())
        description = _Description(source, {"type": "function", "function": specification}, arguments)
        _descriptions[code.__code__] = description
    return description.schema, description.arguments


def _make_arguments_model(name: str, function: Callable[..., Any]) -> type[pydantic.BaseModel]:
    import pydantic

    hints = typing.get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        unnamed = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY)
        if unnamed or parameter.name.startswith("_"):
            raise TypeError(f"tool {name}: parameter {parameter} cannot be described; give each one a name and a type")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (hints.get(parameter.name, Any), default)
    return pydantic.create_model(f"{name}_arguments", __config__=pydantic.ConfigDict(extra="forbid"), **fields)


def _compact_schema(schema: Any) -> Any:
    """Return a schema without what does not help a model: titles that repeat names, `additionalProperties`."""
    if isinstance(schema, list):
        return [_compact_schema(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    compact = {}
    for key, value in schema.items():
        if key == "properties":
            compact[key] = {name: _compact_schema(part) for name, part in value.items()}
        elif key not in ("title", "additionalProperties") or not isinstance(value, str | bool):
            compact[key] = _compact_schema(value)
    return compact


def _format_argument_errors(error: pydantic.ValidationError) -> str:
    entries = error.errors(include_url=False)
    places = [".".join(map(str, entry["loc"])) for entry in entries[:MAX_ARGUMENT_ERRORS]]
    errors = [
        f"{place if is_plain(place) else 'arguments'}: {entry['msg']}"
        for place, entry in zip(places, entries, strict=False)
    ]
    return "; ".join([*errors, "and so on"] if len(entries) > MAX_ARGUMENT_ERRORS else errors)


class Chat:
    """One agent's part of an episode. `tools` are functions with type hints; `max_turns` limits its replies.

    With `describe_tools` false the tools are not in the prompt, for a model that was trained to call them anyway.

    ```
    chat = Chat(context, "Guess a number from 1 to 10.", max_turns=5)
    while reply := await chat.reply():
        ...
        chat.say("Higher.")
    return [chat.rollout({"found": 1.0})]
    ```
    """

    def __init__(
        self,
        context: Context,
        prompt: str | Sequence[Message] = (),
        *,
        system: str | None = None,
        tools: Sequence[Callable[..., Any] | Tool] = (),
        describe_tools: bool = True,
        max_turns: int | None = None,
        agent: str = "policy",
        trainable: bool = True,
    ) -> None:
        self.messages: list[Message] = []
        self.turns: list[Turn] = []
        self.stop_reason = ""
        """Why the conversation ended: "truncated", "context_full", "max_turns", or the argument of `stop`."""
        self._context = context
        self._tools: dict[str, Tool] = {}
        for tool in (each if isinstance(each, Tool) else Tool(each) for each in tools):
            if self._tools.setdefault(tool.name, tool) is not tool:
                raise TypeError(f"two tools have the name {tool.name}")
        self._schemas = [tool.schema for tool in self._tools.values()] if describe_tools else []
        self._max_turns = max_turns
        self._agent = agent
        self._trainable = trainable
        self._metrics: dict[str, float] = {"tool_calls": 0, "tool_errors": 0} if tools else {}
        self._last: Reply | None = None
        if system is not None:
            self.say(system, role="system")
        if isinstance(prompt, str):
            self.say(prompt)
        else:
            self.messages += prompt

    @property
    def text(self) -> str:
        """The text of the last reply; empty before the first."""
        return self._last.text if self._last is not None else ""

    def say(self, content: str, role: str = "user") -> None:
        """Add a message for the model to read."""
        self.messages.append({"role": role, "content": content})

    def stop(self, reason: str) -> None:
        """End the conversation: `reply` returns None from now on."""
        self.stop_reason = self.stop_reason or reason

    async def reply(self, max_tokens: int | None = None) -> Reply | None:
        """Return the model's next reply; None once the conversation is over.

        A truncated reply is the last one. A conversation without room for a reply within `seq_len` ends; for the first
        reply, `PromptTooLong` is raised.
        """
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens = {max_tokens}: expected at least 1")
        if self._max_turns is not None and len(self.turns) >= self._max_turns:
            self.stop("max_turns")
        if self.stop_reason:
            return None
        try:
            reply = await self._context.chat(self.messages, self._schemas, max_tokens)
        except PromptTooLong:
            if not self.turns:
                raise
            self.stop("context_full")
            return None
        self.messages.append(reply.message)
        self.turns.append(reply.turn)
        self._last = reply
        if reply.truncated:
            self.stop("truncated")
        return reply

    async def act(self, max_tokens: int | None = None) -> Reply | None:
        """Run the tool calls of replies until one has none; return it, or None if the conversation ended first."""
        while reply := await self.reply(max_tokens):
            if not reply.tool_calls:
                return reply
            if not self.stop_reason:
                await self.run_tools(reply)
        return None

    async def run_tools(self, reply: Reply) -> None:
        """Run the tool calls of a reply, one after another, and add their results as messages."""
        for call in reply.tool_calls:
            content, succeeded = await run_call(self._tools, call)
            self._metrics["tool_calls"] = self._metrics.get("tool_calls", 0) + 1
            self._metrics["tool_errors"] = self._metrics.get("tool_errors", 0) + (not succeeded)
            message = {"role": "tool", "tool_call_id": call.id, "content": content}
            self.messages.append(message | ({"name": call.name} if is_plain(call.name) else {}))

    def rollout(self, rewards: Mapping[str, float], metrics: Mapping[str, float] | None = None) -> Rollout:
        """Return the conversation as a rollout with these rewards."""
        return Rollout(
            agent=self._agent,
            trainable=self._trainable,
            rewards=dict(rewards),
            metrics={**self._metrics, **(metrics or {})},
            messages=self.messages,
            turns=self.turns,
            truncated=self.stop_reason in ("truncated", "context_full"),
            stop_reason=self.stop_reason,
        )
