"""What the README shows is true: its files load, its environment runs, its links lead somewhere."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from headrace.cli.main import parse
from headrace.environments.base import tasks_of
from headrace.environments.registry import load_environment
from headrace.environments.script import play
from headrace.runfile.reading import load, validate
from headrace.runfile.run import RunConfig

REPOSITORY = Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text()


def blocks(language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return [text for found, text in fenced if found == language]


def test_the_commands_of_the_table_exist():
    for name in re.findall(r"`headrace ([a-z-]+)", README.split("## Commands")[1]):
        with pytest.raises(SystemExit) as ended:
            parse([name, "--help"])
        assert ended.value.code == 0


def test_the_dry_run_prints_a_run_file_that_loads(capfd: pytest.CaptureFixture[str]):
    command = next(line for line in "".join(blocks("bash")).splitlines() if "--dry-run" in line)
    words = command.partition("#")[0].split()
    subprocess.run([sys.executable, "-m", *words], cwd=REPOSITORY, check=True)
    tree = tomllib.loads(capfd.readouterr().out)
    assert tree["trainer"]["optim"]["lr"] == 1e-4
    validate(RunConfig, tree, "dry run")


def test_the_run_file_loads_and_agrees_with_the_example():
    text, _ = blocks("toml")
    shown, _ = validate(RunConfig, tomllib.loads(text), "README")
    example = tomllib.loads((REPOSITORY / "examples/reverse-text/rl.toml").read_text())
    for key in ("output_dir", "max_steps", "seq_len"):
        assert str(getattr(shown, key)) == str(example[key])
    assert shown.trainer.optim.lr == example["trainer"]["optim"]["lr"]
    assert shown.orchestrator.batch_size == example["orchestrator"]["batch_size"]


def test_the_algorithms_of_two_environments_are_as_the_page_says():
    run, algorithms = (tomllib.loads(text) for text in blocks("toml"))
    run["orchestrator"] |= algorithms["orchestrator"]
    config, _ = validate(RunConfig, run, "README")
    first, second = (config.orchestrator.algo_of(env) for env in config.orchestrator.train.env)
    assert (first.type, second.type) == ("grpo", "max_rl")


async def test_the_environment_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (source,) = blocks("python")
    (tmp_path / "my_module.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    environment = load_environment("my_module:shout", {})
    for task in tasks_of(environment, "shout"):
        (rollout,), _ = await play(environment, task, lambda messages: messages[-1]["content"].split()[1].upper())
        assert rollout.rewards == {"exact": 1.0}


def test_the_short_run_file_loads_with_a_reward_that_lies_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (text,) = blocks("yaml")
    (tmp_path / "brief.yaml").write_text(text)
    reward = "def few_commas(prompts, completions, answers, infos):\n    return [0.0] * len(completions)\n"
    (tmp_path / "my_rewards.py").write_text(reward)
    monkeypatch.syspath_prepend(tmp_path)
    config, _ = load(RunConfig, [tmp_path / "brief.yaml"])
    (env,) = config.orchestrator.train.env
    assert (env.id, env.args["objective_kwargs"]["additional_rewards"]) == ("hackable", ["my_rewards:few_commas"])
    assert (config.max_steps, config.orchestrator.group_size, config.trainer.optim.lr) == (200, 8, 1e-6)


def test_make_demo_is_the_command_that_users_run():
    command = ["make", "--no-print-directory", "-n", "demo"]
    shown = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    assert shown.rstrip().endswith("headrace demo")


PAGES = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md"), *(REPOSITORY / "examples").rglob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_link_leads_to_a_file(page: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path = target.partition("#")[0]
        assert not path or "://" in path or (page.parent / path).exists(), target


def test_the_index_lists_every_page():
    index = REPOSITORY / "docs" / "index.md"
    listed = {(index.parent / target).resolve() for target in re.findall(r"\]\(([^)]+)\)", index.read_text())}
    assert {page for page in index.parent.rglob("*.md") if page != index} <= listed


def test_the_readme_fits_ten_minutes():
    assert len(README.splitlines()) <= 200
