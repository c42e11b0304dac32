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
        raise DataError(f"zero_shot_path: there is no file {file}: evaluate the base model first, which writes it")
    records: dict[str, ZeroShot] = {}
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.isspace():
                continue
            try:
                record = msgspec.json.decode(line, type=ZeroShot)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise DataError(f"{file}, line {number}: not a record of an example: {error}") from error
            if records.setdefault(record.key, record) != record:
                raise DataError(
                    f"{file}, line {number}: {record.key!r} has another record before: one for each example"
                )
    return records
