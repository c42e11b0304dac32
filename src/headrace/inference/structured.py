"""Structured outputs as grammars of `llguidance`, which is an extra: checked by the server, compiled by the engine."""

from __future__ import annotations

import functools
import json
from typing import Any

import msgspec

from headrace.inference.backend import InvalidRequest
from headrace.inference.schema import StructuredOutputs

MAX_GRAMMAR_CHARS = 1 << 16
"""Larger ones take seconds to compile."""
MAX_CACHED = 256
WHITESPACE = r"[ \n\t]{0,20}"
"""Between the parts of JSON. Bounded, since a model may otherwise write nothing else."""


def grammar_of(outputs: StructuredOutputs) -> str:
    """Return the grammar of `llguidance`. Raises `InvalidRequest` if there is none, or without the extra."""
    fields = {name: value for name, value in msgspec.structs.asdict(outputs).items() if value not in (None, False)}
    if len(fields) != 1:
        names = ", ".join(StructuredOutputs.__struct_fields__)
        raise InvalidRequest(f"exactly one of {names} must be set", key="structured_outputs")
    [(name, value)] = fields.items()
    if name == "choice" and not (value and all(value)):
        raise InvalidRequest("must be a list of texts that are not empty", key="structured_outputs.choice")
    text = value if isinstance(value, str) else json.dumps({"type": "object"} if name == "json_object" else value)
    if len(text) > MAX_GRAMMAR_CHARS:
        fact = f"{len(text)} characters are more than the limit of {MAX_GRAMMAR_CHARS}"
        raise InvalidRequest(fact, key=f"structured_outputs.{name}")
    return _checked_grammar(name, text)


@functools.lru_cache(MAX_CACHED)
def _checked_grammar(name: str, text: str) -> str:
    """Convert one field of `StructuredOutputs` to a grammar of `llguidance`. Raises `InvalidRequest`."""
    key = f"structured_outputs.{name}"
    try:
        from llguidance import LLMatcher, grammar_from
    except ImportError as error:
        fact = "the package llguidance is not installed where the server runs"
        raise InvalidRequest(fact, key=key, fix="Install headrace[structured] there.") from error
    try:
        if name in ("json", "json_object"):
            options: Any = {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE}
            grammar: str = LLMatcher.grammar_from_json_schema(text, defaults=options)
        else:
            grammar = grammar_from(name, text)
    except ValueError as error:
        raise InvalidRequest(str(error), key=key) from error
    if problem := LLMatcher.validate_grammar(grammar):
        raise InvalidRequest(problem.strip(), key=key)
    return grammar
