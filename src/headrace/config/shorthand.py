"""Other ways to write a section, turned into the one way before it is checked. Plain trees in, plain trees out."""

from __future__ import annotations

from typing import Any

from headrace.errors import InvalidValue, shown_value


def spelled_out(value: Any, key: str, plain: type | tuple[type, ...] = str) -> Any:
    """A plain value as the table that it stands for: `"max_rl"` as `{type = "max_rl"}`."""
    return {key: value} if isinstance(value, plain) and not isinstance(value, bool) else value


def renamed(table: dict[str, Any], other: str, name: str, within: str = "") -> dict[str, Any]:
    """The table with what stands under `other` where it belongs, under `name`."""
    rest = {key: value for key, value in table.items() if key != other}
    given = table[other]
    return {**rest, name: united(rest.get(name, given), given, f"{within}{name}", f"{within}{other}")}


def united(explicit: Any, given: Any, name: str, other: str) -> Any:
    """What stands under `name` and what stands under `other`, which is another name of it; they may not contradict.

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
    """Where several may be given, one may stand without its list."""
    return value if isinstance(value, list) else [value]
