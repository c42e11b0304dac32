"""`headrace chat` from end to end: a real model behind a server that is started for it, and ends with it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.cli.serve import greeting
from headrace.launch.server_target import GREETING
from headrace.rollout.version import Version
from headrace.transport.run_dir import RunDir
from tests.cli.run_files import RUN_FILE
from tests.launch.launching import is_alive

SERVE = Path(__file__).with_name("serve_stand_in.py")
GREEDY = ("--temperature", "0", "--max-tokens", "8")


def chat(target: Path, *options: str, stdin: str | None = None) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "headrace", "chat", str(target), *options],
        env=environment,
        input=None if stdin is None else stdin.encode(),
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        check=False,
        timeout=120,
    )


def servers_of(target: Path) -> list[str]:
    """What still runs of `headrace serve` on this model."""
    listed = subprocess.run(["ps", "-axww", "-o", "args="], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if f"headrace serve {target} " in line]


@pytest.fixture
def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a stand-in for `headrace serve` notes its process and its arguments."""
    python, notes = tmp_path / "python", tmp_path / "notes"
    python.write_text(f"#!/bin/sh\nexec '{sys.executable}' '{SERVE}' '{notes}' \"$@\"\n")
    python.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(SERVE.parents[2]))
    monkeypatch.setattr(sys, "executable", str(python))
    return notes


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """As much of a model as is looked at before a server loads it."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


def test_a_server_is_started_for_the_chat_on_a_port_of_its_own_choice_and_ends_with_it(
    model: Path, serving: Path, capfd: pytest.CaptureFixture[str]
):
    assert main(["chat", str(model), "--message", "Hello?", "--inference.port", "8000"]) == 0
    assert capfd.readouterr() == ("Hello.\n", "")
    process, *words = serving.read_text().split()
    assert words[:4] == ["-m", "headrace", "serve", str(model)]
    assert words[-6:-2] == ["--host", "127.0.0.1", "--port", "0"]
    assert not is_alive(int(process))


def test_a_server_of_a_chat_that_does_not_start_is_explained_by_the_end_of_its_log(
    model: Path, serving: Path, capfd: pytest.CaptureFixture[str]
):
    assert main(["chat", str(model), "--message", "Hello?", "--inference.seed", "13"]) == 1
    assert capfd.readouterr().err == (
        "headrace: the server ended with exit status 3; the end of its log:\n    no luck today\n"
    )


def test_what_a_server_says_when_it_is_up_tells_a_chat_where():
    said = "a line of its log\n" + greeting("http://127.0.0.1:4711", "KEY") + "\n"
    assert GREETING.findall(said) == ["http://127.0.0.1:4711/v1"]
    assert GREETING.search("a line of its log\nserving on http://127.0.0.1:4") is None


@pytest.mark.full
def test_a_piped_question_is_answered_by_a_model_whose_server_ends_with_the_chat(tiny_model: Path):
    done = chat(tiny_model, *GREEDY, stdin="Hello?\n")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.endswith(b"\n")
    assert servers_of(tiny_model) == []


@pytest.mark.full
def test_a_message_to_a_finished_run_is_answered_by_its_newest_weights(tiny_model: Path, tmp_path: Path):
    from headrace.trainer.tiny import write_tiny_model

    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    run.config.write_text(RUN_FILE.format(output=run.root, model=tiny_model))
    run.weights.publish(Version(0, 3), lambda draft: write_tiny_model(draft, seed=1))
    write_tiny_model(run.final_model, seed=2)  # older than what is published, as after a run that was taken further
    answer = chat(run.root, "--message", "Hello?", *GREEDY)
    assert answer.returncode == 0, answer.stderr
    write_tiny_model(tmp_path / "other", seed=1)
    assert answer.stdout == chat(tmp_path / "other", "--message", "Hello?", *GREEDY).stdout
    assert not run.endpoints.exists()
    assert not run.status.exists()


@pytest.mark.full
def test_a_server_that_cannot_start_is_explained_by_the_end_of_its_log(tiny_model: Path):
    done = chat(tiny_model, "--message", "Hello?", "--inference.kv_cache_gb", "1e-9")
    assert done.returncode == 1
    assert b"headrace: the server ended with exit status" in done.stderr
    assert servers_of(tiny_model) == []


@pytest.mark.full
def test_a_chat_that_is_killed_takes_its_server_with_it(tiny_model: Path):
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace", "chat", str(tiny_model), "--message", "Hello?", "--max-tokens", "200"],
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not servers_of(tiny_model):
        assert time.monotonic() < deadline, "no server was started"
        time.sleep(0.05)
    process.kill()
    process.wait()
    while servers_of(tiny_model):
        assert time.monotonic() < deadline, "the server outlived the chat"
        time.sleep(0.1)
