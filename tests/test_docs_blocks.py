"""Every fenced block of the README, of docs/ and of the examples is run, checked with the real parsers, or marked.

A block may be marked on the line before it: `<!-- run by tests/x.py -->` names a test that runs it, and
`<!-- not run: REASON -->` says why it cannot be run here. `headrace` commands are parsed in any case, run files loaded.
"""

import ast
import json
import re
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from headrace.cli.main import main, parse
from headrace.cli.serve import read_target
from headrace.config.dpo import DpoConfig
from headrace.config.sft import SftConfig
from headrace.launch.own_code import add_code_folders
from headrace.launch.saved_config import kind_of, kind_of_tree
from headrace.runfile.reading import load
from headrace.runfile.run import RunConfig
from headrace.tools.sweep.config import SweepConfig

REPOSITORY = Path(__file__).parents[1]
PAGES = [
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")),
    *sorted((REPOSITORY / "docs").rglob("*.md")),
    *sorted((REPOSITORY / "examples").rglob("*.md")),
]
BLOCK = re.compile(r"^(?:<!-- ([^\n]*) -->\n)?```(\w*)(?: title=\"(.*?)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TARGETS = set((REPOSITORY / "Makefile").read_text().partition(".PHONY:")[2].partition("\n")[0].split())
SHOWN = {"text", "mermaid"}
"""Output, layouts and pictures."""
QUICK = {"completion", "config", "env", "examples"}
"""Commands that are run as they are, as are dry runs of files that ship."""
RUN = """
output_dir = "outputs/docs"
max_steps = 1
seq_len = 2048
model = { name = "any" }
"""
BASES = {
    RunConfig: RUN + '[[orchestrator.train.env]]\nid = "reverse-text"\n',
    SftConfig: RUN + 'data = { path = "any.jsonl" }\n',
    DpoConfig: RUN + 'data = { path = "any.jsonl" }\ndpo = {}\n',
}
"""What a part of a run file is added to."""
SHORT = "{model: any, data: {provider: arithmetic}, objective: {name: token_grpo}, trainer: {max_steps: 1}}"
"""The same for a run file of data, rewards and an objective."""


class Block(NamedTuple):
    page: Path
    line: int
    mark: str
    language: str
    title: str
    text: str

    @property
    def is_run_by_a_test(self) -> bool:
        return self.mark.startswith("run by ")

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(REPOSITORY)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    content = page.read_text()
    found = BLOCK.finditer(content)
    return [Block(page, content.count("\n", 0, m.start(4)), *(part or "" for part in m.groups())) for m in found]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def of(*languages: str) -> Any:
    return pytest.mark.parametrize("block", [b for b in BLOCKS if b.language in languages], ids=lambda b: b.name)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a run, and with the examples as after `headrace examples --copy`."""
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "run").symlink_to(REPOSITORY / "tests/data/recorded-runs/rl")
    (tmp_path / "few_commas.py").write_text("def few_commas(text, data, weight=0.1):\n    return weight\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_block_has_a_language_and_every_mark_a_reason_or_a_test(page: Path):
    content = page.read_text()
    assert len(blocks_of(page)) * 2 == len(re.findall(r"^ *```", content, re.MULTILINE)), "an unusual fence"
    for block in blocks_of(page):
        assert block.language in {"bash", "console", "json", "jsonl", "python", "toml", "yaml", *SHOWN}, block.name
        if block.is_run_by_a_test:
            test = REPOSITORY / block.mark.removeprefix("run by ")
            assert page.name in test.read_text() or "tutorials" in test.name, block.name
        elif block.mark:
            assert re.match(r"not run: \w+ \w+", block.mark), block.name


def commands_of(block: Block) -> list[list[str]]:
    """The words of each command, without variables before it, comments, and what follows a pipe."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    found = []
    for line in lines:
        line = re.sub(r'^eval "\$\((.*?)\)"', r"\1", line)
        line = re.sub(r"^until (.*); do .*", r"\1", line).removesuffix(" &")
        for part in re.split(r" (?:\||&&) ", line):
            words = shlex.split(part.partition(" < ")[0], comments=True)
            if "headrace" in words and words[0] in {"podman", "ray"}:  # a command within one
                found.append(words[words.index("headrace", words[0] == "podman" and 6) :])
            while words and re.match(r"\w+=", words[0]):
                del words[0]
            if words:
                found.append(words)
    return found


@of("bash", "console")
def test_a_command_is_known_with_its_files_and_keys(block: Block, folder: Path, capsys: pytest.CaptureFixture[str]):
    for words in commands_of(block):
        program, *arguments = words
        if program == "headrace":
            check_headrace(arguments)
        elif program == "make":
            assert {word for word in arguments if "=" not in word} <= TARGETS, words
        elif program == "python" and arguments[0] == "-m" and arguments[1].startswith("benchmarks"):
            module = REPOSITORY / arguments[1].replace(".", "/")
            assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file(), words
        elif program == "python" and arguments[0].startswith("examples/"):
            assert Path(arguments[0]).is_file()
        else:
            assert block.mark, f"{block.name}: {program} is not run, and no mark says why"


def check_headrace(arguments: list[str]) -> None:
    if arguments == ["--version"]:
        return
    parsed = parse(arguments)
    files = [Path(file) for file in getattr(parsed, "files", [])]
    is_shipped = all(file.is_file() and file.parts[0] == "examples" for file in files)
    if (parsed.command in QUICK and "--copy" not in arguments) or (is_shipped and files and "--dry-run" in arguments):
        assert main(arguments) == 0
    elif parsed.command == "serve":
        Path("model").mkdir(exist_ok=True)
        Path("model/config.json").write_text("{}")
        read_target("model", parsed.overrides)
    elif parsed.command in {"rl", "sft", "dpo", "prepare", "manifest", "demo"}:
        for file in files:
            if not file.is_file():
                file.parent.mkdir(parents=True, exist_ok=True)
                kind = {"sft": SftConfig, "dpo": DpoConfig}.get(parsed.command, RunConfig)
                file.write_text(SHORT if file.suffix == ".yaml" else BASES[kind])
        add_code_folders(files)
        load(kind_of(files) or RunConfig, files, parsed.overrides)


@of("toml", "yaml")
def test_a_run_file_or_a_part_of_one_is_loaded(block: Block, folder: Path):
    tree = tomllib.loads(block.text) if block.language == "toml" else yaml.safe_load(block.text)
    if block.mark:
        return
    if "run" in tree:
        SweepConfig.model_validate(tree)
        return
    found = kind_of_tree({} if block.language == "toml" else yaml.safe_load(SHORT)) or kind_of_tree(tree)
    kind = found or next(kind for kind in BASES if set(tree) <= set(kind.model_fields))
    base, part = folder / f"base.{block.language}", folder / f"part.{block.language}"
    base.write_text(SHORT if block.language == "yaml" else BASES[kind])
    part.write_text(block.text)
    load(kind, [base, part])


@of("json", "jsonl")
def test_json_is_parsed(block: Block):
    assert all(isinstance(json.loads(line), dict) for line in block.text.splitlines())


@of("python")
def test_python_that_no_other_test_runs_is_executed(block: Block, folder: Path):
    program = compile(block.text, block.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if not block.mark:
        exec(program, {"__name__": "documented"})
