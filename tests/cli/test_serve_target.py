"""Which weights `headrace serve` begins with, and what it says when it is up."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from headrace.cli.main import main, parse
from headrace.cli.serve import colocated_trainer, greeting, is_over, read_target
from headrace.errors import BadInput
from headrace.launch.run_directory import hold
from headrace.rollout.version import Version
from headrace.transport.endpoint import Endpoint, write_endpoint
from headrace.transport.files import MARKER
from headrace.transport.run_dir import RunDir
from headrace.transport.weights_link import MANIFEST
from tests.cli.chat_stand_in import chat_stand_in
from tests.cli.run_files import RUN_FILE
from tests.refusals import refused

SFT_FILE = """
output_dir = "{output}"
max_steps = 3
seq_len = 64
[model]
name = "{model}"
[data]
env = "reverse-text"
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The model that runs begin with."""
    directory = tmp_path / "base"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


@pytest.fixture
def run(tmp_path: Path, base: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    run.config.write_text(RUN_FILE.format(output=run.root, model=base))
    return run


def finish(run: RunDir) -> None:
    run.final_model.mkdir()
    (run.final_model / "config.json").write_text("{}")


def publish(run: RunDir, step: int, *files: str) -> None:
    run.weights.publish(Version(0, step), lambda draft: [(draft / name).write_text("{}") for name in files] and None)


def started_from(run: RunDir) -> str | None:
    return read_target(str(run.root), [], alone=True).model.name


def test_a_finished_run_is_served_by_its_own_name_on_the_port_everyone_expects(run: RunDir):
    finish(run)
    config = read_target(str(run.root), [], alone=True)
    assert (config.served_name, config.port, config.output_dir) == (str(run.root), 8000, run.root)
    assert config.max_model_len == 64
    assert read_target(str(run.root), ["--port", "0", "--served_name", "x"], alone=True).port == 0


def test_the_final_model_is_where_published_weights_go(run: RunDir, base: Path):
    assert started_from(run) == str(base)  # nothing has been trained
    publish(run, 1, "model.safetensors")
    assert started_from(run) == str(base)
    finish(run)
    assert started_from(run) == str(run.final_model)


def test_a_published_adapter_goes_on_the_model_that_the_run_began_with(run: RunDir, base: Path):
    finish(run)
    publish(run, 1, "adapter_config.json", "adapter_model.safetensors")
    assert started_from(run) == str(base)


def test_weights_that_went_with_the_trainer_are_to_be_exported(run: RunDir, base: Path):
    publish(run, 1, MANIFEST)
    checkpoint = run.checkpoints / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / MARKER).write_text("{}")
    with refused(BadInput, file=run.root):
        started_from(run)
    with hold(run.root):  # its trainer runs, and has them
        assert started_from(run) == str(base)
    finish(run)
    assert started_from(run) == str(run.final_model)


def test_the_model_of_an_sft_run_that_evaluates_nothing_is_served_alone(run: RunDir, base: Path):
    run.config.write_text(SFT_FILE.format(output=run.root, model=base))
    finish(run)
    assert started_from(run) == str(run.final_model)
    with pytest.raises(BadInput) as refusal:
        read_target(str(run.root), [])
    assert (refusal.value.key, refusal.value.value) == ("RUN", run.root)


def test_a_run_is_over_once_its_model_is_there_and_nobody_works_on_it(run: RunDir, tmp_path: Path):
    assert not is_over(run.root)
    finish(run)
    assert is_over(run.root)
    with hold(run.root):
        assert not is_over(run.root)
    assert is_over(run.root)
    assert not is_over(tmp_path / "base")


def test_chat_says_that_a_run_is_not_up_yet(run: RunDir, capsys: pytest.CaptureFixture[str]):
    with hold(run.root):
        assert main(["chat", str(run.root), "--message", "Hello?"]) == 2
    assert f"MODEL = {run.root}" in capsys.readouterr().err


def test_chat_takes_the_server_of_a_run_that_answers_with_the_key_that_the_run_keeps(
    run: RunDir, capsys: pytest.CaptureFixture[str]
):
    with chat_stand_in() as server, hold(run.root):
        write_endpoint(run.endpoints / "inference.json", Endpoint("http://127.0.0.1:9", 1))  # of one that is gone
        write_endpoint(run.endpoints / "inference-1.json", Endpoint(server.url, 1, api_key="sesame"))
        assert main(["chat", str(run.root), "--message", "Hello?"]) == 0
    assert capsys.readouterr().out == "Hello.\n"
    assert set(server.keys) == {"Bearer sesame"}


@pytest.mark.parametrize("key_var", [None, "HEADRACE_API_KEY"])
def test_the_greeting_has_a_command_that_a_shell_understands(key_var: str | None):
    first, curl, chat = greeting("http://127.0.0.1:8000", key_var).splitlines()
    assert "http://127.0.0.1:8000/v1" in first
    words = shlex.split(curl)
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert json.loads(words[words.index("-d") + 1])["messages"][0]["role"] == "user"
    assert ("Authorization: Bearer $HEADRACE_API_KEY" in words) == (key_var is not None)
    assert parse(shlex.split(chat)[1:]).target == "http://127.0.0.1:8000"


def test_help_explains_keys_engines_and_routes(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse(["serve", "--help"])
    shown = capsys.readouterr().out
    for word in ("HEADRACE_API_KEY", "HEADRACE_ADMIN_KEY", "--engine vllm", "/v1/chat/completions", "--alone"):
        assert word in shown


def test_a_server_beside_a_trainer_knows_what_that_keeps_and_where_turns_are_taken(run: RunDir) -> None:
    in_turns, at_once = (colocated_trainer(run.root, run, sharing) for sharing in ("alternate", "overlap"))
    # Float32 parameters, two moments, a bfloat16 snapshot; during a step gradients, too.
    assert (in_turns.lock_directory, in_turns.bytes_per_parameter, in_turns.servers) == (run.device_lock, 14, 1)
    assert (at_once.lock_directory, at_once.bytes_per_parameter) == (None, 18)
    file = run.config.read_text()
    run.config.write_text(file + "[trainer.lora]\nr = 4\n[launch]\ninference_servers = 2\n")
    adapter = colocated_trainer(run.root, run, "alternate")
    assert adapter.servers == 2
    assert 2 < adapter.bytes_per_parameter < 4  # a bfloat16 base and a small adapter
    run.config.write_text(file + '[trainer.optim]\ntype = "muon"\noffload_state = true\n')
    assert colocated_trainer(run.root, run, "alternate").bytes_per_parameter == 6
