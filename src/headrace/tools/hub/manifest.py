"""`headrace.json` in a repository: what was pushed there, and which files belong to it.

It is how a push knows its own repository again, and how a pull knows what it gets and whether all of it is there.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from headrace.errors import BadInput

SCHEMA = 1
Kind = Literal["run", "model", "dataset"]


class Manifest(msgspec.Struct):
    kind: Kind
    name: str
    """Of the run, the model directory, the file or folder."""
    files: list[str]
    """All that was pushed, without the card."""
    card: str = ""
    """The checksum of the card that was pushed: one that somebody has edited since is left alone."""
    schema: int = SCHEMA

    @property
    def title(self) -> str:
        return f"the {self.kind} {self.name}"


def encode(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest)) + b"\n"


def decode(content: bytes, where: str) -> Manifest:
    try:
        manifest = msgspec.json.decode(content, type=Manifest)
    except msgspec.DecodeError as error:
        raise BadInput(f"not written by Headrace: {error}", file=where) from error
    if manifest.schema != SCHEMA:
        raise BadInput(f"this version of Headrace reads {SCHEMA}", file=where, key="schema", value=manifest.schema)
    return manifest
