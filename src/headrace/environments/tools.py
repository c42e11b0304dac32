"""Functions that a model may call: the schema it is shown, its arguments checked, what it is told.

A tool is an ordinary function, `async` or not, with type hints; its docstring is what the model reads. A `ToolError`
that it raises, or arguments that do not fit, are told to the model; anything else that it raises is a fault of the
environment.
"""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from headrace.environments.base import ToolCall

if TYPE_CHECKING:  # a tenth of a second to import, which only environments with tools need
    import pydantic


PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,60}")
"""A name that a model made up is repeated to it only if it is short, and no markup of the chat format."""
MOST_COMPLAINTS = 5
"""A bound on what a model is told about a wrong call."""


class ToolError(Exception):
    """What the model asked of a tool cannot be done; it is told why, and the episode goes on."""


class Tool:
    """`function` with its schema. Functions with the same code, as closures of each episode are, share the schema."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.schema, self._arguments = _describe(function)
        self.name: str = self.schema["function"]["name"]

    async def __call__(self, arguments: dict[str, Any]) -> str:
        """The result as the model is told it: a text, or JSON."""
        import pydantic

        try:
            checked = self._arguments.model_validate(arguments)
        except pydantic.ValidationError as error:
            raise ToolError(f"the arguments of {self.name} do not fit: {_complaints(error)}") from None
        result = self.function(**{name: getattr(checked, name) for name in type(checked).model_fields})
        if inspect.isawaitable(result):
            result = await result
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


async def run_call(tools: dict[str, Tool], call: ToolCall) -> tuple[str, bool]:
    """What the model is told about its call, and whether the call succeeded."""
    try:
        if call.error:
            raise ToolError(call.error)
        if call.name not in tools:
            named = repr(call.name) if is_plain(call.name) else "of that name"
            raise ToolError(f"there is no tool {named}; there is {', '.join(tools) or 'none'}")
        told, succeeded = await tools[call.name](call.arguments), True
    except ToolError as error:
        told, succeeded = f"Error: {error}", False
    return told.encode(errors="replace").decode(), succeeded  # a tool may quote what is no valid Unicode


def is_plain(name: str) -> bool:
    """Whether a name may go into a prompt as it is."""
    return PLAIN_NAME.fullmatch(name) is not None


class _Described(typing.NamedTuple):
    face: tuple[Any, ...]
    schema: dict[str, Any]
    arguments: type[pydantic.BaseModel]


_described: WeakKeyDictionary[CodeType, _Described] = WeakKeyDictionary()


def _describe(function: Callable[..., Any]) -> tuple[dict[str, Any], type[pydantic.BaseModel]]:
    """The schema in OpenAI's form, and the model that checks arguments. Making them takes a millisecond."""
    given: Any = function
    if not hasattr(given, "__code__"):
        raise TypeError(f"tool {function!r} is not a function: give one with a name, type hints and a docstring")
    # All that a schema is made of: closures of one code may differ in it.
    face = (given.__name__, given.__doc__, given.__defaults__, given.__kwdefaults__, given.__annotations__)
    known = _described.get(given.__code__)
    if known is None or known.face != face:
        arguments = _arguments_model(given.__name__, function)
        specification: dict[str, Any] = {"name": given.__name__}
        if given.__doc__:
            specification["description"] = inspect.cleandoc(given.__doc__)
        specification["parameters"] = _shown(arguments.model_json_schema())
        known = _Described(face, {"type": "function", "function": specification}, arguments)
        _described[given.__code__] = known
    return known.schema, known.arguments


def _arguments_model(name: str, function: Callable[..., Any]) -> type[pydantic.BaseModel]:
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


def _shown(schema: Any) -> Any:
    """The schema without what tells a model nothing: titles that repeat names, that there are no other parameters."""
    if isinstance(schema, list):
        return [_shown(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    shown = {}
    for key, value in schema.items():
        if key == "properties":
            shown[key] = {name: _shown(part) for name, part in value.items()}
        elif key not in ("title", "additionalProperties") or not isinstance(value, str | bool):
            shown[key] = _shown(value)
    return shown


def _complaints(error: pydantic.ValidationError) -> str:
    entries = error.errors(include_url=False)
    places = [".".join(map(str, entry["loc"])) for entry in entries[:MOST_COMPLAINTS]]
    told = [
        f"{place if is_plain(place) else 'arguments'}: {entry['msg']}"
        for place, entry in zip(places, entries, strict=False)
    ]
    return "; ".join([*told, "and so on"] if len(entries) > MOST_COMPLAINTS else told)
