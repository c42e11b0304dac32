"""Rewrite short forms and other names of keys in plain trees, before they are validated."""

from __future__ import annotations

from typing import Any

from headrace.errors import InvalidValue, shown_value


def spelled_out(value: Any, key: str, plain: type | tuple[type, ...] = str) -> Any:
    """Return the table that a plain value stands for: `"max_rl"` as `{type = "max_rl"}`."""
    return {key: value} if isinstance(value, plain) and not isinstance(value, bool) else value


def renamed(table: dict[str, Any], other: str, name: str, within: str = "") -> dict[str, Any]:
    """Return the table with the key `other` renamed to `name`."""
    rest = {key: value for key, value in table.items() if key != other}
    given = table[other]
    return {**rest, name: united(rest.get(name, given), given, f"{within}{name}", f"{within}{other}")}


def united(explicit: Any, given: Any, name: str, other: str) -> Any:
    """Merge the values of a key `name` and of its other name `other`; raise if they differ.

    An empty `name` is the section itself.
    """
    explicit, given = _alike(explicit, given), _alike(given, explicit)
    if isinstance(explicit, dict) and isinstance(given, dict):
        both = {
            key: united(explicit[key], value, f"{name}.{key}".removeprefix("."), f"{other}.{key}")
            for key, value in given.items()
            if key in explicit
        }
        return {**explicit, **given, **both}
    if isinstance(explicit, list) and isinstance(given, list) and len(explicit) == len(given):
        return [united(*pair, name, other) for pair in zip(explicit, given, strict=True)]
    if _listed(explicit) != _listed(given):
        raise InvalidValue(
            f"another name of {name}, which is {shown_value(explicit)}",
            key=other,
            value=given,
            fix="Give one of them, or the same value twice.",
        )
    return explicit


def _alike(value: Any, other: Any) -> Any:
    """Write a plain value as a table where the other one is a table that such a value may stand for."""
    short = next((key for key in ("type", "import_path", "alpha") if isinstance(other, dict) and key in other), None)
    return value if short is None else spelled_out(value, short, (str, int, float))


def _listed(value: Any) -> Any:
    """Return a single value as a list of one."""
    return value if isinstance(value, list) else [value]
