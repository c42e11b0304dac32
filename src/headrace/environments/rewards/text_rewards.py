"""Rewards for the text of an answer: equal to the gold answer, matched by a regular expression, or JSON of a schema.

Matching and validation run in a sandbox: an expression with nested repetition can take exponential time on a text that
almost matches, during which `re` holds the interpreter, and JSON may be huge or deeply nested.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NoReturn

from headrace.environments.rewards.answers import last_block
from headrace.environments.rewards.base import Counts, Data, SandboxReward, check_installed, gold_of, register_with_part
from headrace.errors import BadInput


@register_with_part("exact_match_reward")
class Exact:
    """1.0 if the text equals the task's `field`, else 0.0. A gold answer that is not a text is converted to one."""

    name = "exact"
    bounded = True

    def __init__(self, field: str = "answer", ignore_case: bool = False, strip: bool = True) -> None:
        self._field = field
        self._ignore_case = ignore_case
        self._strip = strip

    def __call__(self, text: str, data: Data) -> float:
        gold = str(gold_of(data, self._field))
        if self._strip:
            text, gold = text.strip(), gold.strip()
        if self._ignore_case and len(text) <= 3 * len(gold):  # casefold() turns a letter into three at most
            text, gold = text.casefold(), gold.casefold()
        return float(text == gold)


@register_with_part("regex_reward")
class Pattern(SandboxReward):
    """1.0 if the pattern is found in the text, or with `full` matches all of it, else 0.0.

    With `field`, group 1 of the first match (the whole match, if the pattern has no group) must also equal that field
    of the task. A text that takes longer than `timeout` seconds of processor time does not match.
    """

    name = "pattern"

    def __init__(
        self, pattern: str, field: str | None = None, full: bool = False, timeout: float = 1.0, processes: int = 2
    ) -> None:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise BadInput(f"not a regular expression: {error}", key="pattern", value=pattern) from error
        super().__init__(timeout, processes, Counts(self.name, timeouts="answers that took too long to match"))
        self._pattern = pattern
        self._field = field
        self._full = full

    async def __call__(self, text: str, data: Data) -> float:
        gold = None if self._field is None else str(gold_of(data, self._field))
        return float(await self._check(f"{__name__}:matches", self._pattern, text, self._full, gold) or 0)


def matches(pattern: str, text: str, full: bool, gold: str | None) -> bool:
    """Return whether the pattern matches; runs in the sandbox."""
    expression = re.compile(pattern)
    match = expression.fullmatch(text) if full else expression.search(text)
    return match is not None and (gold is None or match[min(1, expression.groups)] == gold)


@register_with_part("json_schema_reward")
class JsonSchema(SandboxReward):
    """1.0 if the text, or its last fenced `json` block, is JSON that fits the schema, else 0.0.

    With `field`, the JSON must also equal that field of the task. An answer that takes longer than `timeout` seconds of
    processor time to validate does not fit. Remote schemas are not fetched.
    """

    name = "json_schema"

    def __init__(
        self, schema: Mapping[str, Any] | bool, field: str | None = None, timeout: float = 2.0, processes: int = 2
    ) -> None:
        check_installed(self.name, "jsonschema", "json-schema")
        super().__init__(timeout, processes, Counts(self.name, timeouts="answers that took too long to check"))
        self._schema = _check_schema(schema)
        self._field = field

    async def __call__(self, text: str, data: Data) -> float:
        gold = [] if self._field is None else [gold_of(data, self._field)]
        return float(await self._check(f"{__name__}:fits", text, self._schema, gold) or 0)


def fits(text: str, schema: str, gold: list[Any]) -> bool:
    """Return whether a text fits; runs in the sandbox. `gold` has the JSON that it must equal, or is empty."""
    block = last_block(text, ("json",))
    try:
        value = json.loads(text if block is None else block, parse_constant=_refuse_constant)
        schemas = (schema, *(json.dumps({"const": each}) for each in gold))
        return all(_build_validator(each).is_valid(value) for each in schemas)
    except (ValueError, RecursionError, MemoryError):  # not JSON, or too large or deep to parse
        return False


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


@lru_cache
def _build_validator(schema: str) -> Any:
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing.jsonschema import EMPTY_REGISTRY

    read = json.loads(schema)
    return validator_for(read, default=Draft202012Validator)(read, registry=EMPTY_REGISTRY)


def _check_schema(schema: Mapping[str, Any] | bool) -> str:
    """Return a valid schema as JSON text."""
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for

    read = schema if isinstance(schema, bool) else dict(schema)
    try:
        validator_for(read, default=Draft202012Validator).check_schema(read)
        return json.dumps(read)
    except SchemaError as error:
        fact = f"not a JSON schema: {error.message} (at {error.json_path})"
        raise BadInput(fact, key="schema", value=schema) from error
    except (TypeError, ValueError) as error:
        raise BadInput(f"not JSON: {error}", key="schema", value=schema) from error
