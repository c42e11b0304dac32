"""The rewards for the strict format, against numbers worked by hand."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from headrace.environments.rewards import build_reward
from headrace.environments.rewards.math_rewards import Correctness, reference_answer
from headrace.environments.rewards.strict_rewards import brevity, tokenizer_directory, utilisation
from headrace.environments.strict_format import StrictFormat
from headrace.environments.tables import DataError, checksum
from tests.environments.hackable.completions import STRICT, scores_of, thought, write_tokenizer
from tests.refusals import refused

pytestmark = pytest.mark.asyncio(loop_scope="module")  # starting a process takes longest: the tests share one

MALFORMED = ("", r"\boxed{4}", r"<think>so</think> 4", r"<think>so \boxed{4}", r"<think>so</think>\boxed{} ")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def correctness() -> AsyncIterator[Correctness]:
    reward = Correctness(timeout=60.0, processes=1)
    yield reward
    await reward.close()


async def test_the_format_is_one_block_of_thoughts_and_a_box_with_something_in_it():
    reward = build_reward("format_tag_reward")
    assert await scores_of(reward, [thought(3), *MALFORMED, thought(0)]) == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]


async def test_the_tags_are_those_that_the_sample_asks_for():
    other = StrictFormat("<redacted_thinking>", "</redacted_thinking>").write("so", "4")
    reward = build_reward("format_tag_reward")
    assert await scores_of(reward, [other, thought(1)]) == [0.0, 1.0]
    assert await scores_of(reward, [other, thought(1)], tags=["<redacted_thinking>", "</redacted_thinking>"]) == [
        1.0,
        0.0,
    ]


@pytest.mark.parametrize(
    ("reference", "right", "wrong"),
    [
        ("1234", ["1,234", r"\$1,234", "1234.0", "1234 dollars", "1234.001"], ["1235", "1234.01", "12 34", "-1234"]),
        ("0.5", [r"\frac{1}{2}", "1/2", ".5", "0.5000004"], ["0.500001", "5"]),
        ("x^2+3x+2", ["(x+1)(x+2)", "x^2 + 3x + 2"], ["(x+1)(x+3)"]),
        (r"\text{Monday}", ["monday", r"\text{Monday}"], ["Tuesday"]),
        (r"\left( 1, 2 \right)", ["(1,2)"], ["(2,1)", "12"]),
    ],
)
async def test_a_boxed_reference_is_correct_in_any_form(
    correctness: Correctness, reference: str, right: list[str], wrong: list[str]
):
    texts = [rf"so it is \boxed{{{answer}}}" for answer in (*right, *wrong)]
    expected = [1.0] * len(right) + [0.0] * len(wrong)
    assert await scores_of(correctness, [*texts, reference], answer=reference) == [*expected, 0.0]
    assert correctness.counts == {"timeouts": 0, "failures": 0}


async def test_a_reference_may_be_a_whole_solution_of_gsm8k_or_math():
    assert reference_answer("2*9 = <<2*9=18>>18\n#### 1,018") == "1,018"
    assert reference_answer(r"It is $\boxed{\frac{1}{2}}$.") == r"\frac{1}{2}"
    assert reference_answer(" 18 ") == "18"
    with pytest.raises(ValueError, match="answer"):
        reference_answer("####")


async def test_without_algebra_numbers_and_spelling_decide():
    reward = build_reward("gsm8k_correctness_reward", {"symbolic": False})
    texts = [r"\boxed{4.0}", r"\boxed{2\cdot 2}", r"\boxed{5}"]
    assert await scores_of(reward, texts) == [1.0, 0.0, 0.0]


async def test_what_cannot_be_read_as_mathematics_is_right_if_it_is_spelt_alike():
    correctness = Correctness(symbolic=False)
    pairs = [("\\frac{", " \\frac{ . "), ("\\frac{", "\\frac"), ("}{", "}{")]
    assert [await correctness.is_correct(*pair) for pair in pairs] == [True, False, True]


async def test_brevity_is_relative_to_the_mean_of_the_group():
    # mean of 2, 4, 6 and 12 is 6
    assert brevity([2, 4, 6, 12]) == pytest.approx([2 / 3, 1 / 3, 0.0, 0.0])
    assert brevity([0, 2]) == [1.0, 0.0]
    assert brevity([0, 0]) == [0.0, 0.0]
    assert brevity([5]) == [0.0]


async def test_a_malformed_completion_earns_no_brevity_and_leaves_the_mean_alone():
    reward = build_reward("length_penalty_reward")
    # mean of 2 and 6 is 4; with four lengths of 0 it would be 1.33, and they would earn 1
    assert await scores_of(reward, [thought(2), *MALFORMED[:4], thought(6)]) == [0.5, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert await scores_of(reward, [*MALFORMED]) == [0.0] * 5


async def test_malformed_completions_may_count_in_the_mean_and_score_0_all_the_same():
    reward = build_reward("length_penalty_reward", {"count_malformed": True})
    # mean of 1, 0, 0 and 7 is 2; without the malformed it is 4
    assert await scores_of(reward, [thought(1), *MALFORMED[:2], thought(7)]) == [0.5, 0.0, 0.0, 0.0]
    assert await scores_of(reward, [*MALFORMED]) == [0.0] * 5


async def test_groups_are_of_a_size_or_of_equal_prompts():
    completions = [thought(words) for words in (1, 3, 2, 6, 9)]
    prompts = ["a", "a", "b", "b", "a"]
    # by prompts: means 2, 4 and 9; by threes: mean 2 of 1, 3, 2, and 7.5 of what is left, 6 and 9
    assert await scores_of(build_reward("length_penalty_reward"), completions, prompts=prompts) == [
        0.5,
        0.0,
        0.5,
        0.0,
        0.0,
    ]
    by_size = build_reward("length_penalty_reward", {"group_size": 3})
    assert await scores_of(by_size, completions, prompts=prompts) == pytest.approx([0.5, 0.0, 0.0, 0.2, 0.0])
    with refused(key="group_size", value=0):
        build_reward("length_penalty_reward", {"group_size": 0})


async def test_length_is_in_tokens_without_special_ones_if_there_is_a_tokenizer(tmp_path: Path):
    write_tokenizer(tmp_path / "models" / "letters")
    kwargs = {"tokenizer_name": "letters", "cache_dir": str(tmp_path / "models")}
    reward = build_reward("length_penalty_reward", kwargs)
    texts = [STRICT.write("s", "4"), STRICT.write("s so", "4"), STRICT.write("sososo os", "4")]
    # 1, 3 and 8 tokens, mean 4; in words they would be 1, 1 and 2
    assert await scores_of(reward, texts) == [0.75, 0.25, 0.0]


async def test_a_tokenizer_that_is_nowhere_is_refused_with_where_it_was_looked_for(tmp_path: Path):
    with refused(key="tokenizer_name", value="./nowhere"):
        tokenizer_directory("./nowhere", tmp_path)


async def test_utilisation_is_relative_to_the_base_model_and_clipped():
    lengths = [(15, 10), (5, 10), (30, 10), (3, 0), (0, 0), (0, 10)]
    assert [utilisation(*pair) for pair in lengths] == [0.5, -0.5, 1.0, 1.0, 0.0, -1.0]


async def test_more_tokens_cost_where_the_base_model_was_right_and_pay_where_they_buy_a_solution(tmp_path: Path):
    records = [{"key": key, "correct": key == "easy", "thinking_tokens": 4, "tokens": 9} for key in ("easy", "hard")]
    path = tmp_path / "zero-shot.jsonl"
    path.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    tokenizer = write_tokenizer(tmp_path / "letters")
    kwargs = {"zero_shot_path": str(path), "tokenizer_name": str(tokenizer), "symbolic": False}
    reward = build_reward("token_utilisation_reward", kwargs)
    # of "so" each word is two tokens: 4, 6 and 20 are u = 0, .5 and 1
    completions = [thought(2), thought(3), thought(10), thought(10, "5"), thought(1), MALFORMED[1]]
    assert await scores_of(reward, completions, key="easy") == pytest.approx([0.0, -0.05, -0.1, -0.1, 0.0, 0.0])
    assert await scores_of(reward, completions, key="hard") == pytest.approx([0.0, 0.05, 0.1, 0.0, 0.0, 0.0])
    assert await scores_of(reward, completions) == [0.0] * 6
    assert reward.counts == {"without_record": 6}  # type: ignore[attr-defined]
    strong = build_reward("token_utilisation_reward", {**kwargs, "beta": 0.4})
    assert await scores_of(strong, completions[1:2], key="easy") == [-0.2]


async def test_an_example_without_a_name_is_found_by_its_prompt_and_answer(tmp_path: Path):
    path = tmp_path / "zero-shot.jsonl"
    path.write_text(json.dumps({"key": checksum("2+2?", "4"), "correct": True, "thinking_tokens": 4}))
    tokenizer = write_tokenizer(tmp_path / "letters")
    kwargs = {"zero_shot_path": path, "tokenizer_name": str(tokenizer), "symbolic": False}
    assert await scores_of(build_reward("token_utilisation_reward", kwargs), [thought(4)]) == [-0.1]


@pytest.mark.parametrize(
    ("verdicts", "line", "key"), [("", None, "zero_shot_path"), ("2", 1, None), ("true true false", 3, "key")]
)
async def test_a_record_that_cannot_be_used_is_refused(
    tmp_path: Path, verdicts: str, line: int | None, key: str | None
):
    path = tmp_path / "zero-shot.jsonl"
    lines = [f'{{"key": "a", "correct": {verdict}, "thinking_tokens": 1}}\n' for verdict in verdicts.split()]
    if lines:
        path.write_text("".join(lines))
    with refused(DataError, line=line, key=key, **({"file": path} if line else {"value": path})):
        build_reward("token_utilisation_reward", {"zero_shot_path": str(path), "tokenizer_name": "any"})
