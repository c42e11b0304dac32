"""Rows of files, directories and Hugging Face datasets, and the tasks that GSM8K and MATH make of theirs."""

import itertools
import json
import logging
import sys
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.environments.arguments import BadArgument
from headrace.environments.shipped.word_problems import SUBJECTS, gsm8k, math
from headrace.environments.tables import DataError, read_rows
from tests.refusals import refused

DATA = Path(__file__).parents[1] / "data"
ROWS = [{"problem": f"{n}+{n}?", "solution": rf"It is $\boxed{{{2 * n}}}$.", "level": n} for n in range(5)]
TASK = {"problem": "1+1?", "solution": r"$\boxed{2}$", "level": "Level 3", "type": "Algebra"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write_lines(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_file_gives_its_rows_in_order(tmp_path: Path, name: str):
    write = {".jsonl": lambda path: write_lines(path, *ROWS), ".parquet": lambda path: write_parquet(path, ROWS)}
    path = tmp_path / name
    write[path.suffix](path)
    assert list(read_rows(path)) == ROWS
    assert list(read_rows(str(path), limit=2)) == ROWS[:2]


@pytest.mark.parametrize("kind", ["files", "parquet", "saved", "saved splits", "understood"])
def test_a_directory_gives_the_rows_of_a_split(tmp_path: Path, kind: str):
    directory = tmp_path / "set"
    if kind == "files":
        write_lines(directory / "train.jsonl", *ROWS)
        write_lines(directory / "test.jsonl", *ROWS[:1])
    elif kind == "parquet":
        write_parquet(directory / "train.parquet", ROWS)
        write_parquet(directory / "test.parquet", ROWS[:1])
    elif kind == "understood":
        write_parquet(directory / "data" / "train-00000-of-00001.parquet", ROWS)
        write_parquet(directory / "data" / "test-00000-of-00001.parquet", ROWS[:1])
    else:
        dataset = datasets.Dataset.from_list(ROWS, split="train")
        splits = datasets.DatasetDict({"train": dataset, "test": dataset.select([0])})
        (splits if kind == "saved splits" else dataset).save_to_disk(directory)
    assert list(read_rows(directory, "train")) == ROWS
    if kind != "saved":
        assert list(read_rows(directory, "test")) == ROWS[:1]


def test_a_directory_without_a_split_is_all_its_files(tmp_path: Path):
    write_lines(tmp_path / "b.jsonl", *ROWS[2:])
    write_parquet(tmp_path / "a.parquet", ROWS[:2])
    assert list(read_rows(tmp_path)) == ROWS


def test_a_subset_is_a_directory_or_one_that_the_library_knows(tmp_path: Path):
    write_lines(tmp_path / "hard" / "train.jsonl", *ROWS[3:])
    assert list(read_rows(tmp_path, "train", "hard")) == ROWS[3:]
    write_lines(tmp_path / "known" / "easy.jsonl", *ROWS[:1])
    (tmp_path / "known" / "README.md").write_text("---\nconfigs:\n- config_name: e\n  data_files: easy.jsonl\n---\n")
    assert list(read_rows(tmp_path / "known", "train", "e")) == ROWS[:1]


def test_columns_are_renamed(tmp_path: Path):
    path = write_lines(tmp_path / "a.jsonl", *ROWS)
    first = next(read_rows(path, columns={"question": "problem"}))
    assert first == {"question": "0+0?", "solution": r"It is $\boxed{0}$.", "level": 0}
    with refused(DataError, file=str(path), line=1, key="columns.question", value="prolbem") as error:
        next(read_rows(path, columns={"question": "prolbem"}))
    assert "problem" in str(error.value.fix)


def test_a_bad_row_names_its_file_and_line(tmp_path: Path):
    with refused(DataError, file=str(tmp_path / "a.jsonl"), line=3):
        list(read_rows(write_lines(tmp_path / "a.jsonl", {"a": 1}, "", "{no")))
    with refused(DataError, file=str(tmp_path / "b.jsonl"), line=1, value=[1]):
        list(read_rows(write_lines(tmp_path / "b.jsonl", [1])))
    with refused(DataError, file=tmp_path / "none.jsonl"):
        list(read_rows(tmp_path / "none.jsonl"))
    (tmp_path / "empty").mkdir()
    with refused(DataError, file=tmp_path / "empty"):
        list(read_rows(tmp_path / "empty"))


def test_an_unreachable_hub_is_an_error_that_names_the_dataset(monkeypatch: pytest.MonkeyPatch):
    for library in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(library, "HF_HUB_OFFLINE", True)
    with refused(DataError, file="dataset 'openai/gsm8k', subset 'main', split 'train'"):
        next(gsm8k())
    with refused(DataError, file="dataset 'EleutherAI/hendrycks_math', subset 'algebra', split 'test'"):
        next(math(split="test"))
    title = "dataset 'EleutherAI/hendrycks_math', subset 'counting_and_probability', split 'train'"
    with refused(DataError, file=title):
        next(math(subjects=["counting and probability"]))


def test_without_the_library_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with refused(DataError) as error:
        next(gsm8k())
    assert "headrace[datasets]" in str(error.value.fix)


def test_a_grade_school_task_has_the_number_for_its_answer():
    rows = list(gsm8k(DATA / "gsm8k", "test"))
    assert len(rows) == 50
    assert all(row["answer"].lstrip("-").isdecimal() and set(row) == {"question", "answer", "solution"} for row in rows)
    assert "2125" in {row["answer"] for row in rows}  # 2,125 in the data
    assert list(gsm8k(DATA / "gsm8k", "test", limit=3)) == rows[:3]


def test_a_solution_without_its_mark_is_an_error(tmp_path: Path):
    path = write_lines(tmp_path / "train.jsonl", {"question": "?", "answer": "just 5"})
    with refused(DataError, file=str(path), line=1, key="answer"):
        list(gsm8k(tmp_path))
    write_lines(path, {"question": "?", "answer": "####  "})
    with refused(DataError, file=str(path), line=1, key="answer"):
        list(gsm8k(tmp_path))
    write_lines(path, {"q": "?", "answer": "2+3=<<2+3=5>>5.\n#### 5"})
    with refused(DataError, line=1, key="question") as error:
        list(gsm8k(tmp_path))
    assert "answer, q" in error.value.fact and "columns" in str(error.value.fix)
    assert list(gsm8k(tmp_path, columns={"question": "q"})) == [{"question": "?", "answer": "5", "solution": "2+3=5."}]


def test_competition_tasks_are_the_same_whatever_their_columns_are_called():
    for name in ("math", "math500"):
        rows = list(math(DATA / name, "test"))
        assert len(rows) == 50
        assert {row["subject"] for row in rows} == set(SUBJECTS)
        assert {row["level"] for row in rows} == {1, 2, 3, 4, 5}
        assert all(rf"\boxed{{{row['answer']}}}" in row["solution"] for row in rows)


def test_levels_subjects_and_a_limit_choose_among_them():
    rows = list(math(DATA / "math", "test"))
    chosen = [row for row in rows if row["level"] in (1, 2) and row["subject"] == "Counting & Probability"]
    assert list(math(DATA / "math", "test", levels=[1, 2], subjects=["counting_and_probability"])) == chosen
    assert list(math(DATA / "math", "test", limit=7)) == rows[:7]
    easy = itertools.islice((row for row in rows if row["level"] == 1), 2)
    assert list(math(DATA / "math", "test", levels=[1], limit=2)) == list(easy)
    with refused(BadArgument, key="subjects", value="Arithmetic") as error:
        next(math(DATA / "math", "test", subjects=["Arithmetic"]))
    assert all(subject in str(error.value.fix) for subject in SUBJECTS)


@pytest.mark.parametrize("levels", [5, "5", ["5"], [0], [6], [4.5]])
def test_levels_that_are_no_list_of_levels_are_refused(levels: Any):
    with refused(BadArgument, key="levels", value=levels):
        next(math(DATA / "math", "test", levels=levels))


@pytest.mark.parametrize("subjects", ["Algebra", [1]])
def test_subjects_that_are_no_list_of_names_are_refused(subjects: Any):
    with refused(BadArgument, key="subjects", value=subjects):
        next(math(DATA / "math", "test", subjects=subjects))


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_split_that_a_directory_does_not_have_is_refused_with_those_it_has(tmp_path: Path, is_saved: bool):
    directory = tmp_path / "set"
    if is_saved:
        parts = {name: datasets.Dataset.from_list(ROWS) for name in ("train", "test")}
        datasets.DatasetDict(parts).save_to_disk(directory)
    else:  # which the library could not read together
        write_lines(directory / "train.jsonl", {"a": 1})
        write_lines(directory / "test.jsonl", {"b": "x"})
    with refused(DataError, key="split", value="tset") as error:
        next(math(directory, "tset"))
    assert "train, test" in str(error.value.fix)


def test_a_part_of_a_split_is_the_librarys_to_read():
    assert list(gsm8k(DATA / "gsm8k", "test[:3]")) == list(gsm8k(DATA / "gsm8k", "test", limit=3))


def test_an_unknown_level_is_none_and_an_impossible_one_an_error(tmp_path: Path):
    write_lines(tmp_path / "train.jsonl", TASK, {**TASK, "level": "Level ?"}, {**TASK, "level": 5})
    assert [row["level"] for row in math(tmp_path)] == [3, None, 5]
    assert [row["level"] for row in math(tmp_path, levels=[5])] == [5]
    write_lines(tmp_path / "train.jsonl", {**TASK, "level": "hard"})
    with refused(DataError, line=1, key="level", value="hard"):
        list(math(tmp_path))


def test_a_solution_that_boxes_nothing_is_left_out_and_said_so(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    write_lines(tmp_path / "train.jsonl", {**TASK, "solution": r"so $\boxed{}$."}, TASK)
    with caplog.at_level(logging.WARNING):
        assert [row["answer"] for row in math(tmp_path)] == ["2"]
    assert "train.jsonl:1" in caplog.text


@pytest.mark.parametrize(("column", "columns"), [("question", None), ("q", {"question": "q"})])
def test_a_null_is_reported_by_the_name_that_the_file_has_for_it(
    tmp_path: Path, column: str, columns: dict[str, str] | None
):
    write_lines(tmp_path / "train.jsonl", {column: None, "answer": "#### 1"})
    with refused(DataError, line=1, key=column, value=None):
        next(gsm8k(tmp_path, columns=columns))


def test_a_missing_column_is_named_with_those_that_there_are(tmp_path: Path):
    row = {"exercise": "1+1?", **{name: value for name, value in TASK.items() if name != "problem"}}
    write_lines(tmp_path / "train.jsonl", row)
    with refused(DataError, line=1, key="question") as error:
        list(math(tmp_path))
    assert "exercise, level" in error.value.fact
    assert next(math(tmp_path, columns={"question": "exercise"}))["question"] == "1+1?"
    write_lines(tmp_path / "train.jsonl", {**TASK, "problem": 5})
    with refused(DataError, line=1, key="question", value=5):
        list(math(tmp_path))


AIME = [
    {"id": "2024-I-1", "problem": "How many?", "answer": 0, "year": 2024},
    {"id": "2024-I-2", "problem": "And then?", "answer": "033", "solution": r"so \boxed{33}.", "year": 2024},
    {"ID": "1983-1", "Question": "How far?", "Answer": 60, "Year": 1983, "Part": None},
    {"problem": "How long?", "solution": r"so \boxed{204}."},
]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_problems_of_aime_have_numbers_as_answers_and_neither_level_nor_subject(tmp_path: Path, suffix: str):
    path = tmp_path / f"aime.{suffix}"
    if suffix == "jsonl":
        write_lines(path, *AIME)
    else:  # one type for each column, as Arrow wants it, and floats where some answers are missing
        rows = [{**row, "answer": None if "answer" not in row else float(row["answer"])} for row in AIME]
        pq.write_table(
            pa.Table.from_pylist([{name: row.get(name) for name in set().union(*AIME)} for row in rows]), path
        )
    rows = list(math(path))
    assert [row["question"] for row in rows] == ["How many?", "And then?", "How far?", "How long?"]
    assert [int(row["answer"]) for row in rows] == [0, 33, 60, 204]
    assert ["solution" in row for row in rows] == [False, True, False, True]
    assert [(row.get("id"), row.get("year")) for row in rows[1:]] == [
        ("2024-I-2", 2024),
        ("1983-1", 1983),
        (None, None),
    ]
    assert all(row["level"] is row["subject"] is None for row in rows)


@pytest.mark.parametrize(("filters", "key"), [({"levels": [5]}, "levels"), ({"subjects": ["Algebra"]}, "subjects")])
def test_problems_without_levels_cannot_be_chosen_by_them(tmp_path: Path, filters: dict[str, Any], key: str):
    write_lines(tmp_path / "aime.jsonl", *AIME)
    with refused(DataError, line=1, key=key):
        list(math(tmp_path / "aime.jsonl", **filters))


def test_a_problem_without_an_answer_and_a_solution_is_refused(tmp_path: Path):
    write_lines(tmp_path / "train.jsonl", {"problem": "How many?"})
    with refused(DataError, line=1, key="answer"):
        list(math(tmp_path))
