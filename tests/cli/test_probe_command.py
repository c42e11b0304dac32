"""`headrace probe`: what it prints, what it refuses and with which exit code."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli.common import importable
from headrace.cli.main import main, parse
from headrace.cli.probe import read_options
from headrace.config.base import ConfigError
from headrace.errors import BadInput
from headrace.tools.probe.report import TINY
from tests.inference.openai_stand_in import OpenAIStandIn
from tests.refusals import refused
from tests.tools.probe.probed import ASKING, CALLING

REPOSITORY = Path(__file__).parents[2]
FEW = ("--tasks", "2", "--examples", "1")


def test_a_report_fits_on_80_columns_and_needs_no_torch():
    program = """
import sys
from headrace.cli.main import main
assert main(["probe", *sys.argv[1:]]) == 0  # there are warnings, but no error
assert not {"torch", "transformers"} & set(sys.modules)
"""
    words = [CALLING, *FEW, "--renderer.name", "qwen3", "--seq-len", "1024"]
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(done.stdout.split())
    assert text.startswith(f"{CALLING}: 2 tasks")
    assert "<|im_start|>user Press a button.<|im_end|>" in text
    assert "longest of 2 prompts: " in text
    assert "press(word: string): Press the button with this word." in text
    (completions,) = [number for number, line in enumerate(lines) if line.startswith("completion ")]
    assert lines[completions + 1].split()[:5] == ["gold", "0.550", "0.00", "to", "1.10"]
    (components,) = [number for number, line in enumerate(lines) if line.startswith("by component")]
    assert lines[components].split()[2:] == ["found", "brief"]
    assert lines[components + 1].split() == ["gold", "0.500", "0.050"]
    assert "warning an episode has no limit of turns: 'gold' continued after 64 replies" in text


def test_without_a_model_prompts_are_those_of_the_tiny_one(tiny_model: Path, capfd: pytest.CaptureFixture[str]):
    prompts = []
    for words in ([], ["--model", str(tiny_model)]):
        assert main(["probe", CALLING, *FEW, *words, "--json"]) == 0
        prompts.append(json.loads(capfd.readouterr().out)["prompts"])
    assert [prompt.pop("tokenizer") for prompt in prompts] == [TINY, str(tiny_model)]
    assert prompts[0] == prompts[1]
    assert [tool["name"] for tool in prompts[0]["tools"]] == ["press"]


def test_an_error_has_its_fix_in_json_and_sets_the_exit_code(capfd: pytest.CaptureFixture[str]):
    assert main(["probe", ASKING, *FEW, "--args.flaw", "contains", "--json"]) == 1
    report = json.loads(capfd.readouterr().out)  # nothing else: the environment prints, too
    assert report["args"] == {"flaw": "contains"}
    assert report["opening"]["tasks"] == 4
    worst = report["findings"][0]
    assert worst["severity"] == "error"
    assert "'gold among 20 wrong'" in worst["seen"]
    assert "earn" in worst["seen"]
    assert {episode["completion"] for episode in report["episodes"]} >= {"gold", "empty", "10 MB"}


async def test_a_model_behind_a_server_predicts_the_signal(capsys: pytest.CaptureFixture[str]):
    async with OpenAIStandIn(lambda body: "12") as server:
        words = ["probe", ASKING, *FEW, "--endpoint", server.url, "--sample", "2x4", "--group-size", "4"]
        assert await asyncio.to_thread(main, words) == 0
    shown = capsys.readouterr().out
    assert "8 episodes of small" in shown
    rows = [line.split() for line in shown.splitlines() if "(yours)" in line]
    assert rows == [["4", "(yours)", "100%", "29%", "to", "100%", "50%", "50%"]]  # 4 of 6: .67 +- .38
    assert "100% of groups of 4 would have no signal" in shown


def test_an_environment_may_be_named_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine.py").touch()
    assert importable(f"{tmp_path}/mine.py:Mine", "environment") == "mine:Mine"
    assert sys.path[0] == str(tmp_path)
    assert str(Path.cwd()) in sys.path
    assert importable("reverse-text", "environment") == "reverse-text"
    with refused(BadInput, file=Path("nowhere.py")):
        importable("nowhere.py:Mine", "environment")
    with refused(BadInput, file=tmp_path / "mine.py"):
        importable(f"{tmp_path}/mine.py", "environment")


def test_args_come_as_json_and_one_by_one():
    arguments = parse(
        ["probe", "x", "--args", '{"a": 1, "b": 2}', "--args.b", "3", "--renderer.name", "qwen3", "--json"]
    )
    config = read_options(arguments.args, arguments.overrides)
    assert config.args == {"a": 1, "b": 3}
    assert config.renderer.name == "qwen3"
    assert arguments.json
    with refused(ConfigError, key="--args", value="split=eval"):
        read_options("split=eval", [])
    with refused(ConfigError, key="--renderer.nam", fix="Did you mean renderer.name?"):
        read_options("{}", ["--renderer.nam", "qwen3"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sample", "16"], "'16' is not TASKSxEPISODES, as 16x8 is"),
        (["--sample", "0x8"], "'0' is not a whole number from 1 on"),
        (["--sample", "16xmany"], "'many' is not a whole number from 1 on"),
        (["--examples", "three"], "'three' is not a whole number from 1 on"),
        (["--timeout", "0"], "'0' is not a number of seconds above 0"),
        (["--timeout", "soon"], "'soon' is not a number of seconds above 0"),
        (["--load-timeout", "nan"], "'nan' is not a number of seconds above 0"),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_options_that_make_no_sense_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        parse(["probe", "x", *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_an_environment_that_is_not_there_is_refused_in_a_sentence(capsys: pytest.CaptureFixture[str]):
    assert main(["probe", "revers-text"]) == 2
    assert "Did you mean reverse-text?" in capsys.readouterr().err
