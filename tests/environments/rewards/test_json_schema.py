"""The answer is JSON that fits a schema."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from headrace.environments.rewards import JsonSchema
from headrace.environments.rewards.answers import last_block
from headrace.environments.sandbox import CallFailed
from tests.environments.heartbeat import ticks_during
from tests.environments.hostile import hostile
from tests.refusals import refused

pytestmark = pytest.mark.asyncio(loop_scope="module")

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
}


class Schemas:
    """Rewards that share one sandbox, since starting it takes longest."""

    def __init__(self) -> None:
        self._first = JsonSchema(True, processes=1)

    def __call__(self, schema: Any, field: str | None = None, timeout: float = 20.0) -> JsonSchema:
        reward = JsonSchema(schema, field, timeout)
        reward._sandbox = self._first._sandbox
        return reward


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def make() -> AsyncIterator[Schemas]:
    schemas = Schemas()
    yield schemas
    await schemas._first.close()


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"name": "Ada", "age": 36}', 1.0),
        ('\n {"name": "Ada", "age": 36} \n', 1.0),
        ('{"name": "Ada", "age": -1}', 0.0),
        ('{"name": "Ada", "age": "36"}', 0.0),
        ('{"name": "Ada", "age": true}', 0.0),  # a boolean is no integer in JSON
        ('{"name": "Ada"}', 0.0),
        ('{"name": "Ada", "age": 36', 0.0),
        ('{"name": "Ada", "age": NaN}', 0.0),
        ('{"name": "\\ud800", "age": 1}', 1.0),
        ('Here it is:\n```json\n{"name": "Ada", "age": 36}\n```\nAnything else?', 1.0),
        ('```json\n{"name": "Ada"}\n```\nor rather\n```json\n{"name": "Ada", "age": 36}\n```', 1.0),
        ('```json\n{"name": "Ada", "age": 36}\n```\nor rather\n```json\n{"name": "Ada"}\n```', 0.0),
        ('```json\n{"name": "```", "age": 36}\n```', 1.0),
    ],
)
async def test_the_text_or_its_last_json_block_must_fit(make: Schemas, text: str, score: float):
    assert await make(PERSON)(text, {}) == score


@pytest.mark.parametrize(
    ("text", "gold", "score"),
    [
        ("[1, 2.0]", [1, 2], 1.0),
        ("[2, 1]", [1, 2], 0.0),
        ("[true]", [1], 0.0),
        ('{"b": 1, "a": 2}', {"a": 2, "b": 1}, 1.0),
        ("null", None, 1.0),
    ],
)
async def test_the_json_must_also_equal_the_gold_answer_if_asked(make: Schemas, text: str, gold: Any, score: float):
    assert await make(True, "answer")(text, {"answer": gold}) == score


async def test_a_schema_may_refer_to_its_own_parts_and_name_its_draft(make: Schemas):
    tree = {"$ref": "#/$defs/node", "$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}}}}
    assert await make(tree)("[[], [[]]]", {}) == 1.0
    assert await make(tree)("[[], [1]]", {}) == 0.0
    old = {"$schema": "http://json-schema.org/draft-04/schema#", "maximum": 3, "exclusiveMaximum": True}
    assert await make(old)("3", {}) == 0.0


async def test_a_schema_on_another_machine_is_not_fetched(make: Schemas):
    with pytest.raises(CallFailed, match="Unresolvable"):
        await make({"$ref": "https://example.com/schema.json"})("{}", {})


@pytest.mark.parametrize(
    ("schema", "place"),
    [({"type": "text"}, "$.type"), ({"pattern": "("}, "$.pattern"), ({"const": object()}, "object")],
)
async def test_what_is_no_schema_is_refused_at_once(schema: dict[str, Any], place: str):
    with refused(key="schema", value=schema) as error:
        JsonSchema(schema)
    assert place in error.value.fact


async def test_a_pattern_in_a_schema_that_takes_for_ever_scores_nothing_and_is_counted(make: Schemas):
    reward = make({"pattern": "^(a+)+$"}, timeout=0.3)
    score, ticks = await ticks_during(reward('"' + "a" * 40 + '!"', {}))
    assert (score, reward.counts["timeouts"]) == (0.0, 1)
    assert ticks > 30


@hostile
async def test_no_text_is_too_much(make: Schemas, text: str):
    assert await make(PERSON)(text, {}) == 0.0


async def test_without_the_library_one_line_says_what_to_install():
    code = (
        "import sys; sys.modules['jsonschema'] = None\n"
        "from headrace.environments.rewards import JsonSchema\n"
        "try: JsonSchema({})\nexcept Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: ASYNC221
    assert done.stdout.startswith("BadInput ") and "headrace[json-schema]" in done.stdout


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("no block", None),
        ("```\none\n```", "one\n"),
        ("```python\none\n```\n```\ntwo\n```", "two\n"),
        ("```python\none\n```\n```sh\ntwo\n```", "one\n"),
        ("```\none", "one"),
        ("```", ""),
        ("~~~python\na = '```'\n~~~", "a = '```'\n"),
        ("````python\n```\nx\n```\n````", "```\nx\n```\n"),
        ("``` Python title=1\r\none\r\n```\r\n", "one\r\n"),
        ("in `line` and ```in line``` only", None),
    ],
)
async def test_the_last_block_of_a_language_is_found_as_markdown_has_it(text: str, block: str | None):
    assert last_block(text, ("python", "")) == block
