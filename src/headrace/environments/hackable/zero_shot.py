"""What a base model made of each example before any training: JSONL of `key`, `correct` and `thinking_tokens`.

Whatever else a line has is left alone, so that the completions of an evaluation may be such a record.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from headrace.environments.data.tables import DataError


class ZeroShot(msgspec.Struct, frozen=True):
    key: str
    correct: bool
    thinking_tokens: float


def read_zero_shot(path: str | Path) -> dict[str, ZeroShot]:
    """The record of each example by its key."""
    file = Path(path).expanduser()
    if not file.is_file():
        fix = "Evaluate the base model first, which writes it."
        raise DataError("no such file", key="zero_shot_path", value=file, fix=fix)
    records: dict[str, ZeroShot] = {}
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.isspace():
                continue
            try:
                record = msgspec.json.decode(line, type=ZeroShot)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise DataError(f"not a record of an example: {error}", file=file, line=number) from error
            if records.setdefault(record.key, record) != record:
                fact = "an earlier line has another record of this example"
                raise DataError(fact, key="key", value=record.key, file=file, line=number)
    return records
