"""Real clients, unmodified, against `headrace serve` with the tiny model. `make test-clients` installs and runs them.

Each program has the interpreter of `.venv-clients`, and OpenAI's client of version 2 the tests' own.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.trainer.tiny import write_tiny_model

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

PROGRAMS = Path(__file__).parent / "programs"
CLIENTS_PYTHON = Path(__file__).parents[2] / ".venv-clients" / "bin" / "python"
ANSWERS = ({"yes": True}, {"yes": False})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The URL of a server, and the directory of its model."""
    model = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(model)
    command = [sys.executable, "-m", "headrace", "serve", str(model), "--port", "0", "--max_model_len", "1024"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        words = process.stdout.readline().split()  # serving on URL; try
        yield words[2].rstrip(";"), model
        process.terminate()


def run(program: str, server: tuple[str, Path], python: Path = CLIENTS_PYTHON, by_path: bool = False) -> dict[str, Any]:
    """Run a client's program and return what it prints last, without a network or a proxy."""
    url, model = server
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "NO_PROXY": "*", "OPENAI_API_KEY": "none"}
    done = subprocess.run(
        [python, PROGRAMS / program, url, str(model) if by_path else model.name],
        env={**os.environ, **offline, "HF_HOME": str(model.parent / "cache")},
        capture_output=True,
        text=True,
        check=False,
        cwd=model.parent,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


@pytest.mark.parametrize(("python", "version"), [(Path(sys.executable), 2), (CLIENTS_PYTHON, 3)])
def test_openai(server: tuple[str, Path], python: Path, version: int) -> None:
    found = run("openai_calls.py", server, python)
    assert (found["version"], found["model"], found["echoed"]) == (version, "tiny", "Hello")
    assert found["logprobs"] == found["tokens"] and found["reasons"] in ("stop", "length")
    assert found["parsed"] in ANSWERS and found["response"] in ANSWERS
    assert found["events"][0] == "response.created"
    assert found["events"][1] in ("response.completed", "response.incomplete")


def test_lm_evaluation_harness(server: tuple[str, Path]) -> None:
    found = run("lm_eval_tasks.py", server, by_path=True)
    assert 0 <= found["accuracy"] <= 1 and len(found["texts"]) == 4
    assert len(found["logprobs"]) == 8 and all(logprob < 0 for logprob in found["logprobs"])


def test_inspect(server: tuple[str, Path]) -> None:
    found = run("inspect_task.py", server)
    assert (found["status"], found["accuracy"]) == ("success", 1.0)
    assert all(answer in ANSWERS for answer in found["answers"]) and len(found["answers"]) == 3


def test_litellm(server: tuple[str, Path]) -> None:
    found = run("litellm_calls.py", server)
    assert 1 <= found["tokens"] <= 8 and found["structured"] in ANSWERS
    assert {found["reason"], found["text"]} <= {"stop", "length"}
    assert found["response"] in ("completed", "incomplete")


def test_langchain(server: tuple[str, Path]) -> None:
    found = run("langchain_calls.py", server)
    assert found["answer"] in ANSWERS and found["prompt_grows"] and found["chunks"] >= 1
    assert 1 <= found["tokens"] <= 24 and 1 <= found["response"] <= 24


def test_openai_agents(server: tuple[str, Path]) -> None:
    found = run("agents_run.py", server)
    assert {*found} == {"OpenAIResponsesModel", "OpenAIChatCompletionsModel"}
    assert all(each["answer"] in ANSWERS and each["events"] for each in found.values())
