"""Wrong inputs: each is refused with exit code 2 and the key or the file at fault, before anything is started.

To add one, add a `Wrong` to a table. Every one that starts a run is tried with and without `--dry-run`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

import pytest

from headrace.text.byte_level import byte_tokenizer
from tests.cli.attempts import Attempts, Outcome

RL = """
output_dir = "out"
max_steps = 3
seq_len = 128
[model]
name = "MODEL"
[[orchestrator.train.env]]
id = "reverse-text"
"""
SFT = """
output_dir = "out"
max_steps = 3
seq_len = 128
[model]
name = "MODEL"
[data]
path = "data.jsonl"
"""
DATA = '{"prompt": "Say a.", "completion": "a"}\n'


@dataclass(frozen=True)
class Wrong:
    """A command line in a folder with `rl.toml`, `sft.toml`, `data.jsonl` and `files`, and what its error names."""

    name: str
    command: str
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    """By path; text may say MODEL for a model directory that is in order."""
    key: str | None = None
    """The key, option or argument that one of the problems names."""
    file: str | None = None
    """The file that it names."""
    line: int | None = None
    says: str | None = None
    """What argparse says, whose errors have no fields."""


NOT_A_RUN = [
    Wrong(f"{command} of a run file", f"{command} rl.toml {more}", key="RUN")
    for command, more in (("trainer", ""), ("orchestrator", ""), ("summary", ""), ("audit", ""), ("tokens", ""))
] + [
    Wrong(f"{command} of nothing", f"{command} outputs/none", key="RUN")
    for command in ("trainer", "orchestrator", "summary", "audit", "tokens", "rescore")
]
NOT_A_RUN += [
    Wrong("summary of a folder that is not a run", "summary folder", {"folder/file": ""}, key="RUN"),
    Wrong("audit of a run without a journal", "audit folder", {"folder/metrics.jsonl": ""}, key="RUN"),
    Wrong("export of a run file", "export rl.toml model", key="RUN|CHECKPOINT"),
    Wrong("serve of nothing", "serve outputs/none", key="MODEL|RUN"),
    Wrong("serve of a run file", "serve rl.toml", key="RUN"),
    Wrong("eval of nothing", "eval outputs/none --env reverse-text", key="CHECKPOINT"),
    Wrong("eval of a run file", "eval rl.toml --env reverse-text", key="CHECKPOINT"),
    Wrong("chat with nothing", "chat ./none --message hello", key="MODEL|RUN"),
    Wrong("export of nothing", "export outputs/none model", key="RUN|CHECKPOINT"),
    Wrong("export into a folder with files", "export outputs/none folder", {"folder/file": ""}, key="DIR"),
    Wrong("eval of an empty folder", "eval folder --env reverse-text", {"folder/file": ""}, key="CHECKPOINT"),
]
SOME_RATIOS = '[[orchestrator.train.env]]\nid = "copy"\nratio = 1\n[[orchestrator.train.env]]\nid = "reverse-text"\n'
SHORT = "model: MODEL\ndata: {provider: arithmetic}\ntrainer: {max_steps: 3}\n"
VALUES = [
    Wrong("a ratio on some environments", "rl rl.toml more.toml", {"more.toml": SOME_RATIOS},
          key="orchestrator.train.env.1.ratio"),
    Wrong("fewer in flight than a group", "rl rl.toml --orchestrator.max_inflight_rollouts 7",
          key="--orchestrator.max_inflight_rollouts"),
    Wrong("an evaluation of nothing", "rl rl.toml --orchestrator.eval.interval 5", key="orchestrator.eval.env"),
    Wrong("an empty list of evaluations", "rl rl.toml --orchestrator.eval.env []", key="--orchestrator.eval.env"),
    Wrong("an SFT evaluation of nothing", "sft sft.toml --eval.interval 5", key="eval.env"),
    Wrong("two models at once", "rl rl.toml --model.init tiny --model.sft sft.toml", key="--model.sft"),
    Wrong("two sources of examples at once", "sft sft.toml --data.env copy --data.name a/b", key="--data.env"),
    Wrong("a split of a file", "sft sft.toml --data.split test", key="--data.split"),
    Wrong("batches of broken groups", "rl rl.toml --orchestrator.batch_size 12", key="--orchestrator.batch_size"),
    Wrong("an unknown algorithm", "rl rl.toml --orchestrator.algo.type gpro", key="--orchestrator.algo.type"),
    Wrong("greedy training", "rl rl.toml --orchestrator.train.sampling.temperature 0",
          key="--orchestrator.train.sampling.temperature"),
    Wrong("a policy that is not the model", "rl rl.toml --orchestrator.policy.name other",
          key="--orchestrator.policy.name"),
    Wrong("attn_implementation", "rl rl.toml --model.attn_implementation sdpa", key="--model.attn_implementation"),
    Wrong("use_liger_kernel", "rl rl.toml --trainer.use_liger_kernel true", key="--trainer.use_liger_kernel"),
    Wrong("deepspeed", "rl rl.toml --trainer.deepspeed zero3.json", key="--trainer.deepspeed"),
    Wrong("kwargs of no reward", "rl short.yaml", {"short.yaml": SHORT + "rewards: {kwargs: {brevity: {limit: 3}}}\n"},
          key="rewards.kwargs.brevity", file="short.yaml"),
    Wrong("an unknown objective", "rl short.yaml --objective.name grpo", {"short.yaml": SHORT}, key="--objective.name"),
    Wrong("an optimizer of another trainer", "rl short.yaml --trainer.optim lion", {"short.yaml": SHORT},
          key="--trainer.optim"),
]  # fmt: skip
ALL = [*NOT_A_RUN, *VALUES]


def commands(wrong: Wrong) -> list[str]:
    starts_run = wrong.command.split()[0] in ("rl", "sft") and "--dry-run" not in wrong.command
    return [wrong.command, f"{wrong.command} --dry-run"] if starts_run else [wrong.command]


@pytest.fixture(scope="module")
def attempts() -> Iterator[Attempts]:
    server = Attempts()
    yield server
    server.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory without weights, which nothing reads that is refused in time."""
    directory = tmp_path_factory.mktemp("models") / "model"
    directory.mkdir()
    byte_tokenizer(("system", "user", "assistant")).save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    template = resources.files("headrace.trainer").joinpath("chat_template.jinja").read_text()
    (directory / "chat_template.jinja").write_text(template)
    return directory


@pytest.fixture
def folder(tmp_path: Path, model: Path) -> Path:
    write(tmp_path, {"rl.toml": RL, "sft.toml": SFT, "data.jsonl": DATA}, model)
    return tmp_path


def write(folder: Path, files: Mapping[str, str | bytes], model: Path) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        content = content.encode() if isinstance(content, str) else content
        (folder / name).write_bytes(content.replace(b"MODEL", str(model).encode()))


def attempt(attempts: Attempts, folder: Path, model: Path, command: str) -> Outcome:
    variables = {"HEADRACE_CACHE": str(model.parent / "cache"), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return attempts.try_command(shlex.split(command.replace("MODEL", str(model))), folder, variables)


@pytest.mark.parametrize(
    ("wrong", "command"), [pytest.param(wrong, each, id=wrong.name) for wrong in ALL for each in commands(wrong)]
)
def test_a_wrong_input_is_named_before_anything_starts(
    wrong: Wrong, command: str, attempts: Attempts, folder: Path, model: Path
) -> None:
    write(folder, wrong.files, model)
    before = contents(folder)
    outcome = attempt(attempts, folder, model, command)
    assert "Traceback" not in outcome.err
    assert outcome.code == 2, outcome
    assert outcome.started == ()
    assert not outcome.imported_torch
    assert contents(folder) == before
    if wrong.says is not None:
        assert wrong.says in outcome.err
        return
    places = [(problem.key, problem.file and Path(problem.file).name, problem.line) for problem in outcome.problems]
    assert any(
        (wrong.key is None or key == wrong.key)
        and (wrong.file is None or file == Path(wrong.file).name)
        and (wrong.line is None or line == wrong.line)
        for key, file, line in places
    ), outcome.problems
    assert wrong.key or wrong.file, "a case says what its error names"


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file, except what Python compiles, and every folder."""
    return {
        path: path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts
    }


@pytest.mark.parametrize("command", ["rl rl.toml --dry-run", "sft sft.toml --dry-run"])
def test_the_files_that_the_wrong_inputs_begin_from_are_right(
    command: str, attempts: Attempts, folder: Path, model: Path
) -> None:
    outcome = attempt(attempts, folder, model, command)
    assert (outcome.code, outcome.started, outcome.imported_torch) == (0, (), False), outcome


def test_each_wrong_input_has_a_name_of_its_own() -> None:
    names = [wrong.name for wrong in ALL]
    assert len(set(names)) == len(names)
