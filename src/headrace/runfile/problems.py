"""Turn the errors of pydantic into `BadInput` with the whole dotted key, its source, and a similar known key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from headrace.config.annotations import Member, NoNumber, members_of
from headrace.config.base import COMMAND_LINE, Origins
from headrace.errors import BadInput, InvalidValue
from headrace.runfile.explain import nearest, suggest_key

EXPECTED = {
    "model_type": "must be a table",
    "model_attributes_type": "must be a table",
    "dict_type": "must be a table",
    "list_type": "must be a list",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
}
"""Facts by pydantic's error type, where pydantic's own message names Python classes."""


def explain_all(
    kind: type[BaseModel], error: ValidationError, filled_from: Mapping[str, str], origins: Origins
) -> list[BadInput]:
    """Return every problem once; a key that `filled_from` fills does not repeat the problem of its source."""
    problems: dict[tuple[str, str], BadInput] = {}
    for details in error.errors():
        key, known = _trace(kind, details)
        if not any((source, details["type"]) in problems for source in filled_sources(key, filled_from)):
            problems[key, details["type"]] = located(_explain(kind, details, key, known), origins)
    return list(problems.values())


def filled_sources(key: str, filled_from: Mapping[str, str]) -> list[str]:
    """Return the keys that fill a key which is not set."""
    return [f"{s}{key.removeprefix(t)}" for t, s in filled_from.items() if f"{key}.".startswith(f"{t}.")]


def located(problem: BadInput, origins: Origins) -> BadInput:
    """Set the file in which the key is written; a key from the command line becomes an option."""
    source = origins.of(problem.key or "")
    if source != COMMAND_LINE:
        problem.file = source
    elif problem.key:
        problem.key = f"--{problem.key}"
    return problem


def _explain(kind: type[BaseModel], details: Any, key: str, known: list[str]) -> BadInput:
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, InvalidValue):
        whole_key = ".".join(part for part in (key, cause.key) if part)
        return BadInput(cause.fact, key=whole_key, value=cause.value, fix=cause.fix, file=cause.file, line=cause.line)
    if details["type"] == "extra_forbidden":
        close = nearest(kind, key, known)
        if close == ".".join(part for part in key.split(".") if not part.isdecimal()):
            return BadInput("a key of another `type`", key=key, fix=f"This one has {', '.join(known)}.")
        return BadInput("unknown key", key=key, fix=suggest_key(key, close))
    if details["type"] == "missing":
        return BadInput("required, and not set", key=key)
    if details["type"] == "value_error":
        return BadInput(details["msg"].removeprefix("Value error, "), key=key)
    value = details["input"].given if isinstance(details["input"], NoNumber) else details["input"]
    fact = EXPECTED.get(details["type"]) or details["msg"].replace("Input should be", "must be")
    fix = None
    if value is True:
        fix = f"--{key} without a value means true: give it one."
    elif details["type"] == "list_type" and isinstance(value, dict):
        value, fix = None, f"Write [[{key}]], once for each entry."
    return BadInput(fact, key=key or "configuration", value=value, fix=fix)


def _trace(kind: type[BaseModel], details: Any) -> tuple[str, list[str]]:
    """Return the dotted key of an error, and the keys of the section there.

    The location of pydantic also has tags of unions and names of types in it, which are left out.
    """
    unknown = details["type"] == "extra_forbidden"
    path: list[Any] = []
    members = [Member(kind)]
    for part in details["loc"][:-1] if unknown else details["loc"]:
        chosen = [member for member in members if part in member.tags] if len(members) > 1 else []
        inside = [inner for member in members for inner in _types_under(member.kind, part)]
        if chosen:
            members = chosen
        elif inside:
            path.append(part)
            members = [member for annotation in inside for member in members_of(annotation)]
    if unknown:
        path.append(details["loc"][-1])
    known = [name for member in members for name in getattr(member.kind, "model_fields", ())]
    return ".".join(str(part) for part in path), known


def _types_under(kind: Any, part: Any) -> list[Any]:
    """Return the types of the values that a key or a position leads to."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind.model_fields[part].annotation] if part in kind.model_fields else []
    if get_origin(kind) is dict and part != "[key]":
        return [get_args(kind)[1]]
    return list(get_args(kind)) if isinstance(part, int) else []
