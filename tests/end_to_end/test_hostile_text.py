"""A real run whose environment is named, scores and fails with text that controls terminals and forges lines."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli_w

from headrace.transport.run_dir import RunDir
from tests.end_to_end.runs import headrace, write_run_file
from tests.observe.test_hostile_text import ENVIRONMENT, HOSTILE, NAME, check, check_characters, check_files


@pytest.mark.full
def test_a_run_writes_and_shows_hostile_text_escaped(tmp_path: Path, tiny_model: Path):
    run = RunDir(tmp_path / "run\x1b]0;\u202e")
    file = tmp_path / "hostile_words.py"
    file.write_text(ENVIRONMENT.format(hostile=HOSTILE).replace("        print(HOSTILE)\n", ""))
    overlay = tmp_path / "hostile.toml"
    entry = {"id": f"{file}:Hostile", "name": NAME}
    overlay.write_text(tomli_w.dumps({"orchestrator": {"train": {"env": [entry]}, "eval": {"env": [entry]}}}))
    options = (
        "--output_dir",
        str(run.root),
        "--max_steps",
        "2",
        "--seq_len",
        "512",
        "--orchestrator.max_empty_batches",
        "9",
    )
    code, output = headrace("rl", write_run_file(tmp_path, tiny_model), overlay, *options)
    assert code == 0, output
    check(output)
    assert r"evil\x1b]0;" in output
    for log in run.logs.iterdir():
        check(log.read_text())
    assert r"evil\x1b]0;" in (run.logs / "orchestrator.log").read_text()
    assert check_files(run.root) == {".md", ".svg"}
    for command in ("summary", "audit", "rescore", "tokens"):
        check_characters(headrace(command, run.root)[1])
