"""Reward for an answer that is JSON and fits a schema.

Parsing and validation run in a sandbox: a schema may have regular expressions, and JSON may be huge or deeply nested.
Remote schemas are not fetched.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NoReturn

from headrace.environments.rewards.answers import last_block
from headrace.environments.rewards.base import Counts, Data, SandboxReward, check_installed, gold_of
from headrace.environments.rewards.registry import register_with_part
from headrace.errors import BadInput


@register_with_part("json_schema_reward")
class JsonSchema(SandboxReward):
    """1.0 if the text, or its last fenced `json` block, is JSON that fits the schema, else 0.0.

    With `field`, the JSON must also equal that field of the task. An answer that takes longer than `timeout` seconds of
    processor time to validate does not fit.
    """

    name = "json_schema"

    def __init__(
        self, schema: Mapping[str, Any] | bool, field: str | None = None, timeout: float = 2.0, processes: int = 2
    ) -> None:
        check_installed(self.name, "jsonschema", "json-schema")
        super().__init__(timeout, processes, Counts(self.name, timeouts="answers that took too long to check"))
        self._schema = _checked(schema)
        self._field = field

    async def __call__(self, text: str, data: Data) -> float:
        gold = [] if self._field is None else [gold_of(data, self._field)]
        return float(await self._check(f"{__name__}:fits", text, self._schema, gold) or 0)


def fits(text: str, schema: str, gold: list[Any]) -> bool:
    """Return whether a text fits; runs in the sandbox. `gold` has the JSON that it must equal, or is empty."""
    block = last_block(text, ("json",))
    try:
        value = json.loads(text if block is None else block, parse_constant=_refuse)
        schemas = (schema, *(json.dumps({"const": each}) for each in gold))
        return all(_validator(each).is_valid(value) for each in schemas)
    except (ValueError, RecursionError, MemoryError):  # not JSON, or too large or deep to parse
        return False


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


@lru_cache
def _validator(schema: str) -> Any:
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing.jsonschema import EMPTY_REGISTRY

    read = json.loads(schema)
    return validator_for(read, default=Draft202012Validator)(read, registry=EMPTY_REGISTRY)


def _checked(schema: Mapping[str, Any] | bool) -> str:
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
