"""Real gold answers, rewritten and spoilt: 50 each of GSM8K, MATH and MATH-500, of all kinds.

`benchmarks/environments/math_answers.py` does the same with all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from benchmarks.environments.answer_forms import RIGHT, WRONG, Rule

from headrace.environments.rewards.math_rewards import Numeric, Symbolic
from headrace.environments.shipped.word_problems import gsm8k, math

pytestmark = pytest.mark.asyncio(loop_scope="module")
DATA = Path(__file__).parents[2] / "data"
ROWS: dict[str, list[dict[str, Any]]] = {
    "gsm8k": list(gsm8k(DATA / "gsm8k", "test")),
    "math": list(math(DATA / "math", "test")),
    "math500": list(math(DATA / "math500", "test")),
}
over_data = pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reward() -> AsyncIterator[Symbolic]:
    reward = Symbolic(timeout=60.0)
    yield reward
    await reward.close()


async def scores(reward: Symbolic, rows: list[dict[str, Any]], rules: dict[str, Rule]) -> dict[tuple[str, str], float]:
    """By gold answer and form."""
    written = {(row["answer"], name): rule(row["answer"]) for row in rows for name, rule in rules.items()}
    forms = {key: text for key, text in written.items() if text is not None}
    asked = (reward(f"So it is $\\boxed{{{text}}}$.", {"answer": gold}) for (gold, _), text in forms.items())
    return dict(zip(forms, await asyncio.gather(*asked), strict=True))


@over_data
async def test_every_answer_is_right_in_at_least_three_other_forms(reward: Symbolic, rows: list[dict[str, Any]]):
    assert len(rows) == 50
    found = await scores(reward, rows, RIGHT)
    assert {key for key, score in found.items() if score != 1.0} == set()
    assert min(sum(gold == row["answer"] for gold, _ in found) for row in rows) >= 3


@over_data
async def test_every_answer_is_wrong_once_it_is_spoilt(reward: Symbolic, rows: list[dict[str, Any]]):
    found = await scores(reward, rows, WRONG)
    assert {key for key, score in found.items() if score != 0.0} == set()
    assert len({gold for gold, _ in found}) == len({row["answer"] for row in rows})


@over_data
async def test_a_solution_scores_by_what_it_boxes_or_marks(reward: Symbolic, rows: list[dict[str, Any]]):
    for row in rows:
        if "boxed" in row["solution"]:
            assert await reward(row["solution"], row) == 1.0
        else:
            assert Numeric()(f"{row['solution']}\n#### {row['answer']}", row) == 1.0


async def test_numbers_alone_decide_about_every_answer_to_grade_school_problems():
    numeric = Numeric()
    for row in ROWS["gsm8k"]:
        for rules, score in ((RIGHT, 1.0), (WRONG, 0.0)):
            forms = [rule(row["answer"]) for rule in rules.values()]
            assert {numeric(f"#### {form.strip()}", row) for form in forms if form is not None} == {score}
