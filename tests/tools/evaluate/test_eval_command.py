"""`headrace eval` as a command: what it refuses, and real models behind real servers from end to end."""

import csv
import json
import os
import shlex
from pathlib import Path

import pytest

from headrace.cli.eval import prepare, read_evaluation, run_eval
from headrace.cli.main import main, parse
from headrace.environments.base import tasks_of
from headrace.environments.registry import load_environment
from headrace.environments.rewards.strict_rewards import read_zero_shot
from headrace.errors import BadInput
from headrace.transport.rollout_files import RolloutFiles
from headrace.transport.run_dir import RolloutKind

DOCS = (Path(__file__).parents[3] / "docs" / "how-to/evaluation.md").read_text()
RUN = """
output_dir = "run"
max_steps = 4
seq_len = 64

[model]
name = "tiny"

[data]
env = "reverse-text"
batch_size = 4

[ckpt]
interval = 2
permanent_interval = 4
"""


def test_every_command_of_the_page_is_understood():
    commands = [line for line in DOCS.replace("\\\n", "").splitlines() if line.startswith("headrace eval")]
    assert len(commands) >= 4
    for command in commands:
        words = shlex.split(command, comments=True)
        assert parse(words[1:]).command == "eval"


@pytest.mark.parametrize(
    ("options", "key", "value"),
    [
        (["--samples", "4"], "--samples", 4),
        (["other", "--zero-shot", "z.jsonl"], "--zero-shot", None),
        (["--level", "4", "--env-args", "levels=[5]"], "--level", [4]),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(
    options: list[str], key: str, value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for model in ("model", "other"):
        Path(model).mkdir()
        Path(model, "config.json").write_text("{}")
    with pytest.raises(BadInput) as error:
        run_eval(parse(["eval", "model", *options, "--env", "reverse-text"]))
    assert (error.value.key, error.value.value) == (key, value)
    assert not Path("outputs").exists()


@pytest.mark.parametrize(
    ("options", "names"), [(["--renderer", "nmae=qwen3"], "nmae"), (["--temperature", "-1"], "temp")]
)
def test_a_value_that_a_run_file_could_not_have_is_refused(
    options: list[str], names: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["eval", "model", *options, "--env", "reverse-text"]) == 2
    assert names in capsys.readouterr().err


def test_a_pair_without_a_value_is_explained(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse(["eval", "model", "--env", "gsm8k", "--env-args", "split=test", "other"])
    assert "'other' is not KEY=VALUE (and CHECKPOINT comes before all options)" in capsys.readouterr().err


def test_the_level_of_problems_is_an_argument_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    asked = parse(["eval", "model", "--env", "math", "--level", "4", "5", "--env-args", "source=math.jsonl"])
    evaluation = read_evaluation(asked)
    assert evaluation.args == {"source": "math.jsonl", "levels": [4, 5]}
    problems = [
        {"problem": f"{n}+1?", "solution": f"\\boxed{{{n + 1}}}", "level": n, "type": "Algebra"} for n in (3, 4, 5)
    ]
    Path("math.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    environment = load_environment(evaluation.env, evaluation.args)
    assert [task.data["level"] for task in tasks_of(environment, "math")] == [4, 5]
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    assert main(["eval", "model", "--env", "gsm8k", "--level", "4", "--env-args", "source=math.jsonl"]) == 2
    assert "args.levels = [4]:" in capsys.readouterr().err


def test_the_output_is_below_the_storage_root_of_the_run_unless_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HEADRACE_CACHE", "")  # what the run sets is taken back at the end
    root = tmp_path / "root"
    env = f'[launch.env]\nHEADRACE_CACHE = "{root}"\n'
    (tmp_path / "stored").mkdir()
    (tmp_path / "stored/config.toml").write_text(f'{RUN}\n[[eval.env]]\nid = "reverse-text"\n{env}')
    asked = ["eval", str(tmp_path / "stored")]
    assert prepare(parse(asked))[0].output == root / "artifacts/eval/reverse-text"
    assert os.environ["HEADRACE_CACHE"] == str(root)
    assert prepare(parse([*asked, "--env", "copy"]))[0].output == root / "artifacts/eval/copy"
    assert prepare(parse([*asked, "--output", "here"]))[0].output == Path("here")
    assert prepare(parse(["eval", "http://a:1", "--env", "copy"]))[0].output == Path("outputs/eval/copy")


@pytest.mark.parametrize("env", ["gsm8k", "math"])
def test_word_problems_that_are_neither_here_nor_on_a_hub_say_what_to_do(
    env: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    assert main(["eval", "model", "--env", env, "--env-args", "source=problems.jsonl"]) == 2
    assert "problems.jsonl" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.timeout(600)  # eight processes that import torch, one after the other
def test_a_model_one_that_does_not_load_and_permanent_checkpoints(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    Path("tiny").symlink_to(tiny_model)
    Path("broken").mkdir()
    Path("broken/config.json").write_text('{"model_type": "qwen3"}')
    asked = ["--env", "reverse-text", "--num-examples", "3", "--max-tokens", "8", "--output"]
    assert main(["eval", "tiny", "broken", *asked, "out", "--engines", "2"]) == 1
    said = capfd.readouterr().err
    assert "broken was not evaluated: the server ended with exit status" in said
    begun = [said.index(f"{name}: 3 of 3 episodes to run") for name in ("tiny", "broken")]
    assert max(begun) < min(said.index(f"{name}: {n} of 3 episodes done") for name, n in (("tiny", 3), ("broken", 0)))
    good, bad = json.loads(Path("out/results.json").read_text())["models"]
    assert (good["name"], good["examples"], good["failure"]) == ("tiny", 3, "")
    assert bad["failure"]
    score = "accuracy" if "pass@1" in good["estimates"] else "reward"
    assert {path.name for path in Path("out").iterdir()} == {
        *("results.json", "results.csv", f"{score}.svg", f"{score}-length.svg", "tiny", "broken")
    }
    assert len(RolloutFiles(Path("out/tiny/rollouts"), RolloutKind.EVAL).read(0)) == 3
    Path("run.toml").write_text(RUN)
    assert main(["sft", "run.toml"]) == 0
    permanent = ["eval", "run", "--checkpoints", "permanent", *asked, "steps", "--zero-shot", "record.jsonl"]
    assert main(permanent) == 0
    rows = list(csv.DictReader(Path("steps/results.csv").read_text().splitlines()))
    assert [row["model"] for row in rows] == ["step-4"]
    assert not list(Path("steps").rglob("*.safetensors"))  # what was exported is gone
    completions = Path("steps/step-4/completions.jsonl")
    lines = completions.read_bytes().splitlines(keepends=True)
    completions.write_bytes(lines[0] + lines[1][:25])
    assert main(permanent) == 0
    assert sorted(completions.read_bytes().splitlines(keepends=True)) == sorted(lines)  # greedy: the same again
    assert len(read_zero_shot("record.jsonl")) == 3
