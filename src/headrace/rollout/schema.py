"""Schema versions of files and messages, and the errors for those that cannot be read."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from headrace.errors import BadInput, Failure
from headrace.rollout.digest import is_whole

T = TypeVar("T", bound=msgspec.Struct)

SCHEMA = 1


class SchemaError(Failure):
    """A file or message that is malformed or was written by a newer Headrace."""


class DamagedFile(BadInput, SchemaError):
    """A file that differs from what was written, or that cannot be read as what it must be."""


class _SchemaOnly(msgspec.Struct):
    schema: int


def check_schema(schema: int, source: str, newest: int = SCHEMA) -> None:
    """Raise SchemaError if `schema` is newer than this Headrace reads."""
    if schema > newest:
        raise SchemaError(
            f"{source} has schema {schema}, but this Headrace reads up to {newest}: "
            "it was written by a newer version; upgrade this process"
        )


def decode_versioned(content: bytes | str, kind: type[T], source: str) -> T:
    """Decode a JSON document with a `schema` field, checking its seal, if any, and the schema before other fields."""
    encoded = content.encode() if isinstance(content, str) else content
    if is_whole(encoded) is False:
        raise DamagedFile("damaged: its content does not match its digest", file=source)
    try:
        check_schema(msgspec.json.decode(encoded, type=_SchemaOnly).schema, source)
        return msgspec.json.decode(encoded, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedFile(f"not readable: {error}", file=source) from error
