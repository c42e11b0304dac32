"""examples/hackable-gsm8k: all files are understood, at full size and in miniature, and every command of its page.

That the miniature learns what the page says is in tests/end_to_end/test_gsm8k_example.py.
"""

import importlib
import re
import shlex
import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from types import ModuleType

import datasets
import pytest

from headrace.cli.main import main, parse
from headrace.environments.registry import load_environment
from headrace.environments.strict_format import StrictFormat
from headrace.runfile.reading import load
from headrace.runfile.run import RunConfig

REPOSITORY = Path(__file__).parents[3]
EXAMPLE = REPOSITORY / "examples" / "hackable-gsm8k"
README = (EXAMPLE / "README.md").read_text()
MINIATURE = EXAMPLE / "miniature"
SWEEPS = {
    "lambda-sweep": 8,
    "two-stage": 4,
    "interaction-and-gate": 8,
    "utilisation": 4,
    "length-ablation": 8,
    "math-levels": 5,
}
"""By file, how many runs it has."""


@pytest.fixture(autouse=True)
def folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands write below the working directory, and make the code beside their files importable."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    for name in ("HEADRACE_CACHE", "HF_HOME"):
        monkeypatch.setenv(name, "")  # what a command sets is taken back at the end
        monkeypatch.delenv(name)
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def thoughts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(MINIATURE)
    return importlib.import_module("thoughts")


def commands() -> list[list[str]]:
    fenced = re.findall(r"^```bash\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    lines = "".join(fenced).replace("\\\n", "").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("headrace ")]


def test_every_file_of_the_folder_is_on_its_page():
    files = {path.relative_to(EXAMPLE) for path in EXAMPLE.rglob("*") if path.suffix in (".yaml", ".toml", ".py")}
    assert files >= {Path(f"{name}.yaml") for name in SWEEPS}
    assert not [file for file in files if str(file) not in README]


def test_every_command_of_the_page_is_understood_and_names_files_that_exist():
    found = commands()
    assert {command[0] for command in found} == {"rl", "sft", "sweep", "eval"}
    for command in found:
        assert parse(command).command == command[0]
        named = [word for word in command if word.startswith("examples/")]
        assert all((REPOSITORY / word).is_file() for word in named), command


def test_every_link_of_the_page_leads_to_a_file():
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", README):
        assert (EXAMPLE / target).is_file(), target


@pytest.mark.parametrize("overlay", [[], [MINIATURE / "sweep.yaml"]], ids=["full size", "miniature"])
@pytest.mark.parametrize("sweep", SWEEPS)
def test_all_runs_of_a_sweep_can_be_started(sweep: str, overlay: list[Path], capsys: pytest.CaptureFixture[str]):
    assert main(["sweep", *map(str, [EXAMPLE / f"{sweep}.yaml", *overlay]), "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith(f"{SWEEPS[sweep]} runs in ")


def test_a_run_of_its_own_is_gsm8k_math_by_level_or_the_miniature():
    gsm8k, _ = load(RunConfig, [EXAMPLE / "base.yaml"], ["--data.kwargs.source", "data/gsm8k"])
    (trained,), (held_out,) = gsm8k.orchestrator.train.env, gsm8k.orchestrator.eval.env
    assert trained.args["provider_kwargs"] == {"split": "train", "source": "data/gsm8k"}
    assert held_out.args["provider_kwargs"] == {"split": "test", "source": "data/gsm8k"}
    math, _ = load(RunConfig, [EXAMPLE / "base.yaml", EXAMPLE / "math.yaml"], ["--data.kwargs.levels", "[1, 2]"])
    (trained,) = math.orchestrator.train.env
    assert (trained.name, trained.args["provider_kwargs"]["levels"]) == ("math", [1, 2])
    assert trained.args["reward_kwargs"]["gsm8k_correctness_reward"] == {"symbolic": True}


def test_llama_trains_in_bfloat16_below_its_storage_root(tmp_path: Path):
    root = tmp_path / "cache"
    from_hub, _ = load(RunConfig, [EXAMPLE / "llama32-3b.yaml"])
    assert from_hub.model.name == "meta-llama/Llama-3.2-3B-Instruct"
    assert from_hub.launch.env == {"HEADRACE_CACHE": str(root), "HF_HOME": str(root / "hf")}
    (root / "models/meta-llama/Llama-3.2-3B-Instruct").mkdir(parents=True)
    (root / "datasets/openai/gsm8k").mkdir(parents=True)
    config, _ = load(RunConfig, [EXAMPLE / "llama32-3b.yaml"])
    assert config.model.name == str(root / "models/meta-llama/Llama-3.2-3B-Instruct")
    assert {section.model.dtype for section in (config, config.trainer, config.inference)} == {"bfloat16"}
    assert config.output_dir == root / "artifacts/runs/gsm8k-llama32-3b"
    (trained,), (held_out,) = config.orchestrator.train.env, config.orchestrator.eval.env
    assert trained.args["reward_kwargs"]["length_penalty_reward"] == {"cache_dir": str(root / "models")}
    for env, split in ((trained, "train"), (held_out, "test")):
        assert env.args["provider_kwargs"] == {"source": str(root / "datasets/openai/gsm8k"), "split": split}
    assert config.launch.env["HF_HUB_OFFLINE"] == "1"


def test_llama_has_the_run_of_the_base_file():
    base, llama = (load(RunConfig, [EXAMPLE / f"{name}.yaml"])[0] for name in ("base", "llama32-3b"))
    assert (
        llama.orchestrator.train.env[0].args["objective_kwargs"]
        == base.orchestrator.train.env[0].args["objective_kwargs"]
    )
    for key in ("max_steps", "seq_len"):
        assert getattr(llama, key) == getattr(base, key)
    for key in ("optim", "scheduler", "ckpt", "loss"):
        assert getattr(llama.trainer, key) == getattr(base.trainer, key)


@pytest.mark.parametrize("command", ["rl", "sweep"])
def test_what_the_page_starts_with_llama_passes_a_dry_run(command: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)  # where it is set, a model that is not here is refused
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)  # neither download the data nor retry for a minute
    (words,) = [words for words in commands() if words[0] == command and "llama32-3b.yaml" in shlex.join(words)]
    assert main([*words, "--dry-run"]) == 0


def test_the_miniature_has_the_objective_of_the_full_size(thoughts: ModuleType):
    full, _ = load(RunConfig, [EXAMPLE / "base.yaml"])
    small, _ = load(RunConfig, [EXAMPLE / "base.yaml", MINIATURE / "rl.yaml"])
    assert small.model.sft == MINIATURE / "sft.toml"
    of_full, of_small = (config.orchestrator.train.env[0].args for config in (full, small))
    for part in ("objective", "objective_kwargs", "reward_kwargs"):
        assert of_small[part] == of_full[part]
    assert load_environment("hackable", of_small).tasks()


def test_every_sum_has_one_level_and_no_split_has_those_of_another(thoughts: ModuleType):
    by_level = {level: {sample.prompt for sample in thoughts.sums(levels=[level])} for level in range(1, 6)}
    everything = [sample.prompt for sample in thoughts.sums()]
    assert sorted(everything) == sorted(prompt for prompts in by_level.values() for prompt in prompts)
    assert by_level[1] <= {f"{a}{sign}{b}" for a in (0, 1) for b in (0, 1) for sign in "+-"}
    assert not {sample.prompt for sample in thoughts.sums(split="eval")} & set(everything)


def test_demonstrations_think_once_to_six_times_right_or_wrong(thoughts: ModuleType):
    shown = list(islice(thoughts.Thoughts(mistakes=0.25, malformed=0.1).demonstrations(0), 2000))
    answers = {sample.prompt: sample.answer for sample in thoughts.sums()}
    parsed = [(shown.messages[0]["content"], StrictFormat().parse(shown.messages[1]["content"])) for shown in shown]
    whole = [(answers[asked] == reply.answer, len(reply.thinking.split())) for asked, reply in parsed if reply]
    assert len(whole) / len(shown) == pytest.approx(0.9, abs=0.03)
    assert sum(right for right, _ in whole) / len(whole) == pytest.approx(0.75, abs=0.05)
    for right in (True, False):
        lengths = Counter(lines for was_right, lines in whole if was_right == right)
        assert sorted(lengths) == [1, 2, 3, 4, 5, 6]
        assert sum(lines * times for lines, times in lengths.items()) / lengths.total() == pytest.approx(3.5, abs=0.3)
