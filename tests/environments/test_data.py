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

from headrace.environments.data.gsm8k import gsm8k
from headrace.environments.data.math import SUBJECTS, math
from headrace.environments.data.rows import read_rows
from headrace.environments.data.tables import DataError
from headrace.errors import BadInput

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
    with pytest.raises(DataError, match=r"line 1: has no 'prolbem', which columns.question names.*'problem'"):
        next(read_rows(path, columns={"question": "prolbem"}))


def test_a_bad_row_names_its_file_and_line(tmp_path: Path):
    with pytest.raises(DataError, match=r"a\.jsonl, line 3: not valid JSON"):
        list(read_rows(write_lines(tmp_path / "a.jsonl", {"a": 1}, "", "{no")))
    with pytest.raises(DataError, match=r"b\.jsonl, line 1: expected an object with columns, not \[1\]"):
        list(read_rows(write_lines(tmp_path / "b.jsonl", [1])))
    with pytest.raises(DataError, match=r"none\.jsonl: no such file"):
        list(read_rows(tmp_path / "none.jsonl"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"has no \.jsonl or \.parquet file"):
        list(read_rows(tmp_path / "empty"))


def test_an_unreachable_hub_is_an_error_that_names_the_dataset(monkeypatch: pytest.MonkeyPatch):
    for library in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(library, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        DataError, match=r"'openai/gsm8k', subset 'main', split 'train'.*hub cannot be reached.*directory"
    ):
        next(gsm8k())
    with pytest.raises(DataError, match=r"'EleutherAI/hendrycks_math', subset 'algebra', split 'test'"):
        next(math(split="test"))
    with pytest.raises(DataError, match=r"subset 'counting_and_probability'"):
        next(math(subjects=["counting and probability"]))


def test_without_the_library_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'headrace\[datasets\]'"):
        next(gsm8k())


def test_a_grade_school_task_has_the_number_for_its_answer():
    rows = list(gsm8k(DATA / "gsm8k", "test"))
    assert len(rows) == 50
    assert all(row["answer"].lstrip("-").isdecimal() and set(row) == {"question", "answer", "solution"} for row in rows)
    assert "2125" in {row["answer"] for row in rows}  # 2,125 in the data
    assert list(gsm8k(DATA / "gsm8k", "test", limit=3)) == rows[:3]


def test_a_solution_without_its_mark_is_an_error(tmp_path: Path):
    path = write_lines(tmp_path / "train.jsonl", {"question": "?", "answer": "just 5"})
    with pytest.raises(DataError, match=r"train\.jsonl, line 1: no answer follows #### in 'just 5'"):
        list(gsm8k(tmp_path))
    write_lines(path, {"question": "?", "answer": "####  "})
    with pytest.raises(DataError, match="no answer follows"):
        list(gsm8k(tmp_path))
    write_lines(path, {"q": "?", "answer": "2+3=<<2+3=5>>5.\n#### 5"})
    with pytest.raises(DataError, match=r"line 1: has no 'question'; its columns are \['answer', 'q'\].*columns"):
        list(gsm8k(tmp_path))
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
    with pytest.raises(BadInput, match=r"subjects: no subject 'Arithmetic'; there is Algebra, Counting"):
        next(math(DATA / "math", "test", subjects=["Arithmetic"]))


@pytest.mark.parametrize("levels", [5, "5", ["5"], [0], [6], [4.5]])
def test_levels_that_are_no_list_of_levels_are_refused(levels: Any):
    with pytest.raises(BadInput, match=r"levels: expected a list of numbers from 1 to 5, as \[4, 5\], not "):
        next(math(DATA / "math", "test", levels=levels))


@pytest.mark.parametrize("subjects", ["Algebra", [1]])
def test_subjects_that_are_no_list_of_names_are_refused(subjects: Any):
    with pytest.raises(BadInput, match=r'subjects: expected a list of names, as \["Algebra"\], not '):
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
    with pytest.raises(DataError, match=r"split 'tset': there is no such split, only train, test"):
        next(math(directory, "tset"))


def test_a_part_of_a_split_is_the_librarys_to_read():
    assert list(gsm8k(DATA / "gsm8k", "test[:3]")) == list(gsm8k(DATA / "gsm8k", "test", limit=3))


def test_an_unknown_level_is_none_and_an_impossible_one_an_error(tmp_path: Path):
    write_lines(tmp_path / "train.jsonl", TASK, {**TASK, "level": "Level ?"}, {**TASK, "level": 5})
    assert [row["level"] for row in math(tmp_path)] == [3, None, 5]
    assert [row["level"] for row in math(tmp_path, levels=[5])] == [5]
    write_lines(tmp_path / "train.jsonl", {**TASK, "level": "hard"})
    with pytest.raises(DataError, match=r"line 1: the level is neither a number nor .* but 'hard'"):
        list(math(tmp_path))


def test_a_solution_that_boxes_nothing_is_left_out_and_said_so(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    write_lines(tmp_path / "train.jsonl", {**TASK, "solution": r"so $\boxed{}$."}, TASK)
    with caplog.at_level(logging.WARNING):
        assert [row["answer"] for row in math(tmp_path)] == ["2"]
    assert "train.jsonl, line 1: left out, since its solution boxes no answer" in caplog.text


@pytest.mark.parametrize(("column", "columns"), [("question", None), ("q", {"question": "q"})])
def test_a_null_is_told_by_the_name_that_the_file_has_for_it(
    tmp_path: Path, column: str, columns: dict[str, str] | None
):
    write_lines(tmp_path / "train.jsonl", {column: None, "answer": "#### 1"})
    with pytest.raises(DataError, match=rf"line 1: '{column}' is null$"):
        next(gsm8k(tmp_path, columns=columns))


def test_a_missing_column_is_named_with_those_that_there_are(tmp_path: Path):
    row = {"exercise": "1+1?", **{name: value for name, value in TASK.items() if name != "problem"}}
    write_lines(tmp_path / "train.jsonl", row)
    with pytest.raises(
        DataError, match=r"line 1: has no 'question' or 'problem'; its columns are \['exercise', 'level'"
    ):
        list(math(tmp_path))
    assert next(math(tmp_path, columns={"question": "exercise"}))["question"] == "1+1?"
    write_lines(tmp_path / "train.jsonl", {**TASK, "problem": 5})
    with pytest.raises(DataError, match="line 1: the question is not a text: 5"):
        list(math(tmp_path))
