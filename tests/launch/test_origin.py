"""Models that Headrace makes once and keeps."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from headrace.config.base import ConfigError
from headrace.config.model import ModelConfig
from headrace.config.sft import SftDataConfig
from headrace.launch import origin
from headrace.launch.origin import model_of_run, resolve
from headrace.text.hub import ModelNotFound
from headrace.transport.run_dir import RunDir
from tests.refusals import refused


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where modules are found is put back."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))


def write_model(draft: Path) -> Path:
    (draft / "model").mkdir()
    (draft / "model" / "weights").write_text("w")
    return draft / "model"


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve(ModelConfig(name=str(tmp_path))) == str(tmp_path)


def test_a_model_without_origin_is_refused_with_the_keys_to_set() -> None:
    with refused(ConfigError, key="model"):
        resolve(ModelConfig())


@pytest.mark.full
def test_an_sft_model_and_the_tiny_model_under_it_are_made_once(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sft.toml"
    file.write_text(
        'max_steps = 2\nseq_len = 64\n[model]\ninit = "tiny"\n[data]\nenv = "reverse-text"\nbatch_size = 2\n'
    )
    made = Path(resolve(ModelConfig(sft=file)))
    assert made.parent == cache
    assert (made / "config.json").is_file()
    assert (made / "tokenizer.json").is_file()
    printed = capsys.readouterr()
    assert printed.err.count("creating it once") == 2
    assert "step 2/2  loss" in printed.out
    assert len([path for path in cache.iterdir() if not path.suffix]) == 2
    assert not list(cache.glob("*.tmp"))
    began = time.monotonic()
    assert resolve(ModelConfig(sft=file)) == str(made)
    assert time.monotonic() - began < 1
    assert capsys.readouterr().err.count("using the cached") == 2
    file.write_text(file.read_text() + "[tensorboard]\n")  # who watches does not shape the model
    assert resolve(ModelConfig(sft=file)) == str(made)


def test_two_that_start_at_once_make_it_once(cache: Path) -> None:
    made: list[Path] = []

    def make(draft: Path, held: int) -> Path:
        time.sleep(0.2)
        made.append(draft)
        return write_model(draft)

    threads = [threading.Thread(target=origin._create_once, args=("abc", "m", make)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert (cache / "abc" / "weights").read_text() == "w"


def test_what_was_cut_short_is_not_taken_for_a_model(cache: Path) -> None:
    def fail(draft: Path, held: int) -> Path:
        write_model(draft)
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        origin._create_once("abc", "m", fail)
    assert not (cache / "abc").exists()
    assert origin._create_once("abc", "m", lambda draft, _: write_model(draft)) == cache / "abc"


def test_an_sft_file_that_is_missing_or_starts_from_itself_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "sft.toml"
    with refused(ConfigError, key="model.sft"):
        resolve(ModelConfig(sft=file))
    file.write_text(f'max_steps = 1\nseq_len = 8\n[model]\nsft = "{file}"\n[data]\nenv = "reverse-text"\n')
    with refused(ConfigError, key="model.sft"):
        resolve(ModelConfig(sft=file))


def test_an_sft_file_from_a_model_that_is_missing_names_the_model(tmp_path: Path) -> None:
    file = tmp_path / "sft.toml"
    file.write_text('max_steps = 1\nseq_len = 8\n[model]\nname = "/no/model"\n[data]\nenv = "reverse-text"\n')
    with refused(ModelNotFound, key="model.name", value="/no/model"):
        resolve(ModelConfig(sft=file))


def test_an_sft_files_environment_may_lie_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin, "_create_once", lambda digest, what, make: Path(digest))
    (tmp_path / "config.json").write_text("{}")
    file, code = tmp_path / "sft.toml", tmp_path / "lies_beside.py"
    file.write_text(f'max_steps = 1\nseq_len = 8\n[model]\nname = "{tmp_path}"\n[data]\nenv = "lies_beside:Mine"\n')
    models = []
    for text in ("one", "other"):
        code.write_text(text)
        models.append(resolve(ModelConfig(sft=file)))
    assert models[0] != models[1]
    assert str(tmp_path) in os.environ["PYTHONPATH"].split(os.pathsep)  # for the trainer, too


def test_the_initial_model_of_a_run_is_known_while_it_exists(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    assert model_of_run(run) is None
    run.root.mkdir()
    (tmp_path / "began").mkdir()
    run.config.write_text(f'[model]\nname = "{tmp_path / "began"}"\n')
    assert model_of_run(run) == str(tmp_path / "began")
    (tmp_path / "began").rmdir()
    assert model_of_run(run) is None


def test_data_is_known_by_its_content(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    directory.mkdir()
    file = directory / "a.jsonl"
    file.write_text("1\n")
    sources = [SftDataConfig(path=file), SftDataConfig(path=directory), SftDataConfig(name=str(directory))]
    before = [origin._hash_of_examples(source) for source in sources]
    assert [origin._hash_of_examples(source) for source in sources] == before
    assert before[1] == before[2] != before[0]
    file.write_text("2\n")
    changed = [origin._hash_of_examples(source) for source in sources]
    assert not set(before) & set(changed)
    (directory / "b.jsonl").write_text("3\n")
    assert origin._hash_of_examples(sources[0]) == changed[0]
    assert origin._hash_of_examples(sources[1]) != changed[1]
    assert origin._hash_of_examples(SftDataConfig(name="openai/gsm8k")) == ""
    with refused(ConfigError, key="data.path"):
        origin._hash_of_examples(SftDataConfig(path=tmp_path / "none.jsonl"))


def test_a_users_environment_is_known_by_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = SftDataConfig(env="my_environment:Mine")
    (tmp_path / "my_environment.py").write_text("one = 1\n")
    before = origin._hash_of_examples(data)
    (tmp_path / "my_environment.py").write_text("one = 2\n")
    assert before
    assert origin._hash_of_examples(data) not in ("", before)
    assert origin._hash_of_examples(SftDataConfig(env="reverse-text")) == ""


@pytest.mark.parametrize("env", ["gsm8k", "my_environment:Mine"])
def test_files_in_the_args_of_an_environment_are_known_by_their_content(
    env: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_environment.py").write_text("one = 1\n")
    (tmp_path / "data").mkdir()
    sources = ["data/a.jsonl", str(tmp_path / "data" / "a.jsonl"), "data", ["none", {"of": "data"}]]
    datas = [SftDataConfig(env=env, args={"limit": 3, "split": "train", "source": source}) for source in sources]
    (tmp_path / "data" / "a.jsonl").write_text("1\n")
    before = [origin._hash_of_examples(data) for data in datas]
    assert [origin._hash_of_examples(data) for data in datas] == before
    (tmp_path / "data" / "a.jsonl").write_text("2\n")
    assert not set(before) & {origin._hash_of_examples(data) for data in datas}
    without = SftDataConfig(env=env, args={"source": "openai/gsm8k", "ask": "x" * 5000, "note": "\0", "no": ""})
    assert origin._hash_of_examples(without) == origin._hash_of_examples(SftDataConfig(env=env))
