"""The answer is JSON that a schema describes.

Parsing and validation run in a sandbox: a schema may have regular expressions, and JSON may be huge or nested without
end. Schemas on other machines are not fetched.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NoReturn

from headrace.environments.rewards.base import gold_of, warn_of_count
from headrace.environments.rewards.fences import last_block
from headrace.environments.sandbox import PATIENCE, CallTimeout, Sandbox
from headrace.errors import BadInput


class JsonSchema:
    """1.0 if the text, or the last block in it that is fenced as `json`, is JSON which fits the schema, else 0.0.

    With `field`, the JSON must also equal what the task has there. An answer that takes longer than `timeout`
    seconds of the processor to judge does not fit; `timeouts` counts those.
    """

    name = "json_schema"
    bounded = True

    def __init__(
        self, schema: Mapping[str, Any] | bool, field: str | None = None, timeout: float = 2.0, processes: int = 2
    ) -> None:
        self.timeouts = 0
        self._schema = _checked(schema)
        self._field = field
        self._timeout = timeout
        self._sandbox = Sandbox(processes)

    async def __call__(self, text: str, data: Mapping[str, Any]) -> float:
        gold = [] if self._field is None else [gold_of(data, self._field)]
        try:
            call = f"{__name__}:fits", text, self._schema, gold
            return float(await self._sandbox.call(*call, timeout=self._timeout, patience=PATIENCE))
        except CallTimeout:
            self.timeouts += 1
            warn_of_count(self.name, "answers that took too long to check", self.timeouts)
            return 0.0

    async def close(self) -> None:
        await self._sandbox.close()


def fits(text: str, schema: str, gold: list[Any]) -> bool:
    """What runs in the sandbox. `gold` has what the answer must be, or nothing."""
    block = last_block(text, ("json",))
    try:
        value = json.loads(text if block is None else block, parse_constant=_refuse)
        return all(validator.is_valid(value) for validator in (_validator(schema), *map(_equals, gold)))
    except (ValueError, RecursionError, MemoryError):  # no JSON, or more of it than can be read
        return False


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


@lru_cache
def _validator(schema: str) -> Any:
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing.jsonschema import EMPTY_REGISTRY

    read = json.loads(schema)
    return validator_for(read, default=Draft202012Validator)(read, registry=EMPTY_REGISTRY)


def _equals(gold: Any) -> Any:
    return _validator(json.dumps({"const": gold}))


def _checked(schema: Mapping[str, Any] | bool) -> str:
    """The schema as a text, if it is one."""
    try:
        from jsonschema.exceptions import SchemaError
        from jsonschema.validators import Draft202012Validator, validator_for
    except ImportError as error:
        fact, fix = "the library jsonschema is not installed", "Run pip install 'headrace[json-schema]'."
        raise BadInput(fact, key="reward", value=JsonSchema.name, fix=fix) from error
    read = schema if isinstance(schema, bool) else dict(schema)
    try:
        validator_for(read, default=Draft202012Validator).check_schema(read)
        return json.dumps(read)
    except SchemaError as error:
        fact = f"not a JSON schema: {error.message} (at {error.json_path})"
        raise BadInput(fact, key="schema", value=schema) from error
    except (TypeError, ValueError) as error:
        raise BadInput(f"not JSON: {error}", key="schema", value=schema) from error
