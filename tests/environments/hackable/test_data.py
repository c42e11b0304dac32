"""Samples of the providers that ship."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.environments.hackable import TrainingSample, build_data_provider
from headrace.environments.strict_format import format_of
from headrace.environments.tables import DataError
from tests.environments.hackable.completions import STRICT
from tests.refusals import refused

DATA = Path(__file__).parents[2] / "data"
GSM8K, MATH = str(DATA / "gsm8k"), str(DATA / "math")


def samples(provider: str, seed: int = 0, /, **kwargs: Any) -> list[TrainingSample]:
    return list(build_data_provider(provider, kwargs, seed))


def test_gsm8k_has_the_number_as_its_answer_and_asks_for_the_strict_format():
    sample = samples("gsm8k", source=GSM8K, split="test", limit=2)[1]
    assert sample.answer == "8"
    assert sample.prompt.startswith(f"{STRICT.instructions}\n\nA candle melts by 2 centimeters every hour")
    assert sample.info["solution"].startswith("The candle burns for 5 - 1 = 4 hours.")


def test_math_is_chosen_by_level():
    found = samples("math", source=MATH, split="test", levels=[1, 2])
    assert {sample.info["level"] for sample in found} == {1, 2}
    assert all(sample.answer for sample in found)


def test_the_tags_of_a_sample_are_those_that_its_prompt_asks_for():
    tags = ["<redacted_thinking>", "</redacted_thinking>"]
    (sample,) = samples("arithmetic", num_tasks=1, tags=tags)
    assert tags[0] in sample.prompt and "<think>" not in sample.prompt
    assert format_of(sample.info).opening == tags[0]
    with refused(key="tags", value=["<a>"]):
        samples("arithmetic", num_tasks=1, tags=["<a>"])


def test_an_example_keeps_its_name_when_it_is_asked_in_other_words():
    asked = [samples("arithmetic", num_tasks=3, instructions=words) for words in (None, "Be quick.", "")]
    assert [sample.prompt for sample in asked[1]] == [f"Be quick.\n\n{sample.prompt}" for sample in asked[2]]
    assert len({sample.key for sample in asked[0]}) == 3
    assert [[sample.key for sample in several] for several in asked[1:]] == [[s.key for s in asked[0]]] * 2


@pytest.mark.parametrize("name", ["gsm8k", "math"])
def test_a_shuffle_depends_on_the_seed_alone(name: str):
    source = {"gsm8k": GSM8K, "math": MATH}[name]
    plain, first, again, other = (
        samples(name, seed, source=source, split="test", shuffle=shuffle)
        for seed, shuffle in ((1, False), (1, True), (1, True), (2, True))
    )
    assert plain != first == again != other
    assert sorted(plain, key=lambda s: s.key) == sorted(first, key=lambda s: s.key)
    assert samples(name, 1, source=source, split="test", shuffle=True, limit=5) == first[:5]


def test_arithmetic_is_right_and_the_same_for_a_seed():
    found = samples("arithmetic", 3, num_tasks=50, operations="+-*", instructions="")
    assert found == samples("arithmetic", 3, num_tasks=50, operations="+-*", instructions="")
    assert found != samples("arithmetic", 4, num_tasks=50, operations="+-*", instructions="")
    assert all(str(eval(sample.prompt)) == sample.answer for sample in found)
    held_out = samples("arithmetic", 3, split="eval", num_tasks=50, operations="+-*", instructions="")
    assert not {sample.prompt for sample in found} & {sample.prompt for sample in held_out}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_local_file_has_its_columns_mapped_and_the_others_in_info(tmp_path: Path, suffix: str):
    rows = [{"q": f"{n}+{n}?", "gold": 2 * n, "tests": ["a"], "key": n} for n in range(3)]
    path = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    found = samples("local", path=str(path), columns={"question": "q", "answer": "gold"}, instructions="")
    assert [(sample.prompt, sample.answer, sample.key) for sample in found] == [
        (f"{n}+{n}?", str(2 * n), str(n)) for n in range(3)
    ]
    assert found[0].info == {"tests": ["a"], "key": "0", "question": "0+0?"}


def test_local_rows_without_an_answer_have_an_empty_one_and_without_a_question_are_refused(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "Say hello."}\n{"text": "no"}\n')
    provider = build_data_provider("local", {"path": str(path), "instructions": ""})
    assert next(iter(provider)).answer == ""
    with refused(DataError, file=str(path), line=2, key="question"):
        list(provider)
    with refused(DataError, file=str(tmp_path / "nowhere.jsonl")):
        samples("local", path=str(tmp_path / "nowhere.jsonl"))


def test_a_saved_dataset_is_read_by_its_name(tmp_path: Path):
    path = tmp_path / "set" / "test.parquet"
    path.parent.mkdir()
    pq.write_table(pa.Table.from_pylist([{"question": "1+1?", "answer": "2"}]), path)
    (sample,) = samples("huggingface", name=str(path.parent), split="test", instructions="")
    assert (sample.prompt, sample.answer) == ("1+1?", "2")
