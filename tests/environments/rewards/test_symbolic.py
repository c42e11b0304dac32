"""Answers compared as mathematics, in processes that are killed when they take too long."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from headrace.environments.rewards.math_rewards import Symbolic
from headrace.environments.sandbox import CallFailed
from tests.environments.heartbeat import ticks_during
from tests.environments.hostile import hostile
from tests.refusals import refused

pytestmark = pytest.mark.asyncio(loop_scope="module")  # starting a process takes longest: the tests share two

NOWHERE = "headrace.no_such_module:same_answer"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reward() -> AsyncIterator[Symbolic]:
    reward = Symbolic(timeout=60.0)
    yield reward
    await reward.close()


async def test_numbers_and_spelling_need_no_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headrace.environments.rewards.math_rewards.ALGEBRA", NOWHERE)
    reward = Symbolic()
    scores = {("0.5", r"\frac12"): 1.0, ("C", r"\text{(C)}"): 1.0, ("1,2", "3"): 0.0, ("x^2", "x^{2}"): 1.0}
    for (answer, gold), score in scores.items():
        assert await reward(rf"\boxed{{{answer}}}", {"answer": gold}) == score


async def test_algebra_decides_in_a_process_of_its_own(reward: Symbolic):
    assert await reward(r"so \boxed{(x+1)(x+2)}", {"answer": "x^2+3x+2"}) == 1.0
    assert await reward(r"so \boxed{(x+1)(x+3)}", {"answer": "x^2+3x+2"}) == 0.0
    assert await reward("no box: 2", {"answer": "2"}) == 0.0
    assert (reward.counts["timeouts"], reward.counts["failures"]) == (0, 0)


async def test_a_letter_after_a_number_is_a_unit_unless_the_gold_answer_has_letters(reward: Symbolic):
    scores = {("18 m", "18"): 1.0, ("18 m", "18m"): 1.0, ("18", "18m"): 0.0, ("m+17m", "18m"): 1.0, ("18 x", "18"): 0.0}
    for (answer, gold), score in scores.items():
        assert await reward(rf"\boxed{{{answer}}}", {"answer": gold}) == score


async def test_what_is_not_defined_is_wrong_and_no_failure(reward: Symbolic):
    for answer in (r"\frac{1}{0}", r"\log 0", "0^{-1}", r"\frac{0}{0}", r"\tan 90^\circ"):
        assert [await reward(rf"\boxed{{{answer}}}", {"answer": gold}) for gold in (r"\sqrt2", "x")] == [0.0, 0.0]
    assert reward.counts["failures"] == 0


@pytest.mark.parametrize(
    "text", [r"\boxed{1} or \boxed{2}", r"\boxed{1 \text{ or } 2}", r"\boxed{1, 2}", r"\boxed{\pm 2}"]
)
async def test_who_lists_several_answers_has_not_answered(reward: Symbolic, text: str):
    assert [await reward(text, {"answer": gold}) for gold in ("1", "2")] == [0.0, 0.0]


async def test_an_endless_comparison_scores_nothing_and_blocks_no_other():
    reward = Symbolic(timeout=0.5, processes=1)
    score, ticks = await ticks_during(reward(r"\boxed{9^{9^{9^{9}}}}", {"answer": r"\sqrt2"}))
    assert (score, reward.counts["timeouts"], reward.counts["failures"]) == (0.0, 1, 0)
    assert ticks > 20
    await reward.close()


@hostile
async def test_no_text_makes_it_fail_or_holds_the_loop_up(reward: Symbolic, text: str):
    for answer in (text, rf"\boxed{{{text}}}"):
        assert await reward(answer, {"answer": r"\sqrt2"}) == 0.0


@pytest.mark.full
@pytest.mark.parametrize(
    "answer",
    [
        r"\sum_{i=1}^{10^{12}} \sin(i)",
        r"\prod_{n=1}^{10^9} n",
        "(10^{10})!",
        "99999999!",
        r"\binom{10^{9}}{5 \cdot 10^8}",
        "2^{10000000000}",
        r"\int_0^1 x^x e^{\sin(x^x)} dx",
        r"\lim_{x\to 0} \frac{\sin(\tan(\sin x))}{x^{99}}",
        "x^{" * 38 + "2" + "}" * 38,
        r"\frac{1}{1+" * 38 + "2" + "}" * 38,
        "+".join(f"x_{{{number}}}^{{{number}}}" for number in range(130)),
    ],
    ids=lambda answer: f"{answer[:20]}...",
)
async def test_algebra_without_end_scores_nothing_and_the_next_answer_is_compared(answer: str):
    reward = Symbolic(timeout=2.0, processes=1)
    score, ticks = await ticks_during(reward(rf"\boxed{{{answer}}}", {"answer": r"\sqrt2"}))
    assert score == 0.0
    assert ticks > 20
    assert await reward(r"\boxed{\sqrt{8}/2}", {"answer": r"\sqrt2"}) == 1.0
    await reward.close()


async def test_a_broken_installation_is_an_error_and_no_wrong_answer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headrace.environments.rewards.math_rewards.ALGEBRA", NOWHERE)
    reward = Symbolic()
    with pytest.raises(CallFailed, match="no_such_module"):
        await reward(r"\boxed{x+x}", {"answer": "2x"})
    await reward.close()


async def test_without_the_library_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "math_verify" else found(name))
    with refused(key="reward", value="symbolic") as error:
        Symbolic()
    assert "headrace[math]" in error.value.fix
