"""The answer has a form."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from headrace.environments.rewards import Pattern
from tests.environments.heartbeat import ticks_during
from tests.environments.hostile import hostile
from tests.refusals import refused

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Patterns:
    """Patterns that share one sandbox, since starting it takes longest."""

    def __init__(self) -> None:
        self._first = Pattern("", timeout=20.0, processes=1)

    def __call__(self, *args: object, **options: object) -> Pattern:
        pattern = Pattern(*args, **{"timeout": 20.0, **options})  # type: ignore[arg-type]
        pattern._sandbox = self._first._sandbox
        return pattern


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def make() -> AsyncIterator[Patterns]:
    patterns = Patterns()
    yield patterns
    await patterns._first.close()


@pytest.mark.parametrize(
    ("pattern", "text", "score"),
    [
        (r"\d+", "it is 42.", 1.0),
        (r"\d+", "it is nothing", 0.0),
        (r"^\d+$", "12\n34", 0.0),
        (r"(?m)^\d+$", "12\n34", 1.0),
        ("", "", 1.0),
        ("\ud800", "a\ud800b", 1.0),
    ],
)
async def test_the_pattern_is_looked_for_in_the_text(make: Patterns, pattern: str, text: str, score: float):
    assert await make(pattern)(text, {}) == score


async def test_the_whole_text_must_fit_if_asked(make: Patterns):
    assert await make(r"\d+", full=True)("42", {}) == 1.0
    assert await make(r"\d+", full=True)("42.", {}) == 0.0


@pytest.mark.parametrize(
    ("pattern", "text", "gold", "score"),
    [
        (r"Answer: (\w+)", "Answer: blue", "blue", 1.0),
        (r"Answer: (\w+)", "Answer: red. Answer: blue", "blue", 0.0),  # the first match counts
        (r"Answer: (\w+)", "blue", "blue", 0.0),
        (r"\d+", "it is 42", 42, 1.0),
        (r"(\d)?!", "!", "None", 0.0),  # a group that took no part is no text
    ],
)
async def test_what_was_found_must_be_the_gold_answer(
    make: Patterns, pattern: str, text: str, gold: object, score: float
):
    assert await make(pattern, "answer")(text, {"answer": gold}) == score


@pytest.mark.parametrize("pattern", ["(", "[z-a]", "a{2,1}", "(?P<x>a)(?P<x>b)"])
async def test_a_pattern_that_does_not_compile_is_refused_at_once(pattern: str):
    with refused(key="pattern", value=pattern):
        Pattern(pattern)


async def test_a_text_that_takes_for_ever_scores_nothing_and_is_counted(make: Patterns):
    pattern = make("(a+)+$", timeout=0.3)
    score, ticks = await ticks_during(pattern("a" * 40 + "!", {}))
    assert (score, pattern.counts["timeouts"]) == (0.0, 1)
    assert ticks > 30
    assert await pattern("aaa", {}) == 1.0
    assert pattern.counts["timeouts"] == 1


@hostile
async def test_no_text_is_too_much(make: Patterns, text: str):
    assert await make(r"final answer: (\w+)")(text, {}) == 0.0
