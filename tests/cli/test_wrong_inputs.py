"""Wrong inputs: each is refused with exit code 2 and the key or the file at fault, before anything is started.

To add one, add a `Wrong` to a table and run `make snapshots`, which records its message in tests/snapshots. Every one
that starts a run is tried with and without `--dry-run`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from headrace.text.tokenizer import byte_tokenizer
from headrace.trainer.tiny import write_tiny_settings
from tests.cli.attempts import Attempts, Outcome
from tests.snapshots import SnapshotPage

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
MINE = """
from headrace.environments.base import Environment

class Mine(Environment):
    def __init__(self):
        pass

    def tasks(self):
        return []
"""
LOSS = "--trainer.loss.type custom --trainer.loss.import_path my_loss:loss"
LINEAR = json.dumps({"model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"]})
FUYU = json.dumps({"model_type": "fuyu", "text_config": {"model_type": "persimmon"}})
TOKENIZER = byte_tokenizer(("user",)).to_str()
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


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
    by_argparse: bool = False
    """Whether argparse refuses it, whose errors have no fields."""


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
    Wrong("replay of nothing", "replay outputs/none 3", key="RUN"),
    Wrong("replay without a step", "replay folder", {"folder/config.toml": ""}, key="STEP"),
    Wrong("replay of a run without steps", "replay folder 3", {"folder/config.toml": RL}, key="STEP"),
    Wrong(
        "replay with another algorithm",
        "replay folder 3 --algo.type grpo",
        {"folder/config.toml": RL},
        key="--algo.type",
    ),
    Wrong("export of nothing", "export outputs/none model", key="RUN|CHECKPOINT"),
    Wrong("export into a folder with files", "export outputs/none folder", {"folder/file": ""}, key="DIR"),
    Wrong("eval of an empty folder", "eval folder --env reverse-text", {"folder/file": ""}, key="CHECKPOINT"),
]
SOME_RATIOS = '[[orchestrator.train.env]]\nid = "copy"\nratio = 1\n[[orchestrator.train.env]]\nid = "reverse-text"\n'
SHORT = "model: MODEL\ndata: {provider: arithmetic}\ntrainer: {max_steps: 3}\n"
BY_PATH = SHORT + "objective: {kwargs: {additional_rewards: ['my_rewards:brevity']}}\n"
BREVITY = "def brevity(completions, limit=3):\n    return [0.0 for _ in completions]\n"
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
    Wrong("thoughts in latent space with vLLM",
          "rl rl.toml --model.latents hybrid --orchestrator.max_async_level 0 --inference.engine vllm",
          key="--inference.engine"),
    Wrong("thoughts in latent space of an older policy", "rl rl.toml --model.latents hybrid",
          key="orchestrator.max_async_level"),
    Wrong("greedy training", "rl rl.toml --orchestrator.train.sampling.temperature 0",
          key="--orchestrator.train.sampling.temperature"),
    Wrong("a policy that is not the model", "rl rl.toml --orchestrator.policy.name other",
          key="--orchestrator.policy.name"),
    Wrong("attn_implementation", "rl rl.toml --model.attn_implementation sdpa", key="--model.attn_implementation"),
    Wrong("use_liger_kernel", "rl rl.toml --trainer.use_liger_kernel true", key="--trainer.use_liger_kernel"),
    Wrong("deepspeed", "rl rl.toml --trainer.deepspeed zero3.json", key="--trainer.deepspeed"),
    Wrong("kwargs of no reward", "rl short.yaml", {"short.yaml": SHORT + "rewards: {kwargs: {brevity: {limit: 3}}}\n"},
          key="rewards.kwargs.brevity", file="short.yaml"),
    Wrong("kwargs of a misspelt reward path", "rl short.yaml",
          {"short.yaml": BY_PATH + "rewards: {kwargs: {brevty: {limit: 3}}}\n", "my_rewards.py": BREVITY},
          key="rewards.kwargs.brevty", file="short.yaml"),
    Wrong("a misspelt kwarg of a reward by path", "rl short.yaml",
          {"short.yaml": BY_PATH + "rewards: {kwargs: {brevity: {limt: 3}}}\n", "my_rewards.py": BREVITY},
          key="rewards.kwargs.my_rewards:brevity.limt", file="short.yaml"),
    Wrong("a misspelt kwarg of a reward", "rl short.yaml",
          {"short.yaml": SHORT + "rewards: {kwargs: {length_penalty_reward: {cache_dr: x}}}\n"},
          key="rewards.kwargs.length_penalty_reward.cache_dr", file="short.yaml"),
    Wrong("an unknown objective", "rl short.yaml --objective.name grpo", {"short.yaml": SHORT}, key="--objective.name"),
    Wrong("an optimizer of another trainer", "rl short.yaml --trainer.optim lion", {"short.yaml": SHORT},
          key="--trainer.optim"),
]  # fmt: skip

FILES = [
    Wrong("a run file that is not there", "rl none.toml", file="none.toml"),
    Wrong("no run file", "rl", by_argparse=True),
    Wrong("a directory", "rl folder", {"folder/file": ""}, file="folder"),
    Wrong("an empty run file", "rl empty.toml", {"empty.toml": ""}, file="empty.toml"),
    Wrong("UTF-16", "rl wide.toml", {"wide.toml": RL.encode("utf-16")}, file="wide.toml"),
    Wrong("UTF-16 without a byte order mark", "rl wide.toml", {"wide.toml": RL.encode("utf-16-le")}, file="wide.toml"),
    Wrong("UTF-16 in YAML", "rl wide.yaml", {"wide.yaml": SHORT.encode("utf-16")}, file="wide.yaml"),
    Wrong("Latin-1", "rl old.toml", {"old.toml": "max_steps = 3\n# für\n".encode("latin-1")}, file="old.toml", line=2),
    Wrong("JSON", "rl run.json", {"run.json": '{"max_steps": 3}'}, file="run.json"),
    Wrong("JSON in TOML", "sft run.toml", {"run.toml": '{"max_steps": 3}'}, file="run.toml"),
    Wrong("TOML syntax", "rl bad.toml", {"bad.toml": "max_steps = 3\nseq_len 128\n"}, file="bad.toml", line=2),
    Wrong("a TOML key twice", "rl bad.toml", {"bad.toml": "seq_len = 3\nseq_len = 4\n"}, file="bad.toml", line=2),
    Wrong("YAML syntax", "rl bad.yaml", {"bad.yaml": "model: a\ndata: {provider: [a\n"}, file="bad.yaml", line=3),
    Wrong("a tab in YAML", "rl bad.yaml", {"bad.yaml": "model: a\ndata:\n\tprovider: a\n"}, file="bad.yaml", line=3),
    Wrong("a YAML key twice", "rl bad.yaml", {"bad.yaml": "model: a\nmodel: b\n"}, file="bad.yaml", line=2),
    Wrong("a YAML list", "rl bad.yaml", {"bad.yaml": "- model\n"}, file="bad.yaml"),
    Wrong("a key without dashes", "rl rl.toml max_steps=3", file="max_steps=3"),
    Wrong("an RL file for sft", "sft rl.toml", file="rl.toml"),
    Wrong("a YAML file of RL for sft", "sft short.yaml", {"short.yaml": SHORT}, file="short.yaml"),
    Wrong("an SFT file for rl", "rl sft.toml", file="sft.toml"),
    Wrong("a single table of environments", "rl single.toml",
          {"single.toml": RL.replace("[[orchestrator.train.env]]", "[orchestrator.train.env]")},
          key="orchestrator.train.env", file="single.toml"),
    Wrong("a misspelt key", "rl more.toml rl.toml", {"more.toml": "max_step = 3"}, key="max_step", file="more.toml"),
    Wrong("text for a number", "rl rl.toml more.toml", {"more.toml": "seq_len = 'long'"}, key="seq_len",
          file="more.toml"),
    Wrong("two models in one file", "rl rl.toml more.toml", {"more.toml": "[model]\nname = 'a'\ninit = 'tiny'"},
          key="model.init", file="more.toml"),
    Wrong("two sources of examples in one file", "sft sft.toml more.toml",
          {"more.toml": "[data]\npath = 'data.jsonl'\nenv = 'copy'"}, key="data.env", file="more.toml"),
]  # fmt: skip
COMMAND_LINE = [
    Wrong("a misspelt command", "lr rl.toml", key="COMMAND"),
    Wrong("a run file without a command", "rl.toml", key="COMMAND"),
    Wrong("a flag given twice", "rl rl.toml --max_steps 3 --max_steps 4", key="--max_steps"),
    Wrong("a flag given twice in two spellings", "rl rl.toml --max_steps 3 --max-steps=4", key="--max_steps"),
    Wrong("a misspelt override", "rl rl.toml --max_step 4", key="--max_step"),
    Wrong("an override of an unknown section", "rl rl.toml --trainr.optim.lr 1e-5", key="--trainr"),
    Wrong("an override without its value", "rl rl.toml --max_steps", key="--max_steps"),
    Wrong("text for a number on the command line", "rl rl.toml --seq_len long", key="--seq_len"),
    Wrong("a number out of range", "sft sft.toml --max_steps -1", key="--max_steps"),
    Wrong("an environment beyond the last", "rl rl.toml --orchestrator.train.env.1.id copy",
          key="--orchestrator.train.env.1.id"),
    Wrong("a key below a value", "rl rl.toml --seq_len.most 4", key="--seq_len.most"),
    Wrong("a required key taken back", "rl rl.toml --seq_len null", key="--seq_len"),
    Wrong("a model taken back", "rl rl.toml --model.name null", key="model"),
    Wrong("resume of a step that is no number", "rl rl.toml --resume first", key="--resume"),
    Wrong("resume of a run that is not there", "rl rl.toml --resume", key="--resume"),
]  # fmt: skip

ENV = "orchestrator.train.env.0"
SHOUT = """
from headrace.environments import environment

def brief(text, data, weight=1.0):
    return weight / (1 + len(text))

@environment(data=lambda: [{"word": "river"}], rewards=[brief])
def shout(row):
    return row["word"]
"""
LONG_DATA = "".join(f'{{"prompt": "{"x" * 300}", "completion": "{number}"}}\n' for number in range(3))
CHECKED_FIRST = [
    Wrong("an unknown environment", f"rl rl.toml --{ENV}.id reverse-txt", key=f"{ENV}.id"),
    Wrong(
        "an unknown environment to evaluate in",
        "rl rl.toml more.toml",
        {"more.toml": "[[orchestrator.eval.env]]\nid = 'x'"},
        key="orchestrator.eval.env.0.id",
    ),
    Wrong(
        "an argument that the environment does not take",
        f"rl rl.toml --{ENV}.args.colour red",
        key=f"{ENV}.args.colour",
    ),
    Wrong("an environment whose module is not there", f"rl rl.toml --{ENV}.id my_env:Mine", key=f"{ENV}.id"),
    Wrong(
        "an environment whose module raises",
        f"rl rl.toml --{ENV}.id my_env:Mine",
        {"my_env.py": "\n1 / 0\n"},
        key=f"{ENV}.id",
        file="my_env.py",
        line=2,
    ),
    Wrong(
        "an environment whose module is not Python",
        f"rl rl.toml --{ENV}.id my_env:Mine",
        {"my_env.py": "x = 1\nclass Mine(:\n"},
        key=f"{ENV}.id",
        file="my_env.py",
        line=2,
    ),
    Wrong(
        "an environment whose module lacks the class",
        f"rl rl.toml --{ENV}.id my_env:Mine",
        {"my_env.py": ""},
        key=f"{ENV}.id",
    ),
    Wrong(
        "a misspelt reward of an environment",
        f"rl rl.toml --{ENV}.id my_env:shout --{ENV}.args.rewards.brief my_env.py:breif",
        {"my_env.py": SHOUT},
        key=f"{ENV}.args.rewards.brief",
    ),
    Wrong(
        "a misspelt argument of an environment",
        f"rl rl.toml --{ENV}.id arithmetic --{ENV}.args.ters true",
        key=f"{ENV}.args.ters",
    ),
    Wrong(
        "a misspelt table of rewards of an environment",
        f"rl rl.toml --{ENV}.id my_env:shout --{ENV}.args.reward.brief my_env.py:brief",
        {"my_env.py": SHOUT},
        key=f"{ENV}.args.reward",
    ),
    Wrong(
        "a misspelt weight of a reward of an environment",
        f"rl rl.toml --{ENV}.id my_env:shout --{ENV}.args.rewards.brief.name my_env:brief "
        f"--{ENV}.args.rewards.brief.wieght 2",
        {"my_env.py": SHOUT},
        key=f"{ENV}.args.rewards.brief.wieght",
    ),
    Wrong(
        "a misspelt kwarg of a metric of an environment",
        f"rl rl.toml --{ENV}.id my_env:shout --{ENV}.args.metrics.brief.name my_env:brief "
        f"--{ENV}.args.metrics.brief.kwargs.wheight 2",
        {"my_env.py": SHOUT},
        key=f"{ENV}.args.metrics.brief.kwargs.wheight",
    ),
    Wrong(
        "an environment that is not one",
        f"rl rl.toml --{ENV}.id my_env:Mine",
        {"my_env.py": "class Mine: pass"},
        key=f"{ENV}.id",
    ),
    Wrong(
        "an environment that raises when it is made",
        f"rl rl.toml --{ENV}.id my_env:Mine",
        {"my_env.py": MINE.replace("pass", "raise RuntimeError('no')")},
        key=f"{ENV}.id",
        file="my_env.py",
    ),
    Wrong("an environment without tasks", f"rl rl.toml --{ENV}.id my_env:Mine", {"my_env.py": MINE}, key=f"{ENV}.id"),
    Wrong(
        "a renderer that is not there",
        "rl rl.toml --orchestrator.renderer.name qwen33",
        key="orchestrator.renderer.name",
    ),
    Wrong("a renderer of sft that is not there", "sft sft.toml --renderer.name qwen33", key="renderer.name"),
    Wrong(
        "an option that the renderer does not have",
        "rl rl.toml --orchestrator.renderer.name llama-3 --orchestrator.renderer.tool_parser glm",
        key="orchestrator.renderer.tool_parser",
    ),
    Wrong(
        "an algorithm whose module is not there", "rl rl.toml --orchestrator.algo my_algo:Mine", key="orchestrator.algo"
    ),
    Wrong(
        "an algorithm of one environment whose module is not there",
        f"rl rl.toml --{ENV}.algo my_algo:Mine",
        key=f"{ENV}.algo",
    ),
    Wrong(
        "an algorithm whose module raises",
        "rl rl.toml --orchestrator.algo my_algo:Mine",
        {"my_algo.py": "1 / 0"},
        key="orchestrator.algo",
        file="my_algo.py",
        line=1,
    ),
    Wrong("a loss whose module is not there", f"rl rl.toml {LOSS}", key="trainer.loss.import_path"),
    Wrong(
        "a loss whose module lacks the function",
        f"rl rl.toml {LOSS}",
        {"my_loss.py": "import torch\n"},
        key="trainer.loss.import_path",
    ),
    Wrong(
        "a loss that does not take its kwargs",
        f"rl rl.toml {LOSS} --trainer.loss.kwargs.beta 1",
        {"my_loss.py": "import torch\ndef loss(inputs, alpha=1): ...\n"},
        key="trainer.loss.import_path",
        file="my_loss.py",
        line=2,
    ),
    Wrong(
        "a loss whose module is not Python",
        f"rl rl.toml {LOSS}",
        {"my_loss.py": "def loss(\n"},
        key="trainer.loss.import_path",
        file="my_loss.py",
    ),
    Wrong(
        "a filter whose module is not there",
        'rl rl.toml --orchestrator.post_batch_filters \'[{type = "custom", import_path = "my_filter:f"}]\'',
        key="orchestrator.post_batch_filters.0.import_path",
    ),
    Wrong("a model directory that is not there", "rl rl.toml --model.name ./none", key="model.name"),
    Wrong("a model of sft that is not there", "sft sft.toml --model.name ./none", key="model.name"),
    Wrong("a model without config.json", "rl rl.toml --model.name ./folder", {"folder/file": ""}, key="model.name"),
    Wrong("a model without a tokenizer", "rl rl.toml --model.name ./folder", {"folder/config.json": "{}"}, key="model"),
    Wrong("a model on a hub that cannot be reached", "rl rl.toml --model.name owner/none", key="model.name"),
    Wrong(
        "a model that the engine does not compute",
        "rl rl.toml --model.name ./linear",
        {"linear/config.json": LINEAR, "linear/tokenizer.json": TOKENIZER, "linear/chat_template.jinja": TEMPLATE},
        key="model.name",
    ),
    Wrong(
        "serve of a model that the engine does not compute",
        "serve linear",
        {"linear/config.json": LINEAR},
        "model.name",
    ),
    *(
        Wrong(
            f"{command} a multimodal model",
            f"{line} fuyu",
            {"fuyu/config.json": FUYU, "fuyu/tokenizer.json": TOKENIZER, "fuyu/chat_template.jinja": TEMPLATE},
            "model.name",
        )
        for command, line in (("a run of", "rl rl.toml --model.name"), ("serve of", "serve"))
    ),
    Wrong(
        "a start model whose run file is not there",
        "rl start.toml",
        {"start.toml": RL.replace('name = "MODEL"', 'sft = "none.toml"')},
        key="model.sft",
    ),
    Wrong(
        "a start model whose data is not there",
        "rl start.toml",
        {
            "start.toml": RL.replace('name = "MODEL"', 'sft = "sft.toml"'),
            "sft.toml": SFT.replace("data.jsonl", "none.jsonl"),
        },
        key="data.path",
    ),
    Wrong("a seq_len below the shortest prompt", "rl rl.toml --seq_len 8", key="seq_len"),
    Wrong(
        "max_tokens above seq_len",
        "rl rl.toml --orchestrator.train.sampling.max_tokens 129",
        key="orchestrator.train.sampling.max_tokens",
    ),
    Wrong(
        "max_tokens of an environment above seq_len",
        f"rl rl.toml --{ENV}.sampling.max_tokens 129",
        key=f"{ENV}.sampling.max_tokens",
    ),
    Wrong("an output_dir below a file", "rl rl.toml --output_dir data.jsonl/out", key="output_dir"),
    Wrong("an output_dir that is a file", "rl rl.toml --output_dir data.jsonl", key="output_dir"),
    Wrong("an output_dir of sft below a file", "sft sft.toml --output_dir data.jsonl/out", key="output_dir"),
    Wrong("SFT data that is not there", "sft sft.toml --data.path none.jsonl", key="data.path", file="none.jsonl"),
    Wrong("SFT data that is empty", "sft sft.toml", {"data.jsonl": ""}, key="data.path", file="data.jsonl"),
    Wrong("SFT data in another format", "sft sft.toml --data.path data.csv", {"data.csv": "a,b"}, key="data.path"),
    Wrong(
        "SFT data with other columns",
        "sft sft.toml",
        {"data.jsonl": '{"question": "a", "answer": "b"}'},
        key="data.path",
    ),
    Wrong(
        "SFT data that lacks a named column",
        "sft sft.toml --data.columns.prompt question",
        key="data.columns.prompt",
    ),
    Wrong("SFT data that is not JSON", "sft sft.toml", {"data.jsonl": DATA + "{"}, key="data.path"),
    Wrong("SFT examples that are all cut to nothing", "sft sft.toml", {"data.jsonl": LONG_DATA}, key="seq_len"),
    Wrong(
        "a validation file that is not there",
        "sft sft.toml --validation.path none.jsonl",
        key="validation.path",
        file="none.jsonl",
    ),
    Wrong(
        "an environment without demonstrations",
        "sft env.toml",
        {"env.toml": SFT.replace('path = "data.jsonl"', 'env = "my_env:Mine"'), "my_env.py": MINE},
        key="data.env",
    ),
]
ALL = [*NOT_A_RUN, *FILES, *COMMAND_LINE, *VALUES, *CHECKED_FIRST]


def commands(wrong: Wrong) -> list[str]:
    starts_run = wrong.command.split()[0] in ("rl", "sft") and "--dry-run" not in wrong.command
    return [wrong.command, f"{wrong.command} --dry-run"] if starts_run else [wrong.command]


@pytest.fixture(scope="module")
def attempts(model: Path) -> Iterator[Attempts]:
    cache = str(model.parent / "cache")
    server = Attempts({"HEADRACE_CACHE": cache, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""})
    yield server
    server.close()


@pytest.fixture(scope="module")
def messages() -> Iterator[SnapshotPage]:
    page = SnapshotPage("messages")
    yield page
    page.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory without weights, which nothing reads that is refused in time."""
    directory = tmp_path_factory.mktemp("models") / "model"
    write_tiny_settings(directory)
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
    return attempts.try_command(shlex.split(command.replace("MODEL", str(model))), folder)


@pytest.mark.parametrize(
    ("wrong", "command"), [pytest.param(wrong, each, id=wrong.name) for wrong in ALL for each in commands(wrong)]
)
def test_a_wrong_input_is_named_before_anything_starts(
    wrong: Wrong, command: str, attempts: Attempts, messages: SnapshotPage, folder: Path, model: Path
) -> None:
    write(folder, wrong.files, model)
    before = contents(folder)
    outcome = attempt(attempts, folder, model, command)
    assert "Traceback" not in outcome.err
    assert outcome.code == 2, outcome
    assert outcome.started == ()
    assert not outcome.imported_torch
    assert contents(folder) == before
    if command == wrong.command:
        messages.check(wrong.name, f"$ headrace {command}\n{outcome.err}", {str(folder): "DIR", str(model): "MODEL"})
    if wrong.by_argparse:
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


ROOM = "[orchestrator]\nmax_inflight_rollouts = 7\n"
START = RL.replace('name = "MODEL"', 'sft = "sft.toml"')
ACCEPTED: dict[str, Mapping[str, str | bytes]] = {
    "rl rl.toml": {},
    "sft sft.toml": {},
    "rl @ rl.toml": {},
    "rl bom.toml": {"bom.toml": b"\xef\xbb\xbf" + RL.encode()},
    "rl bom.yaml": {"bom.yaml": b"\xef\xbb\xbf" + SHORT.encode()},
    "rl start.toml --model.name MODEL": {"start.toml": START},
    "rl start.toml --model.sft null --model.name MODEL": {"start.toml": START},
    "rl rl.toml --orchestrator.max_inflight_rollouts null": {"rl.toml": RL.replace("[model]", ROOM + "[model]")},
    "rl rl.toml more.toml": {
        "rl.toml": RL.replace("[model]", ROOM + "[model]"),
        "more.toml": ROOM.replace("7", '"null"'),
    },
}
"""Command lines with the files that they need, each once refused or easily taken for wrong."""


@pytest.mark.parametrize("command", ACCEPTED)
def test_inputs_that_are_right_pass_a_dry_run(command: str, attempts: Attempts, folder: Path, model: Path) -> None:
    write(folder, ACCEPTED[command], model)
    outcome = attempt(attempts, folder, model, f"{command} --dry-run")
    started = [process for process in outcome.started if "nvidia-smi" not in process]  # where there is a GPU
    assert (outcome.code, started, outcome.imported_torch) == (0, [], False), outcome


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("--orchestrator.renderer.name qwen33", "orchestrator.renderer.name"),
        ("--inference.renderer.name qwen33", "inference.renderer.name"),
    ],
)
def test_a_value_that_another_section_takes_over_is_reported_where_it_is_written(
    override: str, key: str, attempts: Attempts, folder: Path, model: Path
) -> None:
    outcome = attempt(attempts, folder, model, f"rl rl.toml {override} --dry-run")
    assert [problem.key for problem in outcome.problems] == [key]


def test_each_wrong_input_has_a_name_and_a_message_of_its_own(messages: SnapshotPage) -> None:
    names = [wrong.name for wrong in ALL]
    assert len(set(names)) == len(names)
    assert messages.titles == set(names)
    assert len({(wrong.command, str(wrong.files)) for wrong in ALL}) == len(ALL) >= 60
