"""Rows of files, directories and Hugging Face datasets: the same conversations from each, read when asked for."""

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.config.sft import SftDataConfig
from headrace.errors import DataError
from headrace.rollout.types import Message
from headrace.trainer.sft_data import Rows, open_rows
from tests.refusals import refused

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
QUESTIONS = [{"question": f"{n}+{n}?", "answer": f"{n + n}", "level": n} for n in range(5)]
COLUMNS = {"prompt": "question", "completion": "answer"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write_lines(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def read_rows(path: Path, columns: dict[str, str] | None = None) -> Rows:
    return open_rows(SftDataConfig(path=path, columns=columns or {}))


def load_rows(name: str, subset: str | None, split: str, columns: dict[str, str] | None = None) -> Rows:
    return open_rows(SftDataConfig(name=name, subset=subset, split=split, columns=columns or {}))


def messages(rows: Rows) -> list[list[Message]]:
    return [rows[index].messages for index in range(len(rows))]


def answers(rows: Rows) -> list[str]:
    return [conversation[-1]["content"] for conversation in messages(rows)]


def test_jsonl_takes_messages_or_prompt_and_completion(tmp_path: Path):
    path = write_lines(
        tmp_path / "a.jsonl",
        {"messages": CHAT, "other": 1},
        "",
        {"prompt": "hi", "completion": "yo"},
        {"prompt": CHAT[:1], "completion": CHAT[1:]},
    )
    assert messages(read_rows(path)) == [CHAT, CHAT, CHAT]


def test_a_message_lacks_what_is_null_but_the_arguments_of_a_call_keep_it(tmp_path: Path):
    call = {"name": "f", "arguments": {"a": None}}
    said = {"role": "assistant", "content": None, "name": None, "tool_calls": [call]}
    [turn] = read_rows(write_lines(tmp_path / "a.jsonl", {"messages": [said]}))[0].messages
    assert turn == {"role": "assistant", "tool_calls": [call]}


def test_jsonl_is_not_kept_in_memory(tmp_path: Path):
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "hi", "completion": "yo"})
    rows = read_rows(path)
    path.write_text(path.read_text().replace("yo", "no"))
    assert answers(rows) == ["no"]


def test_parquet_gives_the_same_conversations(tmp_path: Path):
    # Arrow gives every call the fields of all calls, filled with nulls.
    calls = [[{"name": "f", "arguments": {"a": 1}}], [{"name": "g", "arguments": {"b": [{"c": 2}]}}]]
    turns = [{"role": "assistant", "content": None, "tool_calls": call} for call in calls]
    tools = [{"type": "function", "function": {"name": "f"}}]
    table = pa.Table.from_pylist(
        [{"messages": [*CHAT, *turns], "tools": json.dumps(tools)}, {"messages": CHAT, "tools": None}]
    )
    pq.write_table(table, tmp_path / "a.parquet")
    rows = read_rows(tmp_path / "a.parquet")
    assert rows[0].messages == [*CHAT, *({"role": "assistant", "tool_calls": call} for call in calls)]
    assert rows[0].tools == tools
    assert (rows[1].messages, rows[1].tools) == (CHAT, None)


def test_rows_of_questions_and_answers_are_read_by_naming_their_columns(tmp_path: Path):
    write_lines(tmp_path / "a.jsonl", *QUESTIONS)
    pq.write_table(pa.Table.from_pylist(QUESTIONS), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        assert answers(read_rows(tmp_path / name, COLUMNS)) == ["0", "2", "4", "6", "8"]


def test_a_directory_is_its_data_files_in_the_order_of_their_names(tmp_path: Path):
    data = tmp_path / "data"
    write_lines(data / "b.jsonl", *QUESTIONS[2:4])
    write_lines(data / "info.json", {"no": "data"})
    write_lines(data / "c" / "d.jsonl", *QUESTIONS[4:])
    pq.write_table(pa.Table.from_pylist(QUESTIONS[:2]), data / "a.parquet")
    write_lines(data / "aa.jsonl")
    rows = read_rows(data, COLUMNS)
    assert answers(rows) == ["0", "2", "4", "6", "8"]
    assert [rows[index].place for index in (1, 3)] == [(f"{data}/a.parquet", 2), (f"{data}/b.jsonl", 2)]


@pytest.mark.parametrize("kind", ["files", "saved", "saved splits"])
def test_a_dataset_that_the_library_understands_is_read_by_name(tmp_path: Path, kind: str):
    directory = tmp_path / "set"
    if kind == "files":
        write_lines(directory / "train.jsonl", *QUESTIONS)
        write_lines(directory / "test.jsonl", *QUESTIONS[:1])
    else:
        dataset = datasets.Dataset.from_list(QUESTIONS, split="train")
        splits = datasets.DatasetDict({"train": dataset, "test": dataset.select([0])})
        (splits if kind == "saved splits" else dataset).save_to_disk(directory)
    rows = load_rows(str(directory), None, "train", COLUMNS)
    assert answers(rows) == ["0", "2", "4", "6", "8"]
    assert rows[2].place == (f"dataset {str(directory)!r}, split 'train'", 3)
    if kind != "saved":
        assert len(load_rows(str(directory), None, "test", COLUMNS)) == 1


def test_a_subset_of_a_dataset_is_read_by_its_name(tmp_path: Path):
    write_lines(tmp_path / "set" / "easy.jsonl", *QUESTIONS[:1])
    write_lines(tmp_path / "set" / "hard.jsonl", *QUESTIONS[3:])
    entries = [f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in ("easy", "hard")]
    (tmp_path / "set" / "README.md").write_text(f"---\nconfigs:\n{''.join(entries)}---\n")
    assert answers(load_rows(str(tmp_path / "set"), "hard", "train", COLUMNS)) == ["6", "8"]
    with pytest.raises(DataError, match=r"'harder'.*'easy', 'hard'"):
        load_rows(str(tmp_path / "set"), "harder", "train", COLUMNS)


def test_a_split_that_does_not_exist_lists_those_that_do(tmp_path: Path):
    write_lines(tmp_path / "files" / "train.jsonl", *QUESTIONS)
    datasets.Dataset.from_list(QUESTIONS, split="train").save_to_disk(tmp_path / "saved")
    for name in ("files", "saved"):
        with pytest.raises(DataError, match=rf"{name}', split 'dev'.*train"):
            load_rows(str(tmp_path / name), None, "dev", COLUMNS)


def test_an_unreachable_hub_is_an_error_that_names_the_dataset(monkeypatch: pytest.MonkeyPatch):
    for library in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(library, "HF_HUB_OFFLINE", True)
    with refused(DataError, file="dataset 'missing/no-such-data', split 'train'"):
        load_rows("missing/no-such-data", None, "train")


def test_without_the_library_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'headrace\[datasets\]'"):
        load_rows("openai/gsm8k", "main", "train")


def test_a_bad_row_is_an_error_at_once_and_names_its_place(tmp_path: Path):
    rows = [*QUESTIONS, {"question": "?", "answer": 5}]
    write_lines(tmp_path / "a.jsonl", *rows)
    with refused(DataError, key="completion", value=5, file=str(tmp_path / "a.jsonl"), line=6):
        read_rows(tmp_path / "a.jsonl", COLUMNS)
    rows[-1]["answer"] = None
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    with refused(DataError, file=str(tmp_path / "a.parquet"), line=6):
        read_rows(tmp_path / "a.parquet", COLUMNS)
    with refused(DataError, key="columns.completion", value="anwser"):
        read_rows(tmp_path / "a.parquet", {**COLUMNS, "completion": "anwser"})


@pytest.mark.parametrize("line", ["{not json", '{"prompt": "\ud800"}'])
def test_a_line_that_is_no_json_names_the_line(tmp_path: Path, line: str):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "a", "completion": "b"}\n\n' + line.encode("utf-8", "surrogatepass"))
    with refused(DataError, file=str(path), line=3):
        read_rows(path)


def test_what_cannot_be_data_is_refused(tmp_path: Path):
    with refused(DataError, file=tmp_path / "none.jsonl"):
        read_rows(tmp_path / "none.jsonl")
    with refused(DataError, file=tmp_path / "a.csv"):
        read_rows(write_lines(tmp_path / "a.csv", "x"))
    with refused(DataError, file=str(tmp_path / "a.jsonl")):
        read_rows(write_lines(tmp_path / "a.jsonl", ""))
    with refused(DataError, file=tmp_path / "a.parquet"):
        read_rows(write_lines(tmp_path / "a.parquet", "x"))
    (tmp_path / "empty").mkdir()
    with refused(DataError, file=tmp_path / "empty"):
        read_rows(tmp_path / "empty")
